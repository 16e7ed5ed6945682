// cutlass.interleaved: gate and up in one accumulator, from one B stage that two TMA boxes fill side by side.
//
// Where things are decided: tiles, stages and cluster in options.cuh and tile.cuh, from -D; the order of tiles in raster.cuh; loads, the
// layout of a stage and the K chain in mainloop.cuh; turns in one_pass.cuh; the operations after the sums in finish.cuh
// and gate.cuh; the rounding in store.cuh.
#include <fused_swiglu/finish.cuh>
#include <fused_swiglu/one_pass.cuh>

namespace fused_swiglu {

static_assert(PASSES == 1);
using Interleaved = Bound<OnePass<SwiGLU>>;
FUSED_SWIGLU_EXPORT(Interleaved);

}  // namespace fused_swiglu
