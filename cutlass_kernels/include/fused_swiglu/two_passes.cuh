// A consumer that reads gate in one pass over K and up in a second one, and can activate gate in between.
//
// In the pingpong schedule the consumers take turns at the tensor cores, one pass each: gate of tile 0 (consumer 0), gate
// of tile 1 (consumer 1), up of tile 0, up of tile 1. So consumer 0's activation runs while consumer 1's gate pass has
// the tensor cores and the ring already fills with up of tile 0.
#pragma once

#include "persistent.cuh"

namespace fused_swiglu {

constexpr int SUMS = SLABS * WIDTH / 2, SLICE = 8;

// Finish::gate_done and Finish::run, as in one_pass.cuh; Finish::activate is the activation.
template <class Finish>
struct TwoPasses {
  static __device__ __forceinline__ void run(Shared& shared, Params const& params, Schedule const& schedule,
                                             int consumer) {
    Accumulators gates, ups;
    auto gate = [&](int s, int j, int i) -> float& { return gates.slab[s][j * 4 + i]; };
    auto up = [&](int s, int j, int i) -> float& { return ups.slab[s][j * 4 + i]; };
    auto swish = [&] {
      CUTE_UNROLL
      for (int e = 0; e < SUMS; ++e) gates.at(e) = Finish::activate(gates.at(e));
    };
    Turns turns{consumer};
    Position at;
    turns.begin();
    for (int i = 0; schedule.has(i); i += PINGPONG ? CONSUMERS : 1) {
      int mine = PINGPONG ? i + consumer : i;
      bool has = schedule.has(mine), other = PINGPONG && (consumer == 1 || schedule.has(i + 1));
      if (PINGPONG && consumer == 1) at.skip(params.blocks);
      turns.take();
      if (!has) {  // consumer 1 has no tile in the last round: it gives both its turns away
        turns.give();
        turns.take();
        break;
      }
      Tile tile = schedule.tile(mine);
      accumulate(shared, consumer, at, 0, params.blocks, gates, [&] {
        if constexpr (SWISH != Swish::held) turns.give();
      });
      Finish::gate_done(shared, params, consumer, tile, gate);
      if constexpr (SWISH == Swish::overlap) swish();
      if constexpr (SWISH == Swish::held) {
        // ptxas moves barriers over arithmetic in registers, but not out of a loop whose trip count it does not know.
        for (int trip = 0; trip < params.once; ++trip) swish();
        turns.give();
      }
      if (other) at.skip(params.blocks);
      turns.take();
      int first = 0;
      if constexpr (SWISH == Swish::sliced) first = slices(shared, consumer, at, params.blocks, gates, ups);
      accumulate(shared, consumer, at, first, params.blocks, ups, [&] { turns.give(); });
      if (PINGPONG && consumer == 0 && other) at.skip(params.blocks);
      if constexpr (SWISH == Swish::epilogue) swish();
      Finish::run(shared, params, consumer, tile, gate, up);
    }
  }

  // The first blocks of the up pass, a slice of gate activated under each; returns how many blocks there were.
  static __device__ __forceinline__ int slices(Shared& shared, int consumer, Position& at, int blocks,
                                               Accumulators& gates, Accumulators& ups) {
    int block = 0;
    fence(ups);
    CUTE_UNROLL
    for (int slice = 0; slice < SUMS; slice += SLICE) {
      bool more = block < blocks;
      if (more) {
        wait<Full>(&shared.full[at.stage], at.filled());
        issue(shared, consumer, at.stage, block == 0, ups);
      }
      // Written back after the wait: the compiler serialises wgmmas whose neighbours' registers change under them.
      float activated[SLICE];
      CUTE_UNROLL
      for (int e = 0; e < SLICE; ++e) activated[e] = Finish::activate(gates.at(slice + e));
      warpgroup_wait<0>();
      CUTE_UNROLL
      for (int e = 0; e < SLICE; ++e) gates.at(slice + e) = activated[e];
      if (more) {
        release(shared, at.stage);
        at.next();
        ++block;
      }
    }
    fence(ups);
    return block;
  }
};

}  // namespace fused_swiglu
