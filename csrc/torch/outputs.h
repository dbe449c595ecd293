// Fresh outputs of an operator.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "checker.h"

namespace specdec {

inline Tensor new_tensor(const Tensor& like, Shape shape, ScalarType type) {
  return torch::stable::new_empty(like, {shape.begin(), shape.size()}, type);
}

template <typename T>
T* data_of(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace specdec
