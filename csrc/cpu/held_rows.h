// The rows of a verify call of which this rank holds a part each.
//
// Rules look at single entries of a row, too: at the draft token, and at the token that is emitted.
// Their values are exchanged, and a row shows rules nothing else.
#pragma once

#include "ranks.h"

namespace specdec {

struct HeldRows {
  HeldRow* target;  // [B, G+1]
  HeldRow* draft;   // [B, G]
};

namespace SPECDEC_CPU_ISA {

// A row whose one known value lies where a rule looks for it.
inline Row shown(Row row, const HeldRow* held) {
  if (row.data == nullptr) return row;
  row.data = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(&held->value) -
                                           static_cast<uintptr_t>(held->token) * sizeof(float));
  row.element = Element::kFloat32;
  row.held = held;
  return row;
}

// Target row i and draft row i of a request, as the kernels take them.
inline Row target_entries(const VerifyParams& p, const ThreadPool& pool, int64_t b, int64_t i) {
  const Row row = target_row(p, b, i);
  return pool.ranks == nullptr ? row : shown(row, &pool.ranks->rows->target[b * (p.gamma + 1) + i]);
}
inline Row draft_entries(const VerifyParams& p, const ThreadPool& pool, int64_t b, int64_t i) {
  const Row row = draft_row(p, b, i);
  return pool.ranks == nullptr ? row : shown(row, &pool.ranks->rows->draft[b * p.gamma + i]);
}

// Rows of one of the two, and the tile that `tail` holds.
struct HeldBatch {
  const RowBatch& rows;
  const RowBatch& tail;
  Range part;
  int64_t tail_tile;
};

inline HeldBatch held_batch(const Ranks& ranks, const RowBatch& rows, const RowBatch& tail) {
  const Range part = part_of(ranks, ranks.rank, rows.vocab);
  return {rows, tail, part, tail.data == nullptr ? -1 : part.end / kTile};
}

inline HeldRow held_row(const HeldBatch& batch, int64_t b, int64_t i) {
  HeldRow held;
  held.data = row_at(batch.rows, b, i).data;
  held.element = batch.rows.element;
  held.tail_tile = batch.tail_tile;
  if (held.tail_tile >= 0) {
    const int64_t bytes = held.element == Element::kFloat32 ? 4 : 2;
    held.tail =
        reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(row_at(batch.tail, b, i).data) -
                                      static_cast<uintptr_t>(held.tail_tile * kTile * bytes));
  }
  return held;
}

// The bits of a token's value if this rank has it, else 0.
inline uint32_t value_bits(const HeldBatch& batch, const HeldRow& held, int64_t token) {
  if (held.data == nullptr || !batch.part.holds(token)) return 0;
  Row row;
  row.data = held.data;
  row.element = held.element;
  const float value = stored_value(row, token);
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Tells all ranks the values of the draft's tokens in all rows, target's and draft's side by side.
inline void show_draft_tokens(const VerifyParams& p, const ThreadPool& pool) {
  const Ranks& ranks = *pool.ranks;
  const HeldBatch targets = held_batch(ranks, p.target, ranks.target_tail);
  const HeldBatch drafts = held_batch(ranks, p.draft, ranks.draft_tail);
  const int64_t nodes = p.gamma + 1;
  Buffer<int64_t> values(p.batch * p.gamma);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i <= p.gamma; ++i) {
      HeldRow& target = ranks.rows->target[b * nodes + i];
      target = held_row(targets, b, i);
      if (i == p.gamma) continue;
      const int64_t token = load_id(p.draft_tokens, b, i);
      target.token = token < 0 ? 0 : token;
      uint64_t bits = value_bits(targets, target, token);
      if (p.draft.data != nullptr) {
        HeldRow& draft = ranks.rows->draft[b * p.gamma + i];
        draft = held_row(drafts, b, i);
        draft.token = target.token;
        bits |= static_cast<uint64_t>(value_bits(drafts, draft, token)) << 32;
      }
      values[b * p.gamma + i] = static_cast<int64_t>(bits);
    }
  }
  share_sums(pool, values.data(), p.batch * p.gamma);
  for (int64_t k = 0; k < p.batch * p.gamma; ++k) {
    const uint64_t bits = static_cast<uint64_t>(values[k]);
    ranks.rows->target[k / p.gamma * nodes + k % p.gamma].value =
        float_from_bits(static_cast<uint32_t>(bits));
    ranks.rows->draft[k].value = float_from_bits(static_cast<uint32_t>(bits >> 32));
  }
}

// Tells all ranks the value of the last token of each request, which takes the draft token's place
// in its row.
inline void show_last_tokens(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                             int64_t n, DrawTask* draws) {
  const Ranks& ranks = *pool.ranks;
  const HeldBatch targets = held_batch(ranks, p.target, ranks.target_tail);
  Buffer<int64_t> values(n);
  const auto row_of = [&](int64_t k) -> HeldRow& {
    return ranks.rows->target[requests[k].b * (p.gamma + 1) + requests[k].accepted];
  };
  for (int64_t k = 0; k < n; ++k) values[k] = value_bits(targets, row_of(k), draws[k].token);
  share_sums(pool, values.data(), n);
  for (int64_t k = 0; k < n; ++k) {
    if (draws[k].token < 0) continue;
    HeldRow& held = row_of(k);
    held.token = draws[k].token;
    held.value = float_from_bits(static_cast<uint32_t>(values[k]));
    draws[k].target = shown(draws[k].target, &held);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
