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
