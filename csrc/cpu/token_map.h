// Scratch memory of a reduced draft vocabulary's map, checked while it is turned round.
#pragma once

#include "../core/rows.h"
#include "threads.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// Fills in the arrays of a map, as long as it lives. `with_entries`: the inverse, from tokens, too,
// for which ids may not repeat.
class MapStorage {
 public:
  explicit MapStorage(TokenMap* map, bool with_entries = true)
      : tokens_(map->num_entries), entries_(with_entries ? map->num_tokens : 0) {
    if (map->ids.data == nullptr) return;
    for (int64_t t = 0; with_entries && t < map->num_tokens; ++t) entries_[t] = -1;
    for (int64_t d = 0; d < map->num_entries; ++d) add(*map, d, with_entries);
    map->tokens = tokens_.data();
    map->entries = with_entries ? entries_.data() : nullptr;
    map->broken = &broken_;
  }
  MapStorage(const MapStorage&) = delete;
  MapStorage& operator=(const MapStorage&) = delete;

 private:
  void add(const TokenMap& map, int64_t d, bool with_entries) {
    const int64_t token = load_id(map.ids, d, 0);
    const bool known = token >= 0 && token < map.num_tokens;
    tokens_[d] = known ? static_cast<int32_t>(token) : 0;
    if (!known || (with_entries && entries_[token] >= 0)) {
      broken_ = 1;
    } else if (with_entries) {
      entries_[token] = static_cast<int32_t>(d);
    }
  }

  Buffer<int32_t> tokens_;
  Buffer<int32_t> entries_;
  int32_t broken_ = 0;
};

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
