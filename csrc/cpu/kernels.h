// The kernels of one instruction set. register.cpp picks a set at load time.
#pragma once

#include "../core/params.h"
#include "../core/platform.h"
#include "../torch/operators.h"
#include "threads.h"

namespace specdec {

struct Kernels {
#define SPECDEC_FIELD(name, Name) void (*name)(const Name##Params&, const ThreadPool&);
  SPECDEC_KERNELS(SPECDEC_FIELD)
#undef SPECDEC_FIELD
};

#define SPECDEC_DECLARE(name, Name) void name(const Name##Params&, const ThreadPool&);
#define SPECDEC_NAME(name, Name) name,
#define SPECDEC_DECLARE_KERNELS(isa)                         \
  namespace isa {                                            \
  SPECDEC_KERNELS(SPECDEC_DECLARE)                           \
  constexpr Kernels kKernels{SPECDEC_KERNELS(SPECDEC_NAME)}; \
  }

SPECDEC_DECLARE_KERNELS(baseline)
SPECDEC_DECLARE_KERNELS(avx2)
SPECDEC_DECLARE_KERNELS(avx512)

#undef SPECDEC_DECLARE
#undef SPECDEC_NAME
#undef SPECDEC_DECLARE_KERNELS

}  // namespace specdec
