// cutlass.pingpong, Kernel-1: the activation of the gate accumulators runs in registers between a gate pass and an up pass.
//
// Where things are decided: tiles, stages and cluster in options.cuh and tile.cuh, from -D; the order of tiles in
// raster.cuh; loads, the layout of a stage and the K chain in mainloop.cuh; passes, turns and the activation's place in
// two_passes.cuh; the operations after the sums in finish.cuh and gate.cuh; the rounding in store.cuh.
#include <fused_swiglu/finish.cuh>
#include <fused_swiglu/two_passes.cuh>

namespace fused_swiglu {

static_assert(PASSES == 2);
using Pingpong = Bound<TwoPasses<SwiGLU>>;
FUSED_SWIGLU_EXPORT(Pingpong);

}  // namespace fused_swiglu
