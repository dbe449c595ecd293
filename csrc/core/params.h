// Plain structs that carry checked arguments from csrc/torch to the kernels: pointers, sizes and
// strides. All strides are in elements (not bytes) and int64: rows x vocabulary passes 2^32.
#pragma once

#include <cstdint>

#include "rules.h"

namespace specdec {

// Entries of a vocabulary: integer sums of a row's weights (fixed_point.h) must not pass 2^64.
constexpr int64_t kMaxVocab = (int64_t{1} << 24) - 1;

enum class Element : int8_t { kFloat32, kBFloat16, kFloat16 };

// Bits of a `status` output (docs/design.md, "Failure").
enum Status : int32_t {
  kNoTargetLaw = 1,
  kInvalidDraftToken = 2,
  kNoDraftLaw = 4,
  kParameterOutOfRange = 8,
  kInvalidTree = 16,
};

// An int32 or int64 tensor of up to two dimensions; data == nullptr where the caller gave none.
struct IdArray {
  const void* data = nullptr;
  int64_t stride[2] = {0, 0};
  bool is_int64 = false;
};

// A tensor of T of up to two dimensions; data == nullptr where the caller gave none.
template <typename T>
struct Array {
  const T* data = nullptr;
  int64_t stride[2] = {0, 0};
};

// Rows over a vocabulary: dense [B, S, vocab], or packed [num_rows, vocab] addressed through
// `index`.
struct RowBatch {
  const void* data = nullptr;
  Element element = Element::kFloat32;
  int64_t vocab = 0;
  int64_t stride[2] = {0, 0};  // of (b, s); packed: stride[0] is the stride of a row
  int64_t num_rows = 0;        // packed only
  IdArray index;               // packed only: [B, S] row numbers
};

// Which tokens a grammar allows: bit t % 32 of word t / 32 of a row, rows by (b, s); words ==
// nullptr: all. Tokens from num_tokens on are not allowed.
struct TokenMask {
  const uint32_t* words = nullptr;
  int64_t stride[2] = {0, 0};
  int64_t num_tokens = 0;
};

// A reduced draft vocabulary: the token of each of its entries; ids.data == nullptr: none. The
// arrays are scratch memory that a backend fills before anything reads the draft's rows.
struct TokenMap {
  IdArray ids;  // [num_entries], as the caller gave them
  int64_t num_entries = 0;
  int64_t num_tokens = 0;            // ids are below this
  const int32_t* tokens = nullptr;   // [num_entries] token of an entry
  const int32_t* entries = nullptr;  // [num_tokens] entry of a token, or -1
  const int32_t* broken = nullptr;   // not 0: an id out of range, or a repeated one
};

// Entries of a row of TokenLists.
constexpr int64_t kMaxListed = 1024;

// Draft laws that name a few tokens each: the draft's rows are then [.., width] probabilities, and
// the ids say of which tokens; ids.data == nullptr: the rows hold a whole vocabulary. The arrays
// are scratch memory that a backend fills before anything reads the draft's rows.
struct TokenLists {
  IdArray ids;                      // as the caller gave them; where the draft's rows are packed,
                                    // stride[0] is that of a row
  int64_t width = 0;                // K
  int64_t rows = 0;                 // of a request
  const int32_t* tokens = nullptr;  // [B * rows, width], ascending
  const float* probs = nullptr;     // [B * rows, width]
  const int32_t* counts = nullptr;  // [B * rows] tokens that are listed; 0: no legal list
};

// The sampling parameters of a request, each [B] or absent: FLOATS(name) for float32, IDS(name) for
// int32 or int64. Schemas, arguments and their checks are made from this list.
#define SPECDEC_SAMPLING(FLOATS, IDS) FLOATS(temperature) IDS(top_k) FLOATS(top_p) FLOATS(min_p)

struct SamplingParams {
#define SPECDEC_FLOATS(name) Array<float> name;
#define SPECDEC_IDS(name) IdArray name;
  SPECDEC_SAMPLING(SPECDEC_FLOATS, SPECDEC_IDS)
#undef SPECDEC_FLOATS
#undef SPECDEC_IDS
};

// Where the uniforms come from: given ones [B, n], or Philox counters from seeds and positions [B].
struct Randomness {
  Array<double> uniforms;
  Array<int64_t> seeds;
  Array<int64_t> positions;
  uint32_t stream = 0;
};

struct RowLawParams {
  int64_t rows = 0;
  RowBatch logits;
  TokenMask mask;
  SamplingParams sampling;
  float* max = nullptr;
  double* scale = nullptr;
  float* cutoff = nullptr;
  double* log_z = nullptr;
  int64_t* argmax = nullptr;
};

struct SampleParams {
  int64_t batch = 0;
  RowBatch logits;
  TokenMask mask;
  TokenMap map;  // without `entries`
  SamplingParams sampling;
  Randomness randomness;
  uint32_t domain = 0;
  uint32_t draft_index = 0;
  int64_t* tokens = nullptr;
  float* logprobs = nullptr;
};

struct AcceptanceParams {
  int64_t rows = 0;
  RowBatch target;
  RowBatch draft;
  TokenMask mask;
  TokenMap map;
  SamplingParams target_sampling;
  SamplingParams draft_sampling;
  float* acceptance = nullptr;
};

struct UniformsParams {
  int64_t batch = 0;
  int64_t n = 0;
  Randomness randomness;
  double* uniforms = nullptr;
};

// Parameters of the rules that are not lossless.
struct RelaxedParams {
  double lenience = 1.0;
  int64_t beta = 3;
  double tau = 1.0;
  double epsilon = 0.09;
  double delta = 0.3;
};

struct VerifyParams {
  int64_t batch = 0;
  int64_t gamma = 0;
  RowBatch target;  // [B, G+1, V]
  RowBatch draft;   // [B, G, Vd] logits or probabilities; data == nullptr: none
  bool draft_is_probs = false;
  TokenLists lists;  // with them the draft's vocabulary is the target's
  TokenMask mask;    // [B, G+1]
  TokenMap map;
  IdArray draft_tokens;       // [B, G]
  IdArray draft_lengths;      // [B] or absent
  Array<int8_t> draft_kinds;  // [B, G] or absent
  SamplingParams target_sampling;
  SamplingParams draft_sampling;
  Randomness randomness;  // uniforms [B, G+1]
  Rule rule = Rule::kBlock;
  RelaxedParams relaxed;
  bool full_accept_probs = false;
  bool raw_logprobs = false;
  int64_t* tokens = nullptr;        // [B, G+1]; outputs are contiguous
  int32_t* num_accepted = nullptr;  // [B]
  float* logprobs = nullptr;        // [B, G+1]
  float* accept_probs = nullptr;    // [B, G]
  int32_t* status = nullptr;        // [B]
};

// Verification over a vocabulary that several ranks hold parts of: its target and draft rows begin
// where entry 0 would lie.
struct VerifyShardedParams {
  VerifyParams verify;
  int64_t rank = 0;
  int64_t count = 1;
  const int64_t* bounds = nullptr;  // [count + 1]
  RowBatch target_tail;             // rows as long as that tile; data == nullptr: none
  RowBatch draft_tail;
  int64_t exchange = 0;  // names the exchange that Python keeps
};

struct VerifyTreeParams {
  int64_t batch = 0;
  int64_t nodes = 0;
  RowBatch target;             // [B, N, V]
  RowBatch draft;              // [B, R, Vd] logits or probabilities; data == nullptr: none
  int64_t num_draft_rows = 0;  // R
  bool draft_is_probs = false;
  TokenLists lists;  // as in VerifyParams
  TokenMask mask;    // [B, N]
  TokenMap map;
  IdArray tokens;         // [B, N]
  IdArray parents;        // [B, N]
  Array<int8_t> kinds;    // [B, N] or absent
  IdArray children_rows;  // [B, N] or absent: row v belongs to node v
  SamplingParams target_sampling;
  SamplingParams draft_sampling;
  Randomness randomness;  // uniforms [B, N]
  Rule rule = Rule::kTraversal;
  bool raw_logprobs = false;
  int64_t* out_tokens = nullptr;    // [B, N]; outputs are contiguous
  int64_t* path = nullptr;          // [B, N]
  int32_t* num_accepted = nullptr;  // [B]
  float* logprobs = nullptr;        // [B, N]
  float* accept_probs = nullptr;    // [B, N]
  int32_t* status = nullptr;        // [B]
};

// Of a tree, root and padding included.
constexpr int64_t kMaxNodes = 1024;

struct TreeMaskParams {
  int64_t batch = 0;
  int64_t nodes = 0;
  IdArray parents;                // [B, N]
  uint64_t* ancestors = nullptr;  // [B, N, ceil(N/64)]; outputs are contiguous
  int64_t* depths = nullptr;      // [B, N]
  int32_t* status = nullptr;      // [B]
};

// A cache [Y, B, L, H, D], its rows (H, D) cut into units: as many bytes as can be moved at once.
// Strides are in units. Where the rows are dense, heads is 1 and width the whole row.
struct CacheRows {
  void* data = nullptr;
  int32_t unit_bytes = 1;
  int64_t layer_stride = 0;
  int64_t request_stride = 0;
  int64_t place_stride = 0;
  int64_t heads = 1;
  int64_t head_stride = 0;
  int64_t width = 0;
  int64_t unit_stride = 1;
};

struct CompactKvParams {
  int64_t layers = 1;
  int64_t batch = 0;
  int64_t places = 0;  // L
  int64_t steps = 0;   // columns of `path`
  CacheRows caches[2];
  IdArray path;               // [B, steps]
  IdArray num_accepted;       // [B]
  IdArray seq_lens;           // [B]
  int32_t* status = nullptr;  // [B]
};

// Of a request.
constexpr int64_t kMaxBeams = 64;

struct BeamVerifyParams {
  int64_t batch = 0;
  int64_t nodes = 0;
  int64_t width = 0;                    // W
  int64_t levels = 0;                   // G+1
  int64_t num_eos = 0;                  // E
  RowBatch target;                      // [B, N, V]
  Array<float> scores;                  // [B, W]
  IdArray tokens;                       // [B, N]
  IdArray parents;                      // [B, N]
  IdArray eos;                          // [E]
  bool bound = true;                    // the bound rule; false: the subset rule alone
  bool log_probs = false;               // rows are log-probabilities
  int64_t* out_tokens = nullptr;        // [B, G+1, W]; outputs are contiguous
  int64_t* out_parents = nullptr;       // [B, G+1, W]
  int64_t* out_nodes = nullptr;         // [B, G+1, W]
  float* out_scores = nullptr;          // [B, G+1, W]
  int64_t* finished_tokens = nullptr;   // [B, G+1, W]
  int64_t* finished_parents = nullptr;  // [B, G+1, W]
  float* finished_scores = nullptr;     // [B, G+1, W]
  int32_t* num_levels = nullptr;        // [B]
  int32_t* status = nullptr;            // [B]
};

// Its arguments are only checked in C++: the kernels are Triton's, on the CPU torch's own.
struct TreeAttentionParams {};

}  // namespace specdec
