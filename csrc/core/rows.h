// Rows of logits or probabilities, where they lie and how a vocabulary is cut into tiles.
//
// Every float reduction over the vocabulary runs in fixed tiles that are combined in order:
// threads, batch and split never change a bit.
#pragma once

#include <cstring>

#include "params.h"
#include "row_law.h"

namespace specdec {

// The CUDA kernels' tests on a host (csrc/testing) take smaller tiles, as their blocks are smaller.
#ifndef SPECDEC_TILE
#define SPECDEC_TILE 4096
#endif

constexpr int64_t kTile = SPECDEC_TILE;
constexpr int kGroup = 128;  // entries that share one maximum

// One row of a vocabulary that several ranks hold: where its entries lie on this one
// (csrc/cpu/ranks.h).
struct HeldRow {
  const void* data = nullptr;  // where entry 0 would lie; only this rank's part may be read
  const void* tail = nullptr;  // the same of the tile that goes on in the next rank's part
  int64_t tail_tile = -1;
  Element element = Element::kFloat32;
  int64_t token = 0;  // the one token whose value all ranks know
  float value = 0.0f;
};

// One row of logits or probabilities; data == nullptr: no such row.
//
// What a mask hides is in the row as an entry of weight 0. Entries stand for tokens: entry i for
// token i, unless a reduced vocabulary says otherwise.
struct Row {
  const void* data = nullptr;
  Element element = Element::kFloat32;
  bool linear = false;    // probabilities: an entry of weight 0 is 0, not -inf
  bool by_token = false;  // in the order of the tokens, through `entries` or a list
  int32_t listed = 0;     // how many tokens a list names, in `tokens`; 0: no list
  int64_t vocab = 0;
  int64_t num_tokens = 0;             // tokens that `allowed` and `entries` know
  const uint32_t* allowed = nullptr;  // bits of a mask; nullptr: no mask
  const int32_t* tokens = nullptr;    // reduced vocabulary, see TokenMap; or TokenLists
  const int32_t* entries = nullptr;
#if !SPECDEC_ON_GPU  // the CPU's alone: CUDA kernels have no registers to spare for it
  // Several ranks hold the row: tiles lie there, and `data` is where entry 0 would lie if the value
  // that all ranks know were a whole row.
  const HeldRow* held = nullptr;
#endif
};

// A row and its law.
struct LawRow {
  Row row;
  RowLaw law;
};

struct TokenList {
  const int64_t* tokens = nullptr;
  int64_t count = 0;
};

// What a rule wants from a row beside its law.
enum class Extra : int8_t {
  kNone,
  kRank,     // top_beta: how many logits are above `logit`; in the pass that finds the law
  kEntropy,  // typical: the entropy of the law in nats; likewise
  kWinner,   // coupled: the entry that wins the race; once the law is known
};

struct ExtraTask {
  Extra kind = Extra::kNone;
  float logit = 0.0f;
};

namespace SPECDEC_CPU_ISA {

SPECDEC_HD int64_t num_tiles(int64_t vocab) { return (vocab + kTile - 1) / kTile; }
SPECDEC_HD int64_t num_groups(int64_t entries) { return (entries + kGroup - 1) / kGroup; }

SPECDEC_HD int64_t tile_groups(int64_t vocab, int64_t tile) {
  const int64_t left = vocab - tile * kTile;
  return num_groups(left < kTile ? left : kTile);
}

SPECDEC_HD float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

SPECDEC_HD float widen_bfloat16(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

// Exact for every float16: shift the fields into place, rebias by a multiplication (which also
// normalises subnormals), and give infinities and NaN their exponent back.
SPECDEC_HD float widen_float16(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7FFFu;
  const float scaled = float_from_bits(magnitude << 13) * 0x1p112f;
  uint32_t wide;
  memcpy(&wide, &scaled, sizeof wide);
  const uint32_t special = magnitude >= 0x7C00u ? 0x7F800000u : 0u;
  return float_from_bits(wide | special | static_cast<uint32_t>(bits & 0x8000u) << 16);
}

SPECDEC_HD bool is_in(const TokenList& list, int64_t token) {
  for (int64_t i = 0; i < list.count; ++i) {
    if (list.tokens[i] == token) return true;
  }
  return false;
}

// ---- entries ---

SPECDEC_HD int64_t token_of_entry(const Row& row, int64_t entry) {
  return row.tokens != nullptr && !row.by_token ? row.tokens[entry] : entry;
}

// Where a token stands in a row, or -1.
SPECDEC_HD int64_t entry_of_token(const Row& row, int64_t token) {
  if (row.entries != nullptr && !row.by_token) {
    return token >= 0 && token < row.num_tokens ? row.entries[token] : -1;
  }
  return token < row.vocab ? token : -1;
}

SPECDEC_HD bool is_allowed(const Row& row, int64_t token) {
  return row.allowed == nullptr || (token >= 0 && token < row.num_tokens &&
                                    (row.allowed[token >> 5] >> (token & 31) & 1u) != 0);
}

// Where the first token of a list lies that is not below `token`; `listed` if there is none.
SPECDEC_HD int32_t first_listed(const Row& row, int64_t token) {
  int32_t first = 0;
  for (int32_t left = row.listed; left > 0;) {
    const int32_t half = left / 2;
    const bool below = row.tokens[first + half] < token;
    first = below ? first + half + 1 : first;
    left = below ? left - half - 1 : half;
  }
  return first;
}

// The probability of a token in a list: 0 where it is hidden or not there.
SPECDEC_HD float listed_value(const Row& row, int64_t token) {
  const int32_t place = first_listed(row, token);
  const bool there = place < row.listed && row.tokens[place] == token && is_allowed(row, token);
  return there ? static_cast<const float*>(row.data)[place] : 0.0f;
}

// Where entry i, of no list, lies in memory, or -1 where it is hidden or missing.
SPECDEC_HD int64_t place_of_entry(const Row& row, int64_t i) {
  if (!is_allowed(row, token_of_entry(row, i))) return -1;
  return row.by_token ? row.entries[i] : i;
}

SPECDEC_HD float stored_value(const Row& row, int64_t place) {
  if (row.element == Element::kFloat32) return static_cast<const float*>(row.data)[place];
  const uint16_t bits = static_cast<const uint16_t*>(row.data)[place];
  return row.element == Element::kBFloat16 ? widen_bfloat16(bits) : widen_float16(bits);
}

// The value of an entry of weight 0.
SPECDEC_HD float nothing(const Row& row) { return row.linear ? 0.0f : -INFINITY; }

SPECDEC_HD float row_value(const Row& row, int64_t i) {
  if (kLists && row.listed > 0) return listed_value(row, i);
  const int64_t place = place_of_entry(row, i);
  return place < 0 ? nothing(row) : stored_value(row, place);
}

// The row of a reduced vocabulary seen in the order of the target's tokens; any other as it is.
SPECDEC_HD Row in_token_order(Row row) {
  if (row.entries == nullptr) return row;
  row.by_token = true;
  row.vocab = row.num_tokens;
  return row;
}

// ---- where rows lie ---

SPECDEC_HD int64_t load_id(const IdArray& ids, int64_t i, int64_t j) {
  const int64_t offset = i * ids.stride[0] + j * ids.stride[1];
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[offset]
                      : static_cast<const int32_t*>(ids.data)[offset];
}

// Row s of request b, or no row where a packed index points outside.
SPECDEC_HD Row row_at(const RowBatch& rows, int64_t b, int64_t s, bool linear = false) {
  Row row;
  row.element = rows.element;
  row.linear = linear;
  row.vocab = rows.vocab;
  int64_t offset = b * rows.stride[0] + s * rows.stride[1];
  if (rows.index.data != nullptr) {
    const int64_t packed = load_id(rows.index, b, s);
    if (packed < 0 || packed >= rows.num_rows) return row;
    offset = packed * rows.stride[0];
  }
  const int64_t bytes = rows.element == Element::kFloat32 ? 4 : 2;
  row.data = static_cast<const char*>(rows.data) + offset * bytes;
  return row;
}

// List s of request b as the caller gave it: probabilities, and `width` ids of stride 1.
struct GivenList {
  Row probs;  // no row where a packed index points outside
  IdArray ids;
};

SPECDEC_HD GivenList given_list(const RowBatch& rows, const TokenLists& lists, int64_t b,
                                int64_t s) {
  GivenList list;
  list.ids.is_int64 = lists.ids.is_int64;
  RowBatch plain = rows;
  if (rows.index.data != nullptr) {
    b = load_id(rows.index, b, s);
    s = 0;
    if (b < 0 || b >= rows.num_rows) return list;
    plain.index = IdArray{};
  }
  list.probs = row_at(plain, b, s, true);
  const int64_t offset = b * lists.ids.stride[0] + s * lists.ids.stride[1];
  const int64_t bytes = lists.ids.is_int64 ? 8 : 4;
  list.ids.data = static_cast<const char*>(lists.ids.data) + offset * bytes;
  list.ids.stride[1] = 1;
  return list;
}

// List `row` of all, once the backend has filled them in, over a vocabulary.
SPECDEC_HD Row listed_row(const TokenLists& lists, int64_t row, int64_t vocab) {
  Row found;
  if (lists.counts[row] == 0) return found;
  found.data = lists.probs + row * lists.width;
  found.tokens = lists.tokens + row * lists.width;
  found.listed = lists.counts[row];
  found.linear = found.by_token = true;
  found.vocab = vocab;
  return found;
}

// The row under the mask of (b, s).
SPECDEC_HD Row masked(Row row, const TokenMask& mask, int64_t b, int64_t s) {
  if (mask.words == nullptr) return row;
  row.allowed = mask.words + b * mask.stride[0] + s * mask.stride[1];
  row.num_tokens = mask.num_tokens;
  return row;
}

SPECDEC_HD bool is_broken(const TokenMap& map) { return map.broken != nullptr && *map.broken != 0; }

// A draft's row whose entries stand for the tokens of `map`; no row if that is no map.
SPECDEC_HD Row mapped(Row row, const TokenMap& map) {
  if (map.ids.data == nullptr) return row;
  if (is_broken(map)) return Row{};
  row.tokens = map.tokens;
  row.entries = map.entries;
  if (row.allowed == nullptr) row.num_tokens = map.num_tokens;
  return row;
}

// The rows that the operators other than verify read (verify: core/request.h).
SPECDEC_HD Row logits_row(const RowLawParams& p, int64_t r) {
  return masked(row_at(p.logits, r, 0), p.mask, r, 0);
}
SPECDEC_HD Row logits_row(const SampleParams& p, int64_t b) {
  return mapped(masked(row_at(p.logits, b, 0), p.mask, b, 0), p.map);
}
SPECDEC_HD Row target_row(const AcceptanceParams& p, int64_t r) {
  return masked(row_at(p.target, r, 0), p.mask, r, 0);
}
SPECDEC_HD Row draft_row(const AcceptanceParams& p, int64_t r) {
  return mapped(masked(row_at(p.draft, r, 0), p.mask, r, 0), p.map);
}

// Whether any request may have a filter.
SPECDEC_HD bool has_filter_arrays(const SamplingParams& p) {
  return p.top_k.data != nullptr || p.top_p.data != nullptr || p.min_p.data != nullptr;
}

SPECDEC_HD double number_at(const Array<float>& numbers, int64_t b, double absent) {
  return numbers.data != nullptr ? static_cast<double>(numbers.data[b * numbers.stride[0]])
                                 : absent;
}

// The sampling parameters of request b, cleaned.
SPECDEC_HD Filters filters_at(const SamplingParams& p, int64_t b, int64_t vocab) {
  const int64_t top_k = p.top_k.data != nullptr ? load_id(p.top_k, b, 0) : 0;
  return clean_filters(number_at(p.temperature, b, 1.0), top_k, number_at(p.top_p, b, 1.0),
                       number_at(p.min_p, b, 0.0), vocab);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
