// Scratch memory of a reduced draft vocabulary's map, checked while it is turned round.
//
// Launches: clear_map, a thread a token, then fill_map, a thread an entry; only where there is a
// map. Reads 4 or 8 bytes an id; writes 4 bytes an entry and, for the inverse, 8 bytes a token.
#pragma once

#include "../core/rows.h"
#include "launch.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

struct MapReservation {
  Reserved<int32_t> tokens;
  Reserved<int32_t> entries;
  Reserved<int32_t> broken;
  bool with_entries;
};

// The arrays of a TokenMap while they are written.
struct MapArrays {
  int32_t* tokens;
  int32_t* entries;  // null: no inverse is asked for, and ids may repeat
  int32_t* broken;
};

__global__ void __launch_bounds__(kThreads) clear_map(const TokenMap map, const MapArrays arrays) {
  begin_kernel();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token == 0) *arrays.broken = 0;
  if (arrays.entries != nullptr && token < map.num_tokens) arrays.entries[token] = -1;
}

__global__ void __launch_bounds__(kThreads) fill_map(const TokenMap map, const MapArrays arrays) {
  begin_kernel();
  const int64_t entry = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (entry >= map.num_entries) return;
  const int64_t token = load_id(map.ids, entry, 0);
  const bool known = token >= 0 && token < map.num_tokens;
  arrays.tokens[entry] = known ? static_cast<int32_t>(token) : 0;
  // Of two entries with one token, whichever comes later finds the other.
  const bool repeated = known && arrays.entries != nullptr &&
                        atomicExch(arrays.entries + token, static_cast<int32_t>(entry)) >= 0;
  if (!known || repeated) *arrays.broken = 1;  // by any number of threads: they agree
}

// `with_entries`: the inverse, from tokens, too, for which ids may not repeat.
MapReservation reserve_map(Workspace* workspace, const TokenMap& map, bool with_entries = true) {
  const bool given = map.ids.data != nullptr;
  return {workspace->reserve<int32_t>(given ? map.num_entries : 0),
          workspace->reserve<int32_t>(given && with_entries ? map.num_tokens : 0),
          workspace->reserve<int32_t>(given ? 1 : 0), with_entries};
}

// Fills in the arrays of a map, for all launches that come after.
void launch_map(const Gpu& gpu, const Workspace& workspace, const MapReservation& reserved,
                TokenMap* map) {
  if (map->ids.data == nullptr) return;
  const MapArrays arrays{workspace.at(reserved.tokens),
                         reserved.with_entries ? workspace.at(reserved.entries) : nullptr,
                         workspace.at(reserved.broken)};
  const auto blocks = [](int64_t n) { return (n + kThreads - 1) / kThreads; };
  launch(gpu, "clear_map", clear_map, blocks(reserved.with_entries ? map->num_tokens : 1), *map,
         arrays);
  launch(gpu, "fill_map", fill_map, blocks(map->num_entries), *map, arrays);
  map->tokens = arrays.tokens;
  map->entries = arrays.entries;
  map->broken = arrays.broken;
}

void load_map(Loading& load) { load(clear_map, fill_map); }

}  // namespace
}  // namespace cuda
}  // namespace specdec
