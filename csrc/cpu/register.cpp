// Registers the CPU kernels, in the best variant this processor runs.
#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../torch/operators.h"
#include "../torch/registration.h"
#include "kernels.h"

namespace specdec {
namespace {

struct Variant {
  const char* name;
  const Kernels* kernels;
  bool supported;
};

bool cpu_has_avx512() {
#ifdef SPECDEC_HAVE_AVX512
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool cpu_has_avx2() {
#ifdef SPECDEC_HAVE_AVX2
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

// Best first; the baseline runs everywhere.
const Variant& choose_variant() {
  static const Variant variants[] = {
#ifdef SPECDEC_HAVE_AVX512
      {"avx512", &avx512::kKernels, cpu_has_avx512()},
#endif
#ifdef SPECDEC_HAVE_AVX2
      {"avx2", &avx2::kKernels, cpu_has_avx2()},
#endif
      {"baseline", &baseline::kKernels, true},
  };
  const char* wanted = std::getenv("SPECDEC_CPU_CAPABILITY");
  for (const Variant& v : variants) {
    if (v.supported && (wanted == nullptr || std::strcmp(wanted, v.name) == 0)) return v;
  }
  throw std::runtime_error(
      std::string("SPECDEC_CPU_CAPABILITY must name a variant that was built and that this "
                  "processor runs (avx512, avx2, baseline), got \"") +
      wanted + "\"");
}

const Variant& variant() {
  static const Variant& chosen = choose_variant();
  return chosen;
}

ThreadPool thread_pool() {
  const auto run = [](int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                      void* context) {
    torch::stable::parallel_for(0, n, grain,
                                [=](int64_t begin, int64_t end) { body(begin, end, context); });
  };
  return {run, static_cast<int64_t>(torch::stable::get_num_threads())};
}

template <auto Kernel, typename Call>
void run(const Call& call) {
  (variant().kernels->*Kernel)(call.params, thread_pool());
}

}  // namespace
}  // namespace specdec

// Read by specdec_ext/backend.py through ctypes, which no exception may cross: null where
// SPECDEC_CPU_CAPABILITY asks for what is not there.
extern "C" __attribute__((visibility("default"))) const char* specdec_cpu_capability() {
  try {
    return specdec::variant().name;
  } catch (const std::exception&) {
    return nullptr;
  }
}

extern "C" __attribute__((visibility("default"))) const char* specdec_cpu_variants() {
  return
#ifdef SPECDEC_HAVE_AVX512
      "avx512,"
#endif
#ifdef SPECDEC_HAVE_AVX2
      "avx2,"
#endif
      "baseline";
}

SPECDEC_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) {
  using namespace specdec;
#define SPECDEC_IMPLEMENT(name, Name) \
  m.impl(#name, Operator<check_##name, run<&Kernels::name, Name##Call>>::boxed);
  SPECDEC_KERNELS(SPECDEC_IMPLEMENT)
#undef SPECDEC_IMPLEMENT
}
