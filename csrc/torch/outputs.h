// Fresh outputs of an operator.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "checker.h"

namespace specdec {

template <typename T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
inline constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kScalarType<double> = ScalarType::Double;
template <>
inline constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;
template <>
inline constexpr ScalarType kScalarType<uint64_t> = ScalarType::Long;  // bits

inline Tensor new_tensor(const Tensor& like, Shape shape, ScalarType type) {
  return torch::stable::new_empty(like, {shape.begin(), shape.size()}, type);
}

// A contiguous tensor, whose data goes to `data`.
template <typename T>
Tensor new_output(const Tensor& like, Shape shape, T** data) {
  Tensor output = new_tensor(like, shape, kScalarType<T>);
  *data = static_cast<T*>(output.mutable_data_ptr());
  return output;
}

}  // namespace specdec
