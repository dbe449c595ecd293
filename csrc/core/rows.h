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

// One row of logits or probabilities; data == nullptr: no such row.
struct Row {
  const void* data = nullptr;
  Element element = Element::kFloat32;
  bool linear = false;  // probabilities: an entry of weight 0 is 0, not -inf
  int64_t vocab = 0;
};

// A row and its law.
struct LawRow {
  Row row;
  RowLaw law;
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

SPECDEC_HD float row_value(const Row& row, int64_t token) {
  if (row.element == Element::kFloat32) return static_cast<const float*>(row.data)[token];
  const uint16_t bits = static_cast<const uint16_t*>(row.data)[token];
  return row.element == Element::kBFloat16 ? widen_bfloat16(bits) : widen_float16(bits);
}

SPECDEC_HD int64_t load_id(const IdArray& ids, int64_t i, int64_t j) {
  const int64_t offset = i * ids.stride[0] + j * ids.stride[1];
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[offset]
                      : static_cast<const int32_t*>(ids.data)[offset];
}

// Row s of request b, or no row where a packed index points outside.
SPECDEC_HD Row row_at(const RowBatch& rows, int64_t b, int64_t s, bool linear = false) {
  Row row{nullptr, rows.element, linear, rows.vocab};
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
