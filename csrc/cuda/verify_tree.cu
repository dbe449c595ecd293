// Tree verification: every node's law, then the recursion of core/tree.h over the nodes.
//
// Launches, each over all requests at once and all on the caller's stream:
//   open    a block a request: topology, and which rows are asked for (tree.cuh)
//   scan    a block takes some tiles of one target or draft row (law_pass.cuh)
//   finish  a block a row: the rows' laws, cutoffs included (cutoff.cuh)
//   race    (coupled rule) a block takes some tiles of a target row; a row's last block compares
//   visit   the recursion: blocks take sums over the vocabulary from a queue (work_queue.cuh); the
//           last block at a sum takes the request on until it waits for other sums, and the last
//           one at a request, which waits for none, closes it
//   draw    (but for the coupled rule) integer sums of the final law; a request's last block
//           searches
// so 5, whatever the tree. raw_logprobs adds 2, a reduced draft vocabulary 2 that come first
// (token_map.cuh), and lists of a draft's tokens 1 that comes first and 1 after `scan`
// (token_lists.cuh).
//
// A node waits at most twice for each of its children, for the law that it was drawn from and for
// the residual after it, and a request once more at its end: fewer than 2 N sums a request. Under
// traversal several nodes of a request may wait at once, and different blocks take them on: what a
// node's visit writes belongs to the node or its children, and a node is in one visit's hands at a
// time. What is shared is changed by atomics: the status bits, and how much of the request is
// unfinished.
//
// Reads 2 or 4 bytes per entry of each row that is asked for, again both rows of a node for each
// sum, and the final law's rows twice; and what masks and reduced vocabularies cost (tile.cuh).
// Unlike the CPU's, stepwise rules (all but traversal) read the rows off their path too: waiting
// for a decision would leave the chip idle. Writes O(rows x tiles). Numerics: as verify.cu; sums in
// tile order, so that it does not matter which block does what, or when.
#include "kernels.h"
#include "tree.cuh"
#if SPECDEC_LISTS
#include "token_lists.cuh"
#else
#include "token_map.cuh"
#endif

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// ---- lists ---

#if SPECDEC_LISTS
// The sums of the draft's rows, which are lists; scan_rows has left them out.
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    scan_lists(const VerifyTreeParams p, const TreeScratch s, int64_t splits) {
  begin_kernel();
  const Unit unit = this_unit(splits);
  const auto [b, v] = place_in(unit.index, p.nodes);
  const int64_t place = b * s.rows + p.nodes + v;
  const Row row = TreeRows{p, s}(place).row;
  if (row.data == nullptr) return;
  const Share share = share_of(num_tiles(row.vocab), unit.split, splits);
  scan_list(row, share.first, share.last, s.laws.summaries + place * s.tiles + share.first);
}
#endif

// ---- races ---

__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    race_nodes(const VerifyTreeParams p, const TreeScratch s, int64_t splits) {
  begin_kernel();
  __shared__ SharedArray<RaceTask, 1> task;
  const Unit unit = this_unit(splits);
  const auto [b, v] = place_in(unit.index, p.nodes);
  if (!is_reachable(s.trees[b], v)) return;
  const LawRow target = Nodes(p, s, b).target(v);
  if (!target.law.valid || target.law.point_mass) return;
  if (threadIdx.x == 0) task[0] = {target, race_of(p.randomness, b, depth_of(p, b, v))};
  __syncthreads();
  int64_t winner = -1;
  const bool last = run_race(task[0], s.runners + unit.index * s.tiles,
                             s.laws.counters + b * s.rows + v, unit.split, splits, &winner);
  if (last && threadIdx.x == 0) s.winners[unit.index] = winner;
}

// ---- the recursion ---

// Looks at all tokens of a request and begins all visits. Collective over the block.
__device__ void open_visits(const VerifyTreeParams& p, const TreeScratch& s, int64_t b) {
  const Tree& tree = s.trees[b];
  const Nodes nodes(p, s, b);
  for (int64_t v = 1 + threadIdx.x; v < tree.count; v += kThreads) {
    if (!is_reachable(tree, v)) continue;
    const int64_t parent = tree_parent(p, b, v);
    look_at_token(p, tree, v, nodes.target(parent), nodes.draft(parent));
  }
  __syncthreads();
  for (int64_t v = threadIdx.x; v < tree.count; v += kThreads) {
    if (!is_reachable(tree, v)) continue;
    nodes.visits[v] = begin_visit(p, s.requests[b], tree, v, 1.0, nodes.target(v), nodes.draft(v),
                                  nodes.winner(v));
  }
  __syncthreads();
}

__device__ DrawTask task_of(const TreeScratch& s, const Work& work, const NodeVisit& visit,
                            const LawRow& target, const LawRow& draft) {
  if (work.sum == Sum::kFinalMass) return s.requests[work.request].draw;
  const Pending pending = work.sum == Sum::kMass ? Pending::kMass : Pending::kRestMass;
  return pending_sum(s.trees[work.request], visit, pending, target, draft);
}

// Adds up a piece of a sum. True in every thread of the block that did the last one, with *mass set
// in the first warp.
template <Elements kElements>
__device__ bool add_piece(const VerifyTreeParams& p, const TreeScratch& s, const Ticket& ticket,
                          double* mass) {
  __shared__ SharedArray<LawRow, 2> rows;
  const Work& work = ticket.work;
  const Nodes nodes(p, s, work.request);
  // Rows take long to find: two threads find them side by side.
  if (threadIdx.x == 0) rows[0] = nodes.target(work.node);
  if (threadIdx.x == kThreads / 2) rows[1] = nodes.draft(work.node);
  __syncthreads();
  const NodeVisit& visit = nodes.visits[work.node];
  return add_mass<kElements, true>([&] { return task_of(s, work, visit, rows[0], rows[1]); },
                                   s.masses + (work.request * p.nodes + work.node) * s.tiles,
                                   s.laws.counters + work.request * s.rows + work.node,
                                   ticket.piece, s.queue.splits, mass);
}

// Takes a request down from a node until it waits, or ends and has its winner: a stepwise rule.
__device__ void descend(const VerifyTreeParams& p, Request* r, const Tree& tree, Nodes* nodes,
                        int64_t v) {
  for (;;) {
    NodeVisit visit = nodes->visits[v];
    const Pending pending = advance(p, r, tree, true, &visit);
    nodes->visits[v] = visit;
    if (pending == Pending::kNothing) return mark_path(p, tree, v);
    if (pending != Pending::kDescend) return nodes->wait(v, pending);
    v = visit.child;
  }
}

// Takes a request on, by one thread, from a node whose sum is there. Whether nothing of it is
// unfinished any more: then all that blocks did for it is seen.
__attribute__((noinline)) __device__ bool take_on(const VerifyTreeParams& p, const TreeScratch& s,
                                                  const Work& work, double mass) {
  const Tree tree = s.trees[work.request];
  Request r = s.requests[work.request];
  r.status = 0;
  Nodes nodes(p, s, work.request);
  NodeVisit* visit = nodes.visits + work.node;
  if (work.sum == Sum::kMass) take_mass(tree, mass, visit);
  if (work.sum == Sum::kRestMass) visit->rest_mass = mass;
  if (p.rule == Rule::kTraversal) {
    flow_down(p, &r, tree, &nodes, work.node);
  } else {
    descend(p, &r, tree, &nodes, work.node);
  }
  atomicOr(&s.requests[work.request].status, r.status);
  __threadfence();
  const bool last = atomicAdd(s.unfinished + work.request, -1) == 1;
  __threadfence();
  return last;
}

// ---- the end of a request ---

// By one thread: the request is over, unless a sum for the final draw is missing.
__attribute__((noinline)) __device__ void close_request(const VerifyTreeParams& p,
                                                        const TreeScratch& s, const Tree& tree) {
  const Nodes nodes(p, s, tree.b);
  Request r = s.requests[tree.b];
  const int64_t winner = find_winner(tree);
  finish_tree(tree, nodes.visits[winner], nodes.target(winner), nodes.draft(winner), &r);
  r.accepted = write_path(p, r, tree);
  if (knows_token(&r.draw)) write_tree_token(p, r.b, r.accepted, r.draw);
  s.requests[tree.b] = r;
  if (needs_draw(r.draw) && r.draw.residual && r.draw.mass < 0.0) {
    publish(s.queue, {r.b, winner, Sum::kFinalMass});
  } else {
    atomicAdd(s.queue.closed, WorkWord{1});
  }
}

// Collective over the block.
__device__ void end_request(const VerifyTreeParams& p, const TreeScratch& s, int64_t b) {
  const Tree& tree = s.trees[b];
  if (p.rule == Rule::kTraversal) {
    for (int64_t v = 1 + threadIdx.x; v < tree.count; v += kThreads) {
      if (accepts_node(p, s.requests[b], tree, v)) mark_path(p, tree, v);
    }
  }
  write_nodes(p, tree, threadIdx.x, kThreads);
  __syncthreads();
  if (threadIdx.x == 0) close_request(p, s, tree);
}

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    visit_trees(const __grid_constant__ VerifyTreeParams p, const __grid_constant__ TreeScratch s) {
  begin_kernel();
  // take_on and close_request are calls: what one thread does shall not take registers from the
  // sums. Hence __grid_constant__: the parameters' addresses are taken.
  __shared__ bool ends;
  for (;;) {
    const Ticket ticket = take_ticket(s.queue);
    if (!ticket.given) return;
    const Work& work = ticket.work;
    double mass = 0.0;
    if (work.sum == Sum::kNone) {
      open_visits(p, s, work.request);
    } else if (!add_piece<kElements>(p, s, ticket, &mass)) {
      continue;
    }
    if (threadIdx.x == 0) {
      ends = false;
      if (work.sum == Sum::kFinalMass) {
        s.requests[work.request].draw.mass = mass;
        atomicAdd(s.queue.closed, WorkWord{1});
      } else {
        ends = take_on(p, s, work, mass);
      }
    }
    __syncthreads();
    if (ends) end_request(p, s, work.request);
  }
}

// ---- the extra token ---

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    draw_token(const VerifyTreeParams p, const TreeScratch s, int64_t splits) {
  begin_kernel();
  __shared__ SharedArray<Request, 1> request;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index;
  copy_by_block(request.data(), s.requests[b]);
  DrawTask& task = request[0].draw;
  if (!needs_draw(task)) return;
  const bool last = draw<kElements, true>(&task, task.mass, s.tile_sums + b * s.tiles,
                                          s.laws.counters + b * s.rows, unit.split, splits);
  if (last && threadIdx.x == 0) write_tree_token(p, b, request[0].accepted, task);
}

// ---- raw logprobs ---

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    write_raw_logprobs(const RawRows rows, const LawScratch s) {
  begin_kernel();
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (place >= s.count) return;
  const FilteredRow task = rows(place);
  const RowLaw law = law_of(task, s, place);
  if (threadIdx.x % kWarp == 0 && law.valid) {
    rows.p.logprobs[place] = target_log_probability({task.row, law}, rows.p.out_tokens[place]);
  }
}

// ---- host ---

// All scratch memory of a call, what the workspace has promised already included.
TreeScratch make_scratch(const VerifyTreeParams& p, const Gpu& gpu, Workspace* workspace) {
  TreeScratch s;
  const bool filters = any_filters(p);
  const bool has_draft = p.draft.data != nullptr && reads_draft_law(p.rule);
  const bool races = runs_races(p.rule);
  const int64_t nodes = p.batch * p.nodes;
  s.rows = has_draft ? 2 * p.nodes : p.nodes;
  s.tiles = num_tiles(has_draft && p.draft.vocab > p.target.vocab ? p.draft.vocab : p.target.vocab);
  s.queue.requests = p.batch;
  s.queue.sums = 2 * p.nodes;
  s.queue.splits = splits_for(gpu, p.batch, s.tiles);
  const auto laws = reserve_laws(workspace, p.batch * s.rows, s.tiles, filters, true);
  const auto links = workspace->reserve<int32_t>(TreeMemory::kLinks * nodes);
  const auto tokens = workspace->reserve<int64_t>(TreeMemory::kTokens * nodes);
  const auto numbers = workspace->reserve<double>(TreeMemory::kNumbers * nodes);
  const auto log_p = workspace->reserve<float>(nodes);
  const auto trees = workspace->reserve<Tree>(p.batch);
  const auto requests = workspace->reserve<Request>(p.batch);
  const auto unfinished = workspace->reserve<int32_t>(p.batch);
  const auto visits = workspace->reserve<NodeVisit>(nodes);
  const auto wants_draft = workspace->reserve<uint8_t>(has_draft ? nodes : 0);
  const auto winners = workspace->reserve<int64_t>(races ? nodes : 0);
  const auto runners = workspace->reserve<Runner>(races ? nodes * s.tiles : 0);
  const auto masses = workspace->reserve<double>(nodes * s.tiles);
  const auto tile_sums = workspace->reserve<uint64_t>(p.batch * s.tiles);
  const auto queue = reserve_queue(workspace, s.queue);
  workspace->allocate(gpu);
  s.laws = laws_at(*workspace, laws, p.batch * s.rows, s.tiles, filters, true);
  s.memory = {workspace->at(links), workspace->at(tokens), workspace->at(numbers),
              workspace->at(log_p)};
  s.trees = workspace->at(trees);
  s.requests = workspace->at(requests);
  s.unfinished = workspace->at(unfinished);
  s.visits = workspace->at(visits);
  s.wants_draft = has_draft ? workspace->at(wants_draft) : nullptr;
  s.winners = races ? workspace->at(winners) : nullptr;
  s.runners = workspace->at(runners);
  s.masses = workspace->at(masses);
  s.tile_sums = workspace->at(tile_sums);
  place_queue(*workspace, queue, &s.queue);
  return s;
}

// As many as can have something to do at once, and no more than about a chip holds: whoever came
// later would find that all is done.
int64_t visiting_blocks(const Gpu& gpu, const VerifyTreeParams& p, const WorkQueue& queue) {
  constexpr int64_t kVisitsAtOnce = 4;  // of a request, at a guess; one under a stepwise rule
  const int64_t visits = p.rule == Rule::kTraversal ? kVisitsAtOnce : 1;
  const int64_t blocks = p.batch * queue.splits * visits;
  const int64_t resident = gpu.chip.multiprocessors * kBlocksAt128Registers;
  return blocks < resident ? blocks : resident;
}

const auto kVisit = by_elements([](auto e) { return visit_trees<decltype(e)::value>; });
const auto kDraw = by_elements([](auto e) { return draw_token<decltype(e)::value>; });

void launch_raw_logprobs(const Gpu& gpu, const VerifyTreeParams& p, const TreeScratch& s) {
  LawScratch raw = s.laws;
  raw.count = p.batch * p.nodes;
  raw.group_max = nullptr;
  raw.laws = nullptr;
  launch_scan(gpu, RawRows{p}, raw, false);
  launch(gpu, "write_raw_logprobs", write_raw_logprobs, (raw.count + kWarps - 1) / kWarps,
         RawRows{p}, raw);
}

void run(const VerifyTreeParams& given, const Gpu& gpu) {
  VerifyTreeParams p = given;
  Workspace workspace;
#if SPECDEC_LISTS
  const ListReservation lists = reserve_lists(&workspace, p);
  const TreeScratch s = make_scratch(p, gpu, &workspace);
  launch_lists(gpu, workspace, lists, &p);
  launch(gpu, "open_trees", open_trees, p.batch, p, s);
  launch_scan(gpu, TreeRows{without_lists(p), s}, s.laws, false);
  const int64_t rows = p.batch * p.nodes, shares = splits_for(gpu, rows, s.tiles);
  launch(gpu, "scan_lists", scan_lists, rows * shares, p, s, shares);
  launch_finish(gpu, TreeRows{p, s}, s.laws);
#else
  const MapReservation map = reserve_map(&workspace, p.map);
  const TreeScratch s = make_scratch(p, gpu, &workspace);
  launch_map(gpu, workspace, map, &p.map);
  launch(gpu, "open_trees", open_trees, p.batch, p, s);
  launch_laws(gpu, TreeRows{p, s}, s.laws);
#endif
  if (s.winners != nullptr) {
    const int64_t nodes = p.batch * p.nodes, splits = splits_for(gpu, nodes, s.tiles);
    launch(gpu, "race_nodes", race_nodes, nodes * splits, p, s, splits);
  }
  launch(gpu, "visit_trees", kVisit[elements_of_laws(p)], visiting_blocks(gpu, p, s.queue), p, s);
  if (s.winners == nullptr) {
    const int64_t splits = splits_for(gpu, p.batch, s.tiles);
    launch(gpu, "draw_token", kDraw[elements_of_laws(p)], p.batch * splits, p, s, splits);
  }
  if (p.raw_logprobs) launch_raw_logprobs(gpu, p, s);
}

void load_all(const Loading& load) {
  load(open_trees, race_nodes, kVisit, kDraw, write_raw_logprobs);
  load_laws<TreeRows>(load);
  load_laws<RawRows>(load);
}

}  // namespace

#if SPECDEC_LISTS

void verify_tree_lists(const VerifyTreeParams& p, const Gpu& gpu) { run(p, gpu); }

void load_verify_tree_lists(const Loading& load) {
  load_all(load);
  load(sort_lists, scan_lists);
}

#else

void verify_tree(const VerifyTreeParams& p, const Gpu& gpu) {
  if (p.batch == 0) return;
  if (p.lists.ids.data != nullptr) return verify_tree_lists(p, gpu);
  run(p, gpu);
}

void load_verify_tree(const Loading& load) {
  load_all(load);
  load_map(load);
  load_verify_tree_lists(load);
}

#endif

}  // namespace cuda
}  // namespace specdec
