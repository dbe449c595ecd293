// compact_kv: the accepted path's keys and values move behind the root's, in place.
//
// Grid: a cache's layers x requests x blocks of units of up to 16 bytes of a row (H, D). Reads and
// writes the accepted nodes' rows that are not in their places already. A thread moves its unit of
// every node, in the path's order: nothing that another thread moves is touched, and no node is
// overwritten before it has moved. Of a request with a status nothing moves.
#include "../core/topology.h"
#include "block.cuh"
#include "kernels.h"
#include "launch.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Nodes that a thread has on their way at once.
constexpr int kAtOnce = 4;

__device__ int32_t path_status(const CompactKvParams& p, int64_t b) {
  int32_t status = compact_status(p, b);
  bool legal = true;
  if (status == 0) {
    const int64_t accepted = load_id(p.num_accepted, b, 0), seq_len = load_id(p.seq_lens, b, 0);
    for (int64_t k = threadIdx.x; k < accepted; k += kThreads) {
      legal = legal && is_legal_step(p, b, k, seq_len);
    }
  }
  if (!block_all(legal)) status |= kInvalidTree;
  return status;
}

// Nodes k .. k + kAtOnce - 1: all are read before the first is written. That is no hazard, because
// what they overwrite lies before the nodes that follow.
template <typename Unit>
__device__ void move_nodes(const CompactKvParams& p, int64_t b, int64_t k, int64_t accepted,
                           Unit* root, int64_t pitch) {
  Unit held[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (k + i < accepted) held[i] = root[load_id(p.path, b, k + i) * pitch];
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (k + i < accepted) root[(k + i + 1) * pitch] = held[i];
  }
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    compact(const CompactKvParams p, const CacheRows rows, bool writes_status) {
  begin_kernel();
  const int64_t row_units = rows.heads * rows.width;
  const int64_t chunks = (row_units + kThreads - 1) / kThreads;
  const int64_t chunk = blockIdx.x % chunks, request = blockIdx.x / chunks;
  const int64_t b = request % p.batch, layer = request / p.batch;
  const int32_t status = path_status(p, b);
  if (writes_status && layer == 0 && chunk == 0 && threadIdx.x == 0) p.status[b] = status;
  const int64_t unit = chunk * kThreads + threadIdx.x;
  if (status != 0 || unit >= row_units) return;
  const int64_t accepted = load_id(p.num_accepted, b, 0), seq_len = load_id(p.seq_lens, b, 0);
  Unit* const root = static_cast<Unit*>(rows.data) + layer * rows.layer_stride +
                     b * rows.request_stride + seq_len * rows.place_stride +
                     unit / rows.width * rows.head_stride + unit % rows.width * rows.unit_stride;
  // What is in its place already: the path's first nodes, where they are 1, 2, 3, ...
  int64_t first = 0;
  while (first < accepted && load_id(p.path, b, first) == first + 1) ++first;
  for (int64_t k = first; k < accepted; k += kAtOnce) {
    move_nodes(p, b, k, accepted, root, rows.place_stride);
  }
}

// Rows of no bytes, or no layers: nothing moves, and there still is a status.
__global__ void __launch_bounds__(kThreads) check_paths(const CompactKvParams p) {
  begin_kernel();
  const int32_t status = path_status(p, blockIdx.x);
  if (threadIdx.x == 0) p.status[blockIdx.x] = status;
}

template <typename Unit>
void compact_cache(const CompactKvParams& p, const CacheRows& rows, bool writes_status,
                   const Gpu& gpu) {
  const int64_t chunks = (rows.heads * rows.width + kThreads - 1) / kThreads;
  launch(gpu, "compact", compact<Unit>, p.layers * p.batch * chunks, p, rows, writes_status);
}

}  // namespace

void compact_kv(const CompactKvParams& p, const Gpu& gpu) {
  const CacheRows& keys = p.caches[0];
  const bool with_keys = p.layers * keys.heads * keys.width > 0;
  if (!with_keys) launch(gpu, "check_paths", check_paths, p.batch, p);
  for (const CacheRows& rows : p.caches) {
    const bool writes_status = with_keys && &rows == &keys;
    switch (rows.unit_bytes) {
      case 1:
        compact_cache<uint8_t>(p, rows, writes_status, gpu);
        break;
      case 2:
        compact_cache<uint16_t>(p, rows, writes_status, gpu);
        break;
      case 4:
        compact_cache<uint32_t>(p, rows, writes_status, gpu);
        break;
      case 8:
        compact_cache<uint2>(p, rows, writes_status, gpu);
        break;
      default:
        compact_cache<uint4>(p, rows, writes_status, gpu);
    }
  }
}

void load_compact_kv(Loading& load) {
  load(check_paths, compact<uint8_t>, compact<uint16_t>, compact<uint32_t>, compact<uint2>,
       compact<uint4>);
}

}  // namespace cuda
}  // namespace specdec
