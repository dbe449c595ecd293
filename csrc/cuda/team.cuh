// Teams: the blocks of a launch that add up residual masses for one request's tree together.
//
// All blocks of a team decide alike, each for itself: which masses are asked for next depends on
// those before and on nothing else, so nobody has to be told. Masses are asked for in rounds of a
// few, each cut into the same number of pieces, which blocks take by a counter. When all pieces of
// a round are done, every block adds them up and goes on to the next round.
//
// Every launch ends, however few of its blocks run at once: a block waits only for pieces of its
// round, and of the earliest round that is not done every piece is in the hands of a block that
// runs, and comes to it without waiting. A block that begins late repeats what the others decided,
// without a wait. It asks for its next piece while it works on one: a piece of a later round keeps
// nobody waiting.
//
// Memory: what a block wrote for a piece is seen by all threads of a block that found the round
// done (barrier, release; acquire, barrier).
#pragma once

#include "draw.cuh"

namespace specdec {
namespace cuda {
namespace {

constexpr int kSumsAtOnce = kWarp;  // a round's

// What the blocks of a team share, all 0 before the launch; apart from the other teams'.
struct alignas(128) TeamState {
  uint32_t taken;  // pieces, counted over all rounds, and those of rounds to come
  uint32_t done;
};

struct Teams {
  int64_t requests = 0;
  int64_t sums = 0;             // that a request may ask for in all; 0: there are no teams
  int64_t tiles = 0;            // of the wider vocabulary: the stride of `masses`
  TeamState* states = nullptr;  // [requests]
  double* masses = nullptr;     // [requests, sums, tiles]
  Divisor pieces[kSumsAtOnce];  // of each sum, in a round of 1, 2, ... of them: plan_rounds
};

struct TeamReservation {
  Reserved<TeamState> states;
  Reserved<double> masses;
};

// ---- on the host ---

TeamReservation reserve_teams(Workspace* workspace, const Teams& teams) {
  return {workspace->reserve<TeamState>(teams.sums > 0 ? teams.requests : 0),
          workspace->reserve<double>(teams.requests * teams.sums * teams.tiles)};
}

void place_teams(const Workspace& workspace, const TeamReservation& reserved, Teams* teams) {
  teams->states = workspace.at(reserved.states);
  teams->masses = workspace.at(reserved.masses);
}

// Blocks of a launch whose teams ask for about `at_once` sums in a round: as many as can have
// something to do, and no more than about a chip holds.
int64_t team_blocks(const Gpu& gpu, const Teams& teams, int64_t at_once) {
  const int64_t blocks = teams.requests * teams.tiles * at_once;
  const int64_t resident = gpu.chip.multiprocessors * kBlocksAt128Registers;
  return blocks < resident ? blocks : resident;
}

// Cuts the rounds of `blocks` blocks: a piece for each block of a team, or two, whichever is
// predicted to end sooner. A team that has a block more has it to spare.
void plan_rounds(int64_t blocks, Teams* teams) {
  constexpr int64_t kBeside = 3;  // what a piece takes beside its tiles, in the time of a tile
  const int64_t tiles = teams->tiles;
  const int64_t members = blocks > teams->requests ? blocks / teams->requests : 1;
  for (int64_t sums = 1; sums <= kSumsAtOnce; ++sums) {
    int64_t least = INT64_MAX;
    for (int64_t turns = 1; turns <= 2; ++turns) {
      const int64_t each = turns * members / sums;
      const int64_t pieces = each < 1 ? 1 : each < tiles ? each : tiles;
      const int64_t of_block = (sums * pieces + members - 1) / members;
      const int64_t time = of_block * ((tiles + pieces - 1) / pieces + kBeside);
      if (time >= least) continue;
      least = time;
      teams->pieces[sums - 1] = pieces;
    }
  }
}

// ---- on the device ---

// Nobody has taken a piece; a block for each request does it for its own.
__device__ void clear_team(const Teams& teams, int64_t b) {
  if (teams.sums > 0 && threadIdx.x == 0) teams.states[b].taken = teams.states[b].done = 0;
}

// A piece of a round, or that there is none for this block any more.
struct Turn {
  bool has_piece;
  int32_t sum;
  int32_t piece;
};

// A block in the team of a request. All functions are collective over the block.
class Member {
 public:
  __device__ Member(const Teams& teams, int64_t b)
      : teams_(teams),
        state_(teams.states + b),
        masses_(teams.masses + b * teams.sums * teams.tiles) {}

  // Where the masses of a sum of this round lie, tile by tile.
  __device__ double* masses(int64_t sum) const { return masses_ + sum * teams_.tiles; }
  // That each sum of this round is cut into.
  __device__ const Divisor& pieces() const { return teams_.pieces[sums_ - 1]; }

  __device__ void open_round(int32_t sums) {
    sums_ = sums;
    first_ = end_;
    end_ += static_cast<uint32_t>(sums * pieces().value);
  }

  // Waits for the end of the round where there is no piece. The block meets (for a task, or to add
  // masses up) before the next turn is written.
  __device__ Turn take_turn() {
    __shared__ Turn turn;
    if (threadIdx.x == 0) {
      turn.has_piece = next_ < end_;
      if (turn.has_piece) {
        const Place2d place = place_in(next_ - first_, pieces());
        turn.sum = static_cast<int32_t>(place.row);
        turn.piece = static_cast<int32_t>(place.column);
      } else {
        wait_for_pieces();
      }
    }
    __syncthreads();
    return turn;
  }

  // Asks for a piece, the first time once the launch before has ended.
  __device__ void look_ahead() {
    if (threadIdx.x == 0) next_ = atomicAdd(&state_->taken, 1u);
  }

  // What the block has written for a piece is there: its threads have met since.
  __device__ void finish_piece() {
    if (threadIdx.x == 0) release_add(&state_->done, 1);
  }

  // The masses of a round that is done, into shared memory, a warp a sum of tiles_of(sum) tiles;
  // further masses come after them.
  template <typename TilesOf>
  __device__ void add_up(int32_t sums, const TilesOf& tiles_of, double* found) {
#pragma unroll 1
    for (int32_t k = threadIdx.x / kWarp; k < sums; k += kWarps) {
      const double mass = sum_tiles(masses(k), tiles_of(k));
      if (threadIdx.x % kWarp == 0) found[k] = mass;
    }
    masses_ += sums * teams_.tiles;
    __syncthreads();
  }

 private:
  // The counter runs on: whoever is late finds it past the end.
  __device__ void wait_for_pieces() const {
    constexpr unsigned kPause = 20;  // nanoseconds
    while (static_cast<int32_t>(acquire(&state_->done) - end_) < 0) __nanosleep(kPause);
  }

  const Teams& teams_;
  TeamState* state_;
  double* masses_;
  int32_t sums_ = 1;    // of the round
  uint32_t first_ = 0;  // of the round's pieces, over all rounds
  uint32_t end_ = 0;
  uint32_t next_ = 0;  // this block's; known to its first thread
};

// Does a block's part for a request. `walk` decides, with all threads of the block: begin(act)
// calls act() once the launch before has ended, and its threads meet after that. Then next(masses,
// first) takes in the masses that were asked for, if it is not the first time, and gives the number
// of those that are asked for then, at most kSumsAtOnce. task(k) of these gives one, in shared
// memory, and tiles(k) its tiles.
template <Elements kElements, typename Walk>
__device__ __forceinline__ void work_in_team(const Teams& teams, int64_t b, Walk* walk) {
  __shared__ double masses[kSumsAtOnce];
  Member block(teams, b);
  walk->begin([&] {
    if (teams.sums > 0) block.look_ahead();
  });
  for (bool first = true;; first = false) {
    const int32_t sums = walk->next(masses, first);
    if (sums == 0) return;
    block.open_round(sums);
    for (;;) {
      const Turn turn = block.take_turn();
      if (!turn.has_piece) break;
      block.look_ahead();
      const DrawTask& task = walk->task(turn.sum);
      const Share share = share_of(num_tiles(task.target.vocab), turn.piece, block.pieces());
      residual_mass_tiles<kElements, true>(task, share.first, share.last,
                                           block.masses(turn.sum) + share.first);
      block.finish_piece();
    }
    block.add_up(sums, [&](int32_t k) { return walk->tiles(k); }, masses);
  }
}

// Lists those of the nodes [first, last) for which `asks` holds, in their order, as many as a round
// takes. By the first warp, whose lane 0 sets their number.
template <typename Asks, typename Node>
__device__ void list_sums(int32_t first, int32_t last, const Asks& asks, Node* nodes,
                          int32_t* sums) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  int32_t found = 0;
#pragma unroll 1
  for (int32_t base = first; base < last && found < kSumsAtOnce; base += kWarp) {
    const int32_t i = base + lane;
    const bool mine = i < last && asks(i);
    const unsigned asking = __ballot_sync(kAllLanes, mine);
    const int32_t place = found + __popc(asking & ((1u << lane) - 1));
    if (mine && place < kSumsAtOnce) nodes[place] = static_cast<Node>(i);
    found += __popc(asking);
  }
  if (lane == 0) *sums = found < kSumsAtOnce ? found : kSumsAtOnce;
}

// The requests of this block, one after another: do_part(b).
template <typename Part>
__device__ __forceinline__ void for_each_request(int64_t requests, const Part& do_part) {
  const uint32_t blocks = gridDim.x, n = static_cast<uint32_t>(requests);
  for (uint32_t b = blockIdx.x % n; b < n; b += blocks) do_part(b);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
