// compact_kv: the accepted path's keys and values move behind the root's, in place.
//
// Grid: (cache, layer, request) over threads. Reads and writes the rows of accepted nodes that are
// not in their places already. Of a request with a status nothing moves.
#include <cstring>

#include "../core/topology.h"
#include "kernels.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

int32_t path_status(const CompactKvParams& p, int64_t b) {
  const int32_t status = compact_status(p, b);
  if (status != 0) return status;
  const int64_t accepted = load_id(p.num_accepted, b, 0), seq_len = load_id(p.seq_lens, b, 0);
  for (int64_t k = 0; k < accepted; ++k) {
    if (!is_legal_step(p, b, k, seq_len)) return kInvalidTree;
  }
  return 0;
}

void move_row(const CacheRows& rows, char* to, const char* from) {
  const int64_t unit = rows.unit_bytes;
  for (int64_t h = 0; h < rows.heads; ++h) {
    const int64_t head = h * rows.head_stride * unit;
    if (rows.unit_stride == 1) {
      memcpy(to + head, from + head, static_cast<size_t>(rows.width * unit));
      continue;
    }
    for (int64_t i = 0; i < rows.width; ++i) {
      const int64_t at = head + i * rows.unit_stride * unit;
      memcpy(to + at, from + at, static_cast<size_t>(unit));
    }
  }
}

void compact_request(const CompactKvParams& p, const CacheRows& rows, int64_t layer, int64_t b) {
  const int64_t accepted = load_id(p.num_accepted, b, 0), seq_len = load_id(p.seq_lens, b, 0);
  const int64_t pitch = rows.place_stride * rows.unit_bytes;
  char* const root = static_cast<char*>(rows.data) +
                     (layer * rows.layer_stride + b * rows.request_stride) * rows.unit_bytes +
                     seq_len * pitch;
  for (int64_t k = 0; k < accepted; ++k) {
    const int64_t node = load_id(p.path, b, k);
    if (node != k + 1) move_row(rows, root + (k + 1) * pitch, root + node * pitch);
  }
}

}  // namespace

void compact_kv(const CompactKvParams& p, const ThreadPool& pool) {
  constexpr int64_t kBytesPerThread = 1 << 16;
  for (int64_t b = 0; b < p.batch; ++b) p.status[b] = path_status(p, b);
  for (const CacheRows& rows : p.caches) {
    const int64_t bytes = p.steps * rows.heads * rows.width * rows.unit_bytes;
    parallel_for(pool, p.layers * p.batch, kBytesPerThread / (bytes + 1) + 1, [&](int64_t i) {
      const int64_t b = i % p.batch;
      if (p.status[b] == 0) compact_request(p, rows, i / p.batch, b);
    });
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
