// A consumer that reads gate in one pass over K and up in a second one, and can activate gate in between.
//
// In the pingpong schedule the consumers take turns at the tensor cores, one pass each: gate of tile 0 (consumer 0), gate
// of tile 1 (consumer 1), up of tile 0, up of tile 1. So consumer 0's activation runs while consumer 1's gate pass has
// the tensor cores and the ring already fills with up of tile 0.
#pragma once

#include "persistent.cuh"

namespace fused_swiglu {

// Where the activation of the gate accumulators is.
enum class Swish {
  overlap,   // between the passes, once the other consumer has the tensor cores
  held,      // between the passes, before this one gives them away: the ablation of `overlap`
  epilogue,  // after both passes
  sliced,    // in slices, between the wgmmas of the up pass
};
constexpr auto SWISH = Swish(FS_SWISH);

constexpr int SUMS = SLABS * WIDTH / 2, SLICE = 8, SLICES = SUMS / SLICE;

// Finish: as in one_pass.cuh; its `activate` is the activation.
template <class Finish>
struct TwoPasses {
  static __device__ __forceinline__ void run(Shared& shared, Params const& params, Schedule const& schedule,
                                             int consumer) {
    Accumulators gates, ups;
    auto gate = [&](int s, int j, int i) -> float& { return gates.slab[s][j * 4 + i]; };
    auto up = [&](int s, int j, int i) -> float& { return ups.slab[s][j * 4 + i]; };
    auto swish = [&] {
      CUTE_UNROLL
      for (int slice = 0; slice < SUMS; slice += SLICE) {
        float values[SLICE];
        CUTE_UNROLL
        for (int e = 0; e < SLICE; ++e) values[e] = gates.at(slice + e);
        Finish::activate(params, values);
        CUTE_UNROLL
        for (int e = 0; e < SLICE; ++e) gates.at(slice + e) = values[e];
      }
    };
    Turns turns{consumer};
    Stamps stamp(params, consumer);
    Position at;
    turns.begin();
    for (int i = 0; schedule.has(i); i += TILES) {
      int mine = PINGPONG ? i + consumer : i;
      bool has = schedule.has(mine), other = PINGPONG && (consumer == 1 || schedule.has(i + 1));
      if (PINGPONG && consumer == 1) at.skip(params.blocks);
      turns.take();
      if (!has) {  // consumer 1 has no tile in the last round: it gives both its turns away
        turns.give();
        turns.take();
        break;
      }
      stamp(Event::turn_taken);
      Tile tile = schedule.tile(mine);
      accumulate(shared, consumer, at, 0, params.blocks, gates, [&] {
        if constexpr (SWISH != Swish::held) turns.give();
        stamp(Event::gate_issued);
      });
      stamp(Event::gate_done);
      Finish::gate_done(shared, params, consumer, tile, gate);
      if constexpr (SWISH == Swish::overlap) swish();
      if constexpr (SWISH == Swish::held) {
        swish();
        turns.give();
      }
      stamp(Event::swished);
      if (other) at.skip(params.blocks);
      turns.take();
      stamp(Event::turn_taken);
      int first = 0;
      if constexpr (SWISH == Swish::sliced) {
        if (params.blocks >= SLICES) {
          slices(shared, params, consumer, at, gates, ups);
          first = SLICES;
        } else {
          swish();
        }
      }
      accumulate(shared, consumer, at, first, params.blocks, ups, [&] {
        turns.give();
        stamp(Event::up_issued);
      });
      stamp(Event::up_done);
      if (PINGPONG && consumer == 0 && other) at.skip(params.blocks);
      if constexpr (SWISH == Swish::epilogue) swish();
      Finish::run(shared, params, consumer, tile, gate, up);
      stamp(Event::stored);
    }
  }

  // The first blocks of the up pass, a slice of gate activated under each.
  static __device__ __forceinline__ void slices(Shared& shared, Params const& params, int consumer, Position& at,
                                                Accumulators& gates, Accumulators& ups) {
    fence(ups);
    CUTE_UNROLL
    for (int slice = 0; slice < SLICES; ++slice) {
      wait<Full>(&shared.full[at.stage], at.filled());
      issue(shared, consumer, at.stage, slice == 0, ups);
      // Written back after the wait, behind fences: ptxas serialises all wgmmas of a kernel in which it sees accumulators
      // change while others are in flight.
      float activated[SLICE];
      CUTE_UNROLL
      for (int e = 0; e < SLICE; ++e) activated[e] = gates.at(slice * SLICE + e);
      Finish::activate(params, activated);
      warpgroup_wait<0>();
      fence(ups);
      fence(gates);
      release(shared, at.stage);
      at.next();
      CUTE_UNROLL
      for (int e = 0; e < SLICE; ++e) gates.at(slice * SLICE + e) = activated[e];
    }
    fence(ups);
  }
};

}  // namespace fused_swiglu
