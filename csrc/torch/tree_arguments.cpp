// The checks of what draft trees need beside verification: masks, attention, caches.
#include <cmath>
#include <utility>

#include "arguments.h"
#include "checker.h"
#include "outputs.h"
#include "overlap.h"

namespace specdec {
namespace {

// Those of latent attention (MLA): a latent vector of 512, and 64 more of a key that turn.
constexpr int64_t kMaxHeadSize = 576;
constexpr int64_t kMaxValueSize = 512;

// Bytes that memory traffic of a GPU comes in.
constexpr int64_t kWidestUnit = 16;

// Divides every address of the cache's elements, and the bytes that lie next to each other there.
int64_t common_unit(const Tensor& t, const CacheRows& rows, int64_t bytes) {
  uint64_t alignment =
      reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) | static_cast<uint64_t>(kWidestUnit);
  for (int64_t d = 0; d + 1 < t.dim(); ++d) {
    if (t.size(d) > 1) alignment |= static_cast<uint64_t>(t.stride(d) * bytes);
  }
  alignment |= static_cast<uint64_t>(rows.width * bytes);
  const int64_t unit = static_cast<int64_t>(alignment & (~alignment + 1));
  return rows.unit_stride == 1 && unit > bytes ? unit : bytes;
}

CacheRows rows_of(const Tensor& t) {
  const int64_t bytes = static_cast<int64_t>(t.element_size()), last = t.dim() - 1;
  CacheRows rows;
  rows.data = t.mutable_data_ptr();
  rows.width = t.size(last);
  rows.unit_stride = rows.width == 1 ? 1 : t.stride(last);
  const int64_t unit = common_unit(t, rows, bytes), elements = unit / bytes;
  // Strides that are not multiples of a unit belong to dimensions of one entry.
  rows.unit_bytes = static_cast<int32_t>(unit);
  rows.width /= elements;
  rows.heads = t.size(last - 1);
  rows.head_stride = t.stride(last - 1) / elements;
  rows.place_stride = t.stride(last - 2) / elements;
  rows.request_stride = t.stride(last - 3) / elements;
  rows.layer_stride = last == 4 ? t.stride(0) / elements : 0;
  if (rows.heads == 1 || rows.head_stride == rows.width * rows.unit_stride) {
    rows.width *= rows.heads;
    rows.heads = 1;
  }
  return rows;
}

int64_t words_for_nodes(int64_t nodes) { return (nodes + 63) / 64; }

}  // namespace

TreeMaskCall check_tree_mask(const Tensor& parents) {
  const Checker check("tree_mask", parents);
  const IdArray ids = check.ids(parents, "parents", "[B, N]", {-1, -1});
  const int64_t batch = parents.size(0), nodes = parents.size(1);
  check.in_range("N, the nodes of parents,", nodes, 1, kMaxNodes + 1);
  TreeMaskParams p;
  p.batch = batch;
  p.nodes = nodes;
  p.parents = ids;
  std::tuple outputs{new_output(parents, {batch, nodes, words_for_nodes(nodes)}, &p.ancestors),
                     new_output(parents, {batch, nodes}, &p.depths),
                     new_output(parents, {batch}, &p.status)};
  return {p, std::move(outputs)};
}

CompactKvCall check_compact_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& path,
                               const Tensor& num_accepted, const Tensor& seq_lens) {
  const Checker check("compact_kv", k_cache);
  check.cache(k_cache, "k_cache");
  check.cache(v_cache, "v_cache");
  const int64_t dims = k_cache.dim();
  bool same = v_cache.dim() == dims;
  for (int64_t d = 0; same && d < dims - 2; ++d) same = v_cache.size(d) == k_cache.size(d);
  check.require(same, std::string("v_cache must have ") + (dims == 5 ? "Y, B and L" : "B and L") +
                          " of k_cache " + describe(k_cache) + ", got " + describe(v_cache));
  check.require(!share_elements(k_cache, v_cache),
                "v_cache must not share elements with k_cache, which would move twice; where the "
                "values are a part of the keys pass v_cache = k_cache[..., :0]");
  const int64_t batch = k_cache.size(dims - 4);
  CompactKvParams p;
  p.layers = dims == 5 ? k_cache.size(0) : 1;
  p.batch = batch;
  p.places = k_cache.size(dims - 3);
  p.path = check.ids(path, "path", "[B, N]", {batch, -1});
  p.steps = path.size(1);
  p.num_accepted = check.ids(num_accepted, "num_accepted", "[B]", {batch});
  p.seq_lens = check.ids(seq_lens, "seq_lens", "[B]", {batch});
  p.caches[0] = rows_of(k_cache);
  p.caches[1] = rows_of(v_cache);
  Tensor status = new_output(k_cache, {batch}, &p.status);
  return {p, std::move(status)};
}

TreeAttentionCall check_tree_attention(const Tensor& q, const Tensor& k_cache,
                                       const Tensor& v_cache, const Tensor& ancestors,
                                       const Tensor& seq_lens, const OptionalTensor& block_table,
                                       const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                       const std::optional<double>& scale, double soft_cap,
                                       int64_t window) {
  const Checker check("tree_attention", q);
  check.vectors(q, "q", "[B, N, H, D]", {-1, -1, -1, -1});
  const int64_t batch = q.size(0), nodes = q.size(1), heads = q.size(2), head_size = q.size(3);
  check.in_range("N, the nodes of q,", nodes, 1, kMaxNodes + 1);
  check.in_range("D, the head size of q,", head_size, 1, kMaxHeadSize + 1);
  const bool paged = block_table.has_value();
  check.cached_vectors(k_cache, "k_cache",
                       paged ? "[num_blocks, block_size, Hkv, D]" : "[B, L, Hkv, D]",
                       {paged ? -1 : batch, -1, -1, head_size});
  const int64_t groups = k_cache.size(2);
  check.cached_vectors(v_cache, "v_cache",
                       paged ? "[num_blocks, block_size, Hkv, Dv]" : "[B, L, Hkv, Dv]",
                       {k_cache.size(0), k_cache.size(1), groups, -1});
  const int64_t value_size = v_cache.size(3);
  check.in_range("Dv, the head size of v_cache,", value_size, 1, kMaxValueSize + 1);
  check.ids(block_table, "block_table", "[B, P]", {batch, -1});
  check.require(!paged || k_cache.size(1) >= 1,
                "k_cache must have a block_size of at least 1, got " + describe(k_cache));
  check.require(k_cache.scalar_type() == v_cache.scalar_type() &&
                    (is_float8(k_cache) || k_cache.scalar_type() == q.scalar_type()),
                "k_cache and v_cache must have one dtype, that of q or one of 8 bits, got " +
                    describe(k_cache) + " and " + describe(v_cache) + " for q " + describe(q));
  check.require(heads >= 1 && groups >= 1 && heads % groups == 0,
                "H, the heads of q, must be a multiple of Hkv, those of k_cache, got " +
                    std::to_string(heads) + " and " + std::to_string(groups));
  check.bit_words(ancestors, "ancestors", "[B, N, ceil(N/64)]",
                  {batch, nodes, words_for_nodes(nodes)});
  check.ids(seq_lens, "seq_lens", "[B]", {batch});
  check.head_factors(k_scale, "k_scale", groups);
  check.head_factors(v_scale, "v_scale", groups);
  check.require(!scale.has_value() || std::isfinite(*scale),
                "scale must be finite or None, got " + std::to_string(scale.value_or(0.0)));
  check.require(std::isfinite(soft_cap) && soft_cap >= 0.0,
                "soft_cap must be finite and >= 0, got " + std::to_string(soft_cap));
  check.in_range("window", window, 0, int64_t{1} << 31);
  std::tuple outputs{new_tensor(q, {batch, nodes, heads, value_size}, q.scalar_type()),
                     new_tensor(q, {batch, nodes, heads}, ScalarType::Float)};
  return {{}, std::move(outputs)};
}

}  // namespace specdec
