// Registers the CUDA kernels: each runs on its tensors' device, on torch's current stream there,
// with scratch memory from torch's caching allocator. Nothing waits for the device, so that all of
// it can be captured into a graph.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "../torch/operators.h"
#include "../torch/registration.h"
#include "kernels.h"

namespace specdec {
namespace {

const Tensor& first_of(const Tensor& output) { return output; }

template <typename... Tensors>
const Tensor& first_of(const std::tuple<Tensors...>& outputs) {
  return std::get<0>(outputs);
}

// Memory that is given back when the operator returns: to the stream's pool, behind the kernels
// that were enqueued.
struct Scratch {
  const Tensor& like;
  std::vector<Tensor> blocks;

  static void* allocate(void* scratch, int64_t bytes) {
    Scratch& s = *static_cast<Scratch*>(scratch);
    s.blocks.push_back(
        torch::stable::new_empty(s.like, {bytes}, torch::headeronly::ScalarType::Byte));
    return s.blocks.back().mutable_data_ptr();
  }
};

template <auto Kernel, typename Call>
void run(const Call& call) {
  const Tensor& output = first_of(call.outputs);
  const int32_t device = output.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  Scratch scratch{output, {}};
  Kernel(call.params, cuda::Gpu{cuda::chip_of(device), stream, Scratch::allocate, &scratch});
}

}  // namespace
}  // namespace specdec

SPECDEC_LIBRARY_IMPL(SPECDEC_NAMESPACE, CUDA, m) {
  using namespace specdec;
#define SPECDEC_IMPLEMENT(name, Name) \
  m.impl(#name, Operator<check_##name, run<cuda::name, Name##Call>>::boxed);
  SPECDEC_KERNELS(SPECDEC_IMPLEMENT)
#undef SPECDEC_IMPLEMENT
}
