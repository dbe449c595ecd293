// What lets one header serve a host compiler and nvcc.
#pragma once

#include <cstdint>

// Every inline function of csrc/core and csrc/cpu lives in specdec::SPECDEC_CPU_ISA. The CPU
// kernels are compiled once per instruction set; were their inline functions to share a name, the
// linker would keep one copy of each, possibly the AVX-512 one, and older machines would die on it.
#ifndef SPECDEC_CPU_ISA
#define SPECDEC_CPU_ISA common
#endif

#ifdef __CUDACC__
#define SPECDEC_HD __host__ __device__ __forceinline__
#else
#define SPECDEC_HD inline
#endif

// Code of CUDA kernels, by nvcc or, in their stand-in, by the host's compiler: what lies in memory
// has one layout in both.
#if defined(__CUDACC__) || defined(SPECDEC_ON_FIBRES)
#define SPECDEC_ON_GPU 1
#else
#define SPECDEC_ON_GPU 0
#endif

#ifdef SPECDEC_ON_FIBRES
#include "../testing/stand_in.h"
#endif

// Whether there is code for draft laws that are lists of tokens (TokenLists). The CUDA kernels for
// them are compiled apart, from cuda/verify_lists.cu and cuda/verify_tree_lists.cu, in a namespace
// of their own: the others have no trace of it.
#ifndef SPECDEC_LISTS
#define SPECDEC_LISTS !SPECDEC_ON_GPU
#endif

namespace specdec {
namespace SPECDEC_CPU_ISA {

constexpr bool kLists = SPECDEC_LISTS != 0;

// Lowers a number to `value` if it is above; returns what it was. Threads of a GPU may share it.
SPECDEC_HD int32_t lower(int32_t* number, int32_t value) {
#if defined(__CUDA_ARCH__) || defined(SPECDEC_ON_FIBRES)
  return atomicMin(number, value);
#else
  const int32_t old = *number;
  if (value < old) *number = value;
  return old;
#endif
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
