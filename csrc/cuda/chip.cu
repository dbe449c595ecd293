// What is asked of a device once: its properties, and to load the kernels.
#include <map>
#include <mutex>

#include "launch.cuh"

namespace specdec {
namespace cuda {
namespace {

// Gives the architecture that they were compiled for.
int load_kernels() {
  Loading load;
#define SPECDEC_LOAD(name, Name) load_##name(load);
  SPECDEC_KERNELS(SPECDEC_LOAD)
#undef SPECDEC_LOAD
  return load.compiled_for();
}

#ifdef SPECDEC_ON_FIBRES

Chip properties_of(int32_t) { return {fibres::multiprocessors(), true}; }

struct LoadingInCapture {};

#else

int attribute_of(int32_t device, cudaDeviceAttr attribute) {
  int value = 0;
  throw_unless_done("properties of the device", cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Whether chained launches can be captured into graphs.
bool captures_chains() {
  constexpr int kFirst = 12030;  // CUDA 12.3
  int version = 0;
  throw_unless_done("version of the driver", cudaDriverGetVersion(&version));
  return version >= kFirst;
}

Chip properties_of(int32_t device) {
  return {attribute_of(device, cudaDevAttrMultiProcessorCount),
          attribute_of(device, cudaDevAttrComputeCapabilityMajor) >= 9 && captures_chains()};
}

// While it lives this thread may load kernels although it captures a stream.
class LoadingInCapture {
 public:
  LoadingInCapture() { exchange(); }
  ~LoadingInCapture() { exchange(); }
  LoadingInCapture(const LoadingInCapture&) = delete;
  LoadingInCapture& operator=(const LoadingInCapture&) = delete;

 private:
  void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

#endif

}  // namespace

Chip chip_of(int32_t device) {
  static std::mutex mutex;
  static std::map<int32_t, Chip> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  [[maybe_unused]] const LoadingInCapture loading;
  Chip chip = properties_of(device);
  const int compiled_for = load_kernels();
  // Code for what is older does not wait for the launch before, whatever the device could do.
  chip.chains = chip.chains && compiled_for >= 90;
  return known[device] = chip;
}

}  // namespace cuda
}  // namespace specdec
