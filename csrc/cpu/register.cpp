// Registers the CPU kernels, in the best variant this processor runs.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../torch/checker.h"
#include "../torch/operators.h"
#include "../torch/registration.h"
#include "kernels.h"
#include "ranks.h"

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

// ---- several ranks ---

// Python's side of an exchange (specdec_ext/distributed) keeps what went wrong there, and gives
// back a tensor of another size.
Tensor exchange(const Ranks& ranks, const Tensor& mine, int64_t expected) {
  const int64_t name = *static_cast<const int64_t*>(ranks.context);
  std::array<StableIValue, 2> stack{torch::stable::detail::from(mine),
                                    torch::stable::detail::from(name)};
  const bool failed = torch_call_dispatcher(SPECDEC_TEXT(SPECDEC_NAMESPACE) "::_exchange", "",
                                            stack.data(), TORCH_ABI_VERSION) != 0;
  if (failed) throw std::runtime_error("verify_sharded: there is no exchange between ranks");
  Tensor found = torch::stable::detail::to<Tensor>(stack[0]);
  if (found.numel() != expected) {
    throw std::runtime_error("verify_sharded: an exchange between ranks failed");
  }
  return found;
}

Tensor new_on_cpu(int64_t size, ScalarType type) {
  return torch::stable::empty({&size, 1}, type, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

void gather(const Ranks& ranks, const void* mine, int64_t bytes, void* all) {
  Tensor sent = new_on_cpu(bytes, ScalarType::Byte);
  std::memcpy(sent.mutable_data_ptr(), mine, bytes);
  const Tensor found = exchange(ranks, sent, ranks.count * bytes);
  std::memcpy(all, found.const_data_ptr(), ranks.count * bytes);
}

void sum(const Ranks& ranks, int64_t* values, int64_t n) {
  Tensor sent = new_on_cpu(n, ScalarType::Long);
  std::memcpy(sent.mutable_data_ptr(), values, n * sizeof(int64_t));
  const Tensor found = exchange(ranks, sent, n);
  std::memcpy(values, found.const_data_ptr(), n * sizeof(int64_t));
}

void run_sharded(const VerifyShardedCall& call) {
  const VerifyShardedParams& p = call.params;
  Ranks ranks;
  ranks.rank = p.rank;
  ranks.count = p.count;
  ranks.bounds = p.bounds;
  ranks.target_tail = p.target_tail;
  ranks.draft_tail = p.draft_tail;
  ranks.gather = gather;
  ranks.sum = sum;
  int64_t name = p.exchange;
  ranks.context = &name;
  ThreadPool pool = thread_pool();
  pool.ranks = &ranks;
  variant().kernels->verify(p.verify, pool);
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

// The namespace of the operators in torch.ops, read by specdec_ext/_ops.py.
extern "C" __attribute__((visibility("default"))) const char* specdec_namespace() {
  return SPECDEC_TEXT(SPECDEC_NAMESPACE);
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
  m.impl("_verify_sharded", Operator<check_verify_sharded, run_sharded>::boxed);
}
