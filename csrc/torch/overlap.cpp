#include "overlap.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace specdec {
namespace {

using torch::stable::Tensor;

// A number of steps, from `least` to `most`, of so many bytes each.
struct Steps {
  int64_t bytes, least, most;
};

int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// The dimensions of two tensors as steps from a byte of one to a byte of the other. Dimensions of
// one stride are taken together, because only the difference of their indices counts.
class Distances {
 public:
  void add(const Tensor& t, bool is_first) {
    const auto bytes = static_cast<int64_t>(t.element_size());
    for (int64_t d = 0; d < t.dim(); ++d) add(t.stride(d) * bytes, t.size(d) - 1, is_first);
    add(1, bytes - 1, is_first);
  }

  // Whether some steps of each sum up to `distance`, by a search from the widest ones on: where
  // dimensions lie within each other, no more than a few numbers of steps are tried of each.
  bool reach(int64_t distance) {
    const auto wider = [](const Steps& a, const Steps& b) { return a.bytes > b.bytes; };
    std::sort(steps_.begin(), steps_.end(), wider);
    return reach(distance, 0);
  }

 private:
  void add(int64_t bytes, int64_t most, bool is_first) {
    if (most == 0 || bytes == 0) return;
    for (Steps& steps : steps_) {
      if (steps.bytes != bytes) continue;
      (is_first ? steps.most : steps.least) += is_first ? most : -most;
      return;
    }
    steps_.push_back({bytes, is_first ? 0 : -most, is_first ? most : 0});
  }

  bool reach(int64_t distance, size_t from) const {
    if (from == steps_.size()) return distance == 0;
    int64_t least = 0, most = 0;  // bytes by the narrower steps
    for (size_t i = from + 1; i < steps_.size(); ++i) {
      least += steps_[i].least * steps_[i].bytes;
      most += steps_[i].most * steps_[i].bytes;
    }
    const Steps& steps = steps_[from];
    const int64_t first = -floor_of(most - distance, steps.bytes);
    const int64_t last = floor_of(distance - least, steps.bytes);
    for (int64_t k = std::max(first, steps.least); k <= std::min(last, steps.most); ++k) {
      if (reach(distance - k * steps.bytes, from + 1)) return true;
    }
    return false;
  }

  std::vector<Steps> steps_;
};

}  // namespace

bool share_elements(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  Distances distances;
  distances.add(a, true);
  distances.add(b, false);
  // a + (bytes within a) = b + (bytes within b)
  const auto address = [](const Tensor& t) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.const_data_ptr()));
  };
  return distances.reach(address(b) - address(a));
}

}  // namespace specdec
