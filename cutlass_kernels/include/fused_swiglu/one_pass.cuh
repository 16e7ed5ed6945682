// A consumer that reads gate and up in one pass over K: columns 0..BN-1 of its accumulator tile are gate, the rest up,
// so both values of an output are in one thread's registers.
#pragma once

#include "persistent.cuh"

namespace fused_swiglu {

// Finish::gate_done takes the finished gate accumulators, then Finish::run both; gate(s, j, i) and up(s, j, i) are
// references to element i of column block j of slab s.
template <class Finish>
struct OnePass {
  static __device__ __forceinline__ void run(Shared& shared, Params const& params, Schedule const& schedule,
                                             int consumer) {
    Accumulators sums;
    auto gate = [&](int s, int j, int i) -> float& { return sums.slab[s][j * 4 + i]; };
    auto up = [&](int s, int j, int i) -> float& { return sums.slab[s][BN / 2 + j * 4 + i]; };
    Turns turns{consumer};
    Stamps stamp(params, consumer);
    Position at;
    turns.begin();
    for (int i = 0; schedule.has(i); i += TILES) {
      int mine = PINGPONG ? i + consumer : i;
      if (PINGPONG && consumer == 1) at.skip(params.blocks);  // the other's
      turns.take();
      if (!schedule.has(mine)) break;
      stamp(Event::turn_taken);
      accumulate(shared, consumer, at, 0, params.blocks, sums, [&] {
        turns.give();
        stamp(Event::up_issued);
      });
      stamp(Event::up_done);
      if (PINGPONG && consumer == 0) at.skip(params.blocks);
      Tile tile = schedule.tile(mine);
      Finish::gate_done(shared, params, consumer, tile, gate);
      Finish::run(shared, params, consumer, tile, gate, up);
      stamp(Event::stored);
    }
  }
};

}  // namespace fused_swiglu
