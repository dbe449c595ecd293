// Drives the CPU kernels through their parameter structs, without torch, and the host's text
// search, for a build with AddressSanitizer and UndefinedBehaviorSanitizer (`make sanitize`).
//
// Every array is a heap allocation of exactly the bytes that its strides reach, so that one element
// too far is a finding. Shapes, dtypes, strides, filters, rules, masks, maps and values (NaN, +inf,
// ids out of range, parameters out of range) are drawn from a counter; what comes out is checked
// for the structure that no input may break.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "../cpu/kernels.h"
#include "../host/suffix_trie.h"
#include "../host/text_search.h"

namespace specdec {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// splitmix64: the same cases on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return uniform() < p; }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal() {  // near enough
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  uint64_t state_;
};

// Heap arrays of exact size that live as long as a case.
class Arena {
 public:
  template <typename T>
  T* make(int64_t n) {
    blocks_.emplace_back(new char[static_cast<size_t>(n) * sizeof(T)]);
    return reinterpret_cast<T*>(blocks_.back().get());
  }

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "sanitize: %s\n", what);
  std::abort();
}

void require(bool good, const char* what) {
  if (!good) fail(what);
}

uint16_t half_bits(Element element, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (element == Element::kBFloat16) return static_cast<uint16_t>(bits >> 16);
  if (std::isnan(x)) return 0x7E00;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float size = std::fabs(x);
  if (size >= 65504.0f) return static_cast<uint16_t>(sign | (std::isinf(x) ? 0x7C00 : 0x7BFF));
  if (size < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint16_t>(size * 0x1p24f));
  std::memcpy(&bits, &size, sizeof bits);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}

// A case draws its shapes, then its arrays.
struct Case {
  Random random;
  Arena arena;
  bool wild;  // values that the device has to report or survive

  explicit Case(uint64_t seed) : random(seed), wild(random.chance(0.5)) {}

  float logit(int style) {
    switch (style) {
      case 0:
        return static_cast<float>(3.0 * random.normal());
      case 1:
        return static_cast<float>(random.below(4));  // ties
      case 2:
        return random.chance(0.7) ? -INFINITY : static_cast<float>(random.normal());
      case 3:
        return random.pick({3e38f, -3e38f, 1e-40f, 0.0f, -0.0f, 88.0f, -104.0f, 65504.0f});
      case 4:
        return random.chance(0.01) ? random.pick({NAN, INFINITY}) : 1.0f;
      case 5:
        return -INFINITY;
      default: {
        const uint32_t raw = static_cast<uint32_t>(random.bits());  // any bits at all
        float x;
        std::memcpy(&x, &raw, sizeof x);
        return x;
      }
    }
  }

  float probability(int style) {
    if (style == 0) return static_cast<float>(random.uniform());
    if (style == 1) return random.chance(0.8) ? 0.0f : 1.0f;
    if (style == 2) return 0.0f;
    return random.pick({0.5f, -1.0f, NAN, INFINITY, 1e-38f, 3e38f});
  }

  void fill_row(void* data, Element element, int64_t begin, int64_t vocab, bool probs) {
    const int styles = probs ? (wild ? 4 : 2) : (wild ? 7 : 3);
    const int style = static_cast<int>(random.below(styles));
    const bool repeat = random.chance(0.2);
    const float same = probs ? probability(style) : logit(style);
    for (int64_t i = 0; i < vocab; ++i) {
      const float x = repeat ? same : probs ? probability(style) : logit(style);
      if (element == Element::kFloat32) {
        static_cast<float*>(data)[begin + i] = x;
      } else {
        static_cast<uint16_t*>(data)[begin + i] = half_bits(element, x);
      }
    }
  }

  // [outer, inner, vocab], its dimensions in either order, rows apart by up to three entries.
  RowBatch rows(int64_t outer, int64_t inner, int64_t vocab, bool probs = false) {
    RowBatch batch;
    batch.element = random.pick({Element::kFloat32, Element::kBFloat16, Element::kFloat16});
    batch.vocab = vocab;
    const int64_t pitch = vocab + random.below(4);
    const bool transposed = random.chance(0.3);
    batch.stride[0] = transposed ? pitch : inner * pitch;
    batch.stride[1] = transposed ? outer * pitch : pitch;
    if (random.chance(0.1)) batch.stride[0] = 0;  // expanded
    const bool any = outer > 0 && inner > 0;
    const int64_t last = (outer - 1) * batch.stride[0] + (inner - 1) * batch.stride[1] + vocab;
    const int64_t bytes = batch.element == Element::kFloat32 ? 4 : 2;
    char* data = arena.make<char>(any ? last * bytes : 0);
    std::memset(data, 0, static_cast<size_t>(any ? last * bytes : 0));
    for (int64_t b = 0; b < outer; ++b) {
      for (int64_t s = 0; s < inner; ++s) {
        fill_row(data, batch.element, b * batch.stride[0] + s * batch.stride[1], vocab, probs);
      }
    }
    batch.data = data;
    return batch;
  }

  // The same rows, packed and addressed by an index that may point nowhere.
  RowBatch packed_rows(int64_t outer, int64_t inner, int64_t vocab, bool probs = false) {
    const int64_t count = 1 + random.below(outer * inner + 2);
    RowBatch batch = rows(count, 1, vocab, probs);
    batch.num_rows = count;
    batch.index = ids(outer, inner, [&] {
      return wild && random.chance(0.1) ? random.pick<int64_t>({-1, count, INT64_MIN, INT64_MAX})
                                        : random.below(count);
    });
    return batch;
  }

  RowBatch any_rows(int64_t outer, int64_t inner, int64_t vocab, bool probs = false) {
    return random.chance(0.3) ? packed_rows(outer, inner, vocab, probs)
                              : rows(outer, inner, vocab, probs);
  }

  template <typename T, typename Value>
  Array<T> array(int64_t outer, int64_t inner, const Value& value) {
    Array<T> result;
    const int64_t step = 1 + random.below(2);
    result.stride[0] = inner * step + random.below(2);
    result.stride[1] = step;
    const bool any = outer > 0 && inner > 0;
    const int64_t n = any ? (outer - 1) * result.stride[0] + (inner - 1) * result.stride[1] + 1 : 0;
    T* data = arena.make<T>(n);
    for (int64_t i = 0; i < n; ++i) data[i] = T{};
    for (int64_t b = 0; b < outer; ++b) {
      for (int64_t s = 0; s < inner; ++s) {
        data[b * result.stride[0] + s * result.stride[1]] = static_cast<T>(value());
      }
    }
    result.data = data;
    return result;
  }

  template <typename Value>
  IdArray ids(int64_t outer, int64_t inner, const Value& value) {
    IdArray result;
    result.is_int64 = random.chance(0.5);
    const auto copy = [&](const auto& from) {
      result.data = from.data;
      std::copy(from.stride, from.stride + 2, result.stride);
    };
    if (result.is_int64) {
      copy(array<int64_t>(outer, inner, value));
    } else {
      copy(array<int32_t>(outer, inner,
                          [&] { return std::clamp<int64_t>(value(), INT32_MIN, INT32_MAX); }));
    }
    return result;
  }

  float parameter(std::initializer_list<float> good) {
    return wild && random.chance(0.1) ? random.pick({-1.0f, NAN, INFINITY, -INFINITY, 1e30f})
                                      : random.pick(good);
  }

  SamplingParams sampling(int64_t batch) {
    SamplingParams p;
    if (random.chance(0.6)) {
      p.temperature = array<float>(
          batch, 1, [&] { return parameter({1.0f, 0.0f, 0.3f, 1e-5f, 40.0f, 1e-7f}); });
    }
    if (random.chance(0.5)) {
      p.top_k = ids(batch, 1, [&] {
        return random.pick<int64_t>({0, -1, 1, 2, 50, 5000, INT64_MAX, INT64_MIN});
      });
    }
    if (random.chance(0.5)) {
      p.top_p = array<float>(batch, 1, [&] { return parameter({0.9f, 1.0f, 0.0f, 0.5f, 2.0f}); });
    }
    if (random.chance(0.4)) {
      p.min_p = array<float>(batch, 1, [&] { return parameter({0.1f, 0.0f, 1.0f, 1e-30f}); });
    }
    return p;
  }

  Randomness randomness(int64_t batch, int64_t n, bool need_seeds) {
    Randomness r;
    const auto any = [&] { return static_cast<int64_t>(random.bits()); };
    if (need_seeds || random.chance(0.4)) {
      r.seeds = array<int64_t>(batch, 1, any);
      r.positions = array<int64_t>(batch, 1, any);
      r.stream = static_cast<uint32_t>(random.below(256));
    } else {
      r.uniforms = array<double>(batch, n, [&] {
        if (wild && random.chance(0.1)) return random.pick({kNaN, -1.0, 1.0, kInf, -kInf, 1e300});
        return random.chance(0.1) ? random.pick({0.0, 1.0 - 0x1p-53}) : random.uniform();
      });
    }
    return r;
  }

  TokenMask mask(int64_t outer, int64_t inner, int64_t words, int64_t num_tokens) {
    TokenMask m;
    if (!random.chance(0.4)) return m;
    const int64_t pitch = words + random.below(3);
    m.stride[0] = inner * pitch;
    m.stride[1] = pitch;
    m.num_tokens = num_tokens;
    const bool any = outer > 0 && inner > 0;
    const int64_t n = any ? (outer * inner - 1) * pitch + words : 0;
    uint32_t* data = arena.make<uint32_t>(n);
    const bool empty = random.chance(0.1);
    for (int64_t i = 0; i < n; ++i) data[i] = empty ? 0u : static_cast<uint32_t>(random.bits());
    m.words = data;
    return m;
  }

  // Distinct ids in [0, num_tokens), or, sometimes, not.
  TokenMap map(int64_t num_entries, int64_t num_tokens, int64_t range) {
    TokenMap m;
    if (num_entries > range || !random.chance(0.4)) return m;
    std::vector<int64_t> tokens(static_cast<size_t>(range));
    for (int64_t i = 0; i < range; ++i) tokens[static_cast<size_t>(i)] = i;
    for (int64_t i = range - 1; i > 0; --i) {
      std::swap(tokens[static_cast<size_t>(i)], tokens[static_cast<size_t>(random.below(i + 1))]);
    }
    if (wild && num_entries > 0 && random.chance(0.3)) {
      tokens[static_cast<size_t>(random.below(num_entries))] =
          random.pick<int64_t>({-1, range, INT64_MAX, INT64_MIN, tokens[0]});
    }
    int64_t next = 0;
    m.ids = ids(num_entries, 1, [&] { return tokens[static_cast<size_t>(next++)]; });
    m.num_entries = num_entries;
    m.num_tokens = num_tokens;
    return m;
  }

  // Which tokens the entries of `draft` are of, [outer, inner] rows of it.
  TokenLists lists(const RowBatch& draft, int64_t outer, int64_t inner, int64_t num_tokens) {
    TokenLists l;
    l.width = draft.vocab;
    l.rows = inner;
    const int64_t number = draft.index.data != nullptr ? draft.num_rows : outer * inner;
    int64_t* data = arena.make<int64_t>(number * l.width);
    for (int64_t row = 0; row < number; ++row) {
      const int64_t first = random.below(num_tokens);
      for (int64_t k = 0; k < l.width; ++k) {
        const int64_t token = k < num_tokens ? (first + k) % num_tokens : -1;
        const bool odd = wild && random.chance(0.02);
        data[row * l.width + k] =
            odd ? random.pick<int64_t>({-1, -2, first, num_tokens, INT64_MAX, INT64_MIN}) : token;
      }
    }
    l.ids.data = data;
    l.ids.is_int64 = true;
    l.ids.stride[0] = (draft.index.data != nullptr ? 1 : inner) * l.width;
    l.ids.stride[1] = l.width;
    return l;
  }
};

// Runs ranges one after the other, the last one first, as any pool may.
ThreadPool pool_of(int64_t threads) {
  const auto run = [](int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                      void* context) {
    const int64_t step = std::max<int64_t>(grain, (n + 2) / 3);
    for (int64_t begin = (n - 1) / step * step; begin >= 0; begin -= step) {
      body(begin, std::min(begin + step, n), context);
    }
  };
  return {run, threads};
}

int64_t any_vocab(Random& random) {
  return random.chance(0.7) ? 1 + random.below(70)
                            : random.pick<int64_t>({255, 256, 257, 1023, 4095, 4096, 4097, 9001});
}

bool has(Rule rule, Trait trait) { return (kRules[static_cast<int>(rule)].traits & trait) != 0; }

// As csrc/torch does: a list is read where a draft law is, and over the target's vocabulary.
template <typename Params>
void take_lists(Case& c, int64_t inner, Params* p) {
  p->draft_is_probs = true;
  p->map = TokenMap{};
  if (has(p->rule, kReadsDraftLaw)) {
    p->lists = c.lists(p->draft, p->batch, inner, p->target.vocab);
  }
  p->draft.vocab = p->target.vocab;
}

Rule any_rule(Random& random, Trait family) {
  for (;;) {
    const auto rule = static_cast<Rule>(random.below(static_cast<int64_t>(std::size(kRules))));
    if (has(rule, family)) return rule;
  }
}

void run_row_law(Case& c, const Kernels& kernels, const ThreadPool& pool) {
  RowLawParams p;
  p.rows = c.random.below(5);
  const int64_t vocab = any_vocab(c.random);
  p.logits = c.rows(p.rows, 1, vocab);
  p.mask = c.mask(p.rows, 1, (vocab + 31) / 32, vocab);
  p.sampling = c.sampling(p.rows);
  p.max = c.arena.make<float>(p.rows);
  p.scale = c.arena.make<double>(p.rows);
  p.cutoff = c.arena.make<float>(p.rows);
  p.log_z = c.arena.make<double>(p.rows);
  p.argmax = c.arena.make<int64_t>(p.rows);
  kernels.row_law(p, pool);
  for (int64_t r = 0; r < p.rows; ++r) {
    require(p.argmax[r] >= -1 && p.argmax[r] < vocab, "row_law: argmax out of range");
    require((p.argmax[r] == -1) == std::isnan(p.log_z[r]), "row_law: half a law");
  }
}

void run_sample(Case& c, const Kernels& kernels, const ThreadPool& pool) {
  SampleParams p;
  p.batch = c.random.below(5);
  const int64_t vocab = any_vocab(c.random);
  p.logits = c.rows(p.batch, 1, vocab);
  const int64_t range = vocab + c.random.below(40);
  p.map = c.map(vocab, int64_t{1} << 31, range);
  const bool is_mapped = p.map.ids.data != nullptr;
  const int64_t words = is_mapped ? 1 + c.random.below(4) : (vocab + 31) / 32;
  p.mask = c.mask(p.batch, 1, words, is_mapped ? 32 * words : vocab);
  p.sampling = c.sampling(p.batch);
  p.domain = 1 + static_cast<uint32_t>(c.random.below(3));
  p.randomness = c.randomness(p.batch, 1, p.domain == 3);
  p.draft_index = static_cast<uint32_t>(c.random.below(65536));
  p.tokens = c.arena.make<int64_t>(p.batch);
  p.logprobs = c.arena.make<float>(p.batch);
  kernels.sample(p, pool);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t end = is_mapped ? int64_t{1} << 31 : vocab;
    require(p.tokens[b] >= -1 && p.tokens[b] < end, "sample: token out of range");
    require((p.tokens[b] == -1) == std::isnan(p.logprobs[b]), "sample: half an answer");
  }
}

void run_acceptance(Case& c, const Kernels& kernels, const ThreadPool& pool) {
  AcceptanceParams p;
  p.rows = c.random.below(5);
  const int64_t vocab = any_vocab(c.random);
  const int64_t width = c.random.chance(0.5) ? vocab : any_vocab(c.random);
  p.target = c.rows(p.rows, 1, vocab);
  p.draft = c.rows(p.rows, 1, width);
  p.mask = c.mask(p.rows, 1, (vocab + 31) / 32, vocab);
  p.map = c.map(width, vocab, vocab);
  p.target_sampling = c.sampling(p.rows);
  p.draft_sampling = c.sampling(p.rows);
  p.acceptance = c.arena.make<float>(p.rows);
  kernels.acceptance(p, pool);
  for (int64_t r = 0; r < p.rows; ++r) {
    const float beta = p.acceptance[r];
    require(std::isnan(beta) || (beta >= 0.0f && beta <= 1.0f + 1e-5f), "acceptance out of range");
  }
}

void run_uniforms(Case& c, const Kernels& kernels, const ThreadPool& pool) {
  UniformsParams p;
  p.batch = c.random.below(5);
  p.n = 1 + c.random.below(9);
  p.randomness = c.randomness(p.batch, p.n, true);
  p.uniforms = c.arena.make<double>(p.batch * p.n);
  kernels.uniforms(p, pool);
  for (int64_t i = 0; i < p.batch * p.n; ++i) {
    require(p.uniforms[i] >= 0.0 && p.uniforms[i] < 1.0, "uniforms: outside [0, 1)");
  }
}

void check_verify(const VerifyParams& p) {
  const int64_t slots = p.gamma + 1;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t n = p.num_accepted[b];
    require(n >= 0 && n <= p.gamma, "verify: num_accepted out of range");
    require(p.status[b] >= 0 && p.status[b] < 16, "verify: unknown status bits");
    const int64_t ids = std::max(p.target.vocab, p.draft.data != nullptr ? p.draft.vocab : 0);
    for (int64_t i = 0; i < slots; ++i) {
      const int64_t token = p.tokens[b * slots + i];
      require(i > n ? token == -1 : token >= 0 && token < ids, "verify: token out of range");
      require(i <= n || std::isnan(p.logprobs[b * slots + i]), "verify: logprob after the end");
    }
    require(p.tokens[b * slots + n] < p.target.vocab, "verify: the target has no such token");
    for (int64_t i = 0; i < p.gamma; ++i) {
      const float h = p.accept_probs[b * p.gamma + i];
      require(std::isnan(h) || (h >= 0.0f && h <= 1.0f), "verify: accept_probs out of range");
    }
  }
}

void run_verify(Case& c, const Kernels& kernels, const ThreadPool& pool) {
  VerifyParams p;
  p.batch = c.random.below(5);
  p.gamma = c.random.below(5);
  p.rule = any_rule(c.random, kChains);
  const int64_t vocab = any_vocab(c.random);
  p.target = c.any_rows(p.batch, p.gamma + 1, vocab);
  p.mask = c.mask(p.batch, p.gamma + 1, (vocab + 31) / 32, vocab);
  int64_t ids = vocab;
  if (c.random.chance(0.7)) {
    const int64_t width = c.random.chance(0.5) ? vocab : any_vocab(c.random);
    p.draft_is_probs = c.random.chance(0.3);
    p.draft = c.any_rows(p.batch, p.gamma, width, p.draft_is_probs);
    // As csrc/torch does: the map is dropped where no draft law is read.
    if (has(p.rule, kReadsDraftLaw)) p.map = c.map(width, vocab, vocab);
    ids = std::max(vocab, width);
  } else if (c.random.chance(0.7)) {
    p.draft = c.any_rows(p.batch, p.gamma, 1 + c.random.below(40), true);
    take_lists(c, p.gamma, &p);
  }
  p.draft_tokens = c.ids(p.batch, p.gamma, [&] {
    if (c.random.chance(0.05)) return int64_t{-1};
    if (c.wild && c.random.chance(0.1)) {
      return c.random.pick<int64_t>({-2, ids, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN});
    }
    return c.random.below(ids);
  });
  if (c.random.chance(0.3)) {
    p.draft_lengths = c.ids(p.batch, 1, [&] {
      return c.wild && c.random.chance(0.1) ? c.random.pick<int64_t>({-1, 99, INT64_MIN, INT64_MAX})
                                            : c.random.below(p.gamma + 1);
    });
  }
  if (c.random.chance(0.3)) {
    // A sampled token needs a law, which csrc/torch leaves to the device.
    p.draft_kinds = c.array<int8_t>(p.batch, p.gamma, [&] {
      return c.wild && c.random.chance(0.1) ? c.random.pick<int64_t>({-1, 2, 127, -128})
                                            : c.random.below(2);
    });
  }
  p.target_sampling = c.sampling(p.batch);
  p.draft_sampling = c.random.chance(0.5) ? p.target_sampling : c.sampling(p.batch);
  p.randomness = c.randomness(p.batch, p.gamma + 1, has(p.rule, kRaces));
  p.relaxed.lenience = c.random.pick({1.0, 0.5, 1e-300});
  p.relaxed.beta = c.random.pick<int64_t>({1, 3, INT64_MAX});
  p.relaxed.tau = c.random.pick({0.0, 1.0, 1e300});
  p.relaxed.epsilon = c.random.pick({0.09, 1e-300, 1e300});
  p.relaxed.delta = c.random.pick({0.3, 1e-300, 1e300});
  p.full_accept_probs = c.random.chance(0.5);
  p.raw_logprobs = c.random.chance(0.3) || has(p.rule, kRawLogprobs);
  p.tokens = c.arena.make<int64_t>(p.batch * (p.gamma + 1));
  p.num_accepted = c.arena.make<int32_t>(p.batch);
  p.logprobs = c.arena.make<float>(p.batch * (p.gamma + 1));
  p.accept_probs = c.arena.make<float>(p.batch * p.gamma);
  p.status = c.arena.make<int32_t>(p.batch);
  kernels.verify(p, pool);
  check_verify(p);
}

void check_verify_tree(const VerifyTreeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t n = p.num_accepted[b];
    require(n >= 0 && n < p.nodes, "verify_tree: num_accepted out of range");
    require(p.status[b] >= 0 && p.status[b] < 32, "verify_tree: unknown status bits");
    require((p.status[b] & kInvalidTree) == 0 || n == 0, "verify_tree: accepted of no tree");
    const int64_t ids = std::max(p.target.vocab, p.draft.data != nullptr ? p.draft.vocab : 0);
    int64_t above = 0;
    for (int64_t k = 0; k < p.nodes; ++k) {
      const int64_t place = b * p.nodes + k, token = p.out_tokens[place], node = p.path[place];
      require(k > n ? token == -1 : token >= 0 && token < ids, "verify_tree: token out of range");
      require(k <= n || std::isnan(p.logprobs[place]), "verify_tree: logprob after the end");
      require(k < n ? node > above && node < p.nodes : node == -1, "verify_tree: no path");
      if (k < n) above = node;
      const float h = p.accept_probs[place];
      require(std::isnan(h) || (h >= 0.0f && h <= 1.0f), "verify_tree: accept_probs out of range");
    }
    require(p.out_tokens[b * p.nodes + n] < p.target.vocab, "verify_tree: no token of the target");
  }
}

// Children of earlier nodes, then padding; or, sometimes, no tree.
IdArray any_parents(Case& c, int64_t batch, int64_t nodes) {
  int64_t next = 0, size = 1;
  return c.ids(batch, nodes, [&] {
    const int64_t v = next++ % nodes;
    if (v == 0) size = 1 + c.random.below(nodes);
    if (c.wild && c.random.chance(0.02)) {
      return c.random.pick<int64_t>({-2, v, nodes, INT32_MAX, INT64_MIN, INT64_MAX});
    }
    return v == 0 || v >= size ? int64_t{-1} : c.random.below(v);
  });
}

void run_verify_tree(Case& c, const Kernels& kernels, const ThreadPool& pool) {
  VerifyTreeParams p;
  p.batch = c.random.below(4);
  p.nodes = 1 + c.random.below(9);
  p.rule = any_rule(c.random, kTrees);
  const int64_t vocab = any_vocab(c.random);
  p.target = c.any_rows(p.batch, p.nodes, vocab);
  p.mask = c.mask(p.batch, p.nodes, (vocab + 31) / 32, vocab);
  int64_t ids = vocab;
  if (c.random.chance(0.7)) {
    const int64_t width = c.random.chance(0.5) ? vocab : any_vocab(c.random);
    p.draft_is_probs = c.random.chance(0.3);
    p.num_draft_rows = p.nodes;
    if (c.random.chance(0.4)) {
      p.num_draft_rows = 1 + c.random.below(4);
      p.children_rows = c.ids(p.batch, p.nodes, [&] {
        return c.wild && c.random.chance(0.1)
                   ? c.random.pick<int64_t>({-1, p.num_draft_rows, INT64_MIN, INT64_MAX})
                   : c.random.below(p.num_draft_rows);
      });
    }
    p.draft = c.rows(p.batch, p.num_draft_rows, width, p.draft_is_probs);
    // As csrc/torch does: the map is dropped where no draft law is read.
    if (has(p.rule, kReadsDraftLaw)) p.map = c.map(width, vocab, vocab);
    ids = std::max(vocab, width);
  } else if (c.random.chance(0.7)) {
    p.num_draft_rows = p.nodes;
    p.draft = c.rows(p.batch, p.nodes, 1 + c.random.below(40), true);
    take_lists(c, p.nodes, &p);
  }
  p.parents = any_parents(c, p.batch, p.nodes);
  p.tokens = c.ids(p.batch, p.nodes, [&] {
    if (c.random.chance(0.05)) return int64_t{-1};
    if (c.wild && c.random.chance(0.1)) {
      return c.random.pick<int64_t>({-2, ids, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN});
    }
    return c.random.below(ids);
  });
  if (c.random.chance(0.8)) {
    // Mostly one kind beside the deterministic nodes: mixed ones are no tree.
    const int64_t drawn = c.random.below(4);
    p.kinds = c.array<int8_t>(p.batch, p.nodes, [&] {
      return c.wild && c.random.chance(0.05) ? c.random.pick<int64_t>({-1, 1, 2, 3, 4, 127, -128})
             : c.random.chance(0.7)          ? drawn
                                             : int64_t{0};
    });
  }
  p.target_sampling = c.sampling(p.batch);
  p.draft_sampling = c.random.chance(0.5) ? p.target_sampling : c.sampling(p.batch);
  p.randomness = c.randomness(p.batch, p.nodes, has(p.rule, kRaces));
  p.raw_logprobs = c.random.chance(0.3);
  p.out_tokens = c.arena.make<int64_t>(p.batch * p.nodes);
  p.path = c.arena.make<int64_t>(p.batch * p.nodes);
  p.num_accepted = c.arena.make<int32_t>(p.batch);
  p.logprobs = c.arena.make<float>(p.batch * p.nodes);
  p.accept_probs = c.arena.make<float>(p.batch * p.nodes);
  p.status = c.arena.make<int32_t>(p.batch);
  kernels.verify_tree(p, pool);
  check_verify_tree(p);
}

void run_variant(const char* name, const Kernels& kernels, uint64_t cases) {
  for (uint64_t k = 0; k < cases; ++k) {
    Case c(k * 977 + 1);
    const ThreadPool pool = pool_of(k % 2 == 0 ? 1 : 3);
    switch (k % 8) {
      case 0:
        run_row_law(c, kernels, pool);
        break;
      case 1:
        run_sample(c, kernels, pool);
        break;
      case 2:
        run_acceptance(c, kernels, pool);
        break;
      case 3:
        run_uniforms(c, kernels, pool);
        break;
      case 4:
      case 5:
        run_verify_tree(c, kernels, pool);
        break;
      default:
        run_verify(c, kernels, pool);
    }
  }
  std::printf("%s: %llu cases, nothing found\n", name, static_cast<unsigned long long>(cases));
}

// Whether text[end - length + 1 .. end] is the suffix of `whole` of that length.
bool is_suffix(const std::vector<int64_t>& text, int64_t end, int64_t length,
               const std::vector<int64_t>& whole) {
  if (end < length - 1 || end >= static_cast<int64_t>(text.size())) return false;
  return std::equal(whole.end() - length, whole.end(), text.begin() + (end - length + 1));
}

void run_text_search(uint64_t cases) {
  for (uint64_t k = 0; k < cases; ++k) {
    Case c(k * 977 + 1);
    const auto any_token = [&] {
      return c.wild ? c.random.pick<int64_t>({INT64_MIN, -1, 0, INT64_MAX}) : c.random.below(3);
    };
    SuffixTrie trie(1 + c.random.below(8));
    std::vector<int64_t> text, output, closed;
    for (int64_t n = c.random.below(60); n > 0; --n) {
      text.push_back(any_token());
      trie.append({text.back()});
      const int64_t nodes = c.random.below(20), depth = c.random.below(9);
      const Growth found = trie.grow(text, nodes, depth, 1 + c.random.below(3), 1,
                                     c.random.below(2) ? 0.2 : 0.0, c.random.below(2) > 0);
      require(static_cast<int64_t>(found.tokens.size()) <= nodes, "SuffixTrie: too many nodes");
      for (size_t i = 0; i < found.tokens.size(); ++i) {
        require(found.parents[i] < static_cast<int64_t>(i),
                "SuffixTrie: a child before its parent");
      }
      if (c.random.below(9) == 0) closed.push_back(trie.close());
      if (!closed.empty() && c.random.below(9) == 0) {
        const size_t which =
            static_cast<size_t>(c.random.below(static_cast<int64_t>(closed.size())));
        trie.drop(closed[which]);
        closed.erase(closed.begin() + static_cast<int64_t>(which));
      }
    }
    closed.push_back(trie.close());
    for (const int64_t number : closed) trie.drop(number);
    require(trie.size() == 0 && trie.nodes() == 1, "SuffixTrie: something stays of dropped texts");
    InputMatcher matcher(text);
    for (int64_t n = c.random.below(60); n > 0; --n) {
      output.push_back(any_token());
      matcher.append({output.back()});
      const int64_t end = matcher.unique_end();
      require(end == -1 || is_suffix(text, end, matcher.match_length(), output),
              "InputMatcher: no match");
    }
  }
  std::printf("text search: %llu cases, nothing found\n", static_cast<unsigned long long>(cases));
}

// What a sanitizer must find, or nothing that it did not find means anything.
int break_on_purpose(const char* how) {
  Arena arena;
  volatile int64_t n = 8;
  if (std::strcmp(how, "address") == 0) {
    float* const row = arena.make<float>(n);
    for (int64_t i = 0; i < n; ++i) row[i] = 1.0f;
    return static_cast<int>(row[n]);
  }
  volatile int32_t largest = INT32_MAX;
  return largest + static_cast<int32_t>(n) < 0;
}

}  // namespace
}  // namespace specdec

// sanitize [cases] | sanitize --break address|overflow
int main(int argc, char** argv) {
  using namespace specdec;
  if (argc == 3 && std::strcmp(argv[1], "--break") == 0) return break_on_purpose(argv[2]);
  const uint64_t cases = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 8000;
#ifdef SPECDEC_HAVE_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    run_variant("avx512", avx512::kKernels, cases);
  }
#endif
#ifdef SPECDEC_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    run_variant("avx2", avx2::kKernels, cases);
  }
#endif
  run_variant("baseline", baseline::kKernels, cases);
  run_text_search(cases);
  return 0;
}
