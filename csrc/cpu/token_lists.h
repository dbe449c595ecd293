// Scratch memory of draft laws that name a few tokens each: their lists, sorted and checked.
//
// Grid: lists over threads. Reads every list once; writes 8 bytes an entry.
#pragma once

#include "threads.h"
#include "tile.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

struct Listed {
  int32_t token;
  float prob;
};

// Sorts entries by their tokens, below 2^bits, digit by digit from the lowest. Not std::sort: see
// Buffer. Where they end up: in `entries` or in `spare`.
inline Listed* sort_listed(Listed* entries, Listed* spare, int32_t n, int bits) {
  constexpr int kDigit = 9;
  for (int shift = 0; shift < bits; shift += kDigit) {
    int32_t places[1 << kDigit] = {};
    const auto digit = [&](int32_t i) { return entries[i].token >> shift & ((1 << kDigit) - 1); };
    for (int32_t i = 0; i < n; ++i) ++places[digit(i)];
    int32_t first = 0;
    for (int32_t& place : places) {
      const int32_t count = place;
      place = first;
      first += count;
    }
    for (int32_t i = 0; i < n; ++i) spare[places[digit(i)]++] = entries[i];
    Listed* const sorted = spare;
    spare = entries;
    entries = sorted;
  }
  return entries;
}

// Fills in the arrays of a call's lists, as long as it lives.
class ListStorage {
 public:
  ListStorage(TokenLists* lists, const RowBatch& draft, int64_t batch, const ThreadPool& pool)
      : tokens_(size_of(*lists, batch) * lists->width),
        probs_(size_of(*lists, batch) * lists->width),
        counts_(size_of(*lists, batch)) {
    if (lists->ids.data == nullptr) return;
    int bits = 0;
    while (bits < 31 && draft.vocab > int64_t{1} << bits) ++bits;
    parallel_for(pool, size_of(*lists, batch), kListsPerThread, [&](int64_t row) {
      const GivenList list = given_list(draft, *lists, row / lists->rows, row % lists->rows);
      counts_[row] = fill(list, lists->width, draft.vocab, bits,
                          tokens_.data() + row * lists->width, probs_.data() + row * lists->width);
    });
    lists->tokens = tokens_.data();
    lists->probs = probs_.data();
    lists->counts = counts_.data();
  }
  ListStorage(const ListStorage&) = delete;
  ListStorage& operator=(const ListStorage&) = delete;

 private:
  static int64_t size_of(const TokenLists& lists, int64_t batch) {
    return lists.ids.data != nullptr ? batch * lists.rows : 0;
  }

  // How many tokens are listed; 0 where one is out of range or there twice.
  static int32_t fill(const GivenList& list, int64_t width, int64_t vocab, int bits,
                      int32_t* tokens, float* probs) {
    Listed entries[kMaxListed], spare[kMaxListed];
    if (list.probs.data == nullptr) return 0;
    int32_t n = 0;
    for (int64_t k = 0; k < width; ++k) {
      const int64_t token = load_id(list.ids, 0, k);
      if (token == -1) continue;
      if (token < 0 || token >= vocab) return 0;
      entries[n++] = {static_cast<int32_t>(token), stored_value(list.probs, k)};
    }
    const Listed* sorted = sort_listed(entries, spare, n, bits);
    for (int32_t k = 0; k < n; ++k) {
      if (k > 0 && sorted[k].token == sorted[k - 1].token) return 0;
      tokens[k] = sorted[k].token;
      probs[k] = sorted[k].prob;
    }
    return n;
  }

  Buffer<int32_t> tokens_;
  Buffer<float> probs_;
  Buffer<int32_t> counts_;
};

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
