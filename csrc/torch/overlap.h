// Whether tensors that an operator writes to share memory.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace specdec {

// Whether any byte belongs to an element of both. Exact, whatever their strides.
bool share_elements(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

}  // namespace specdec
