// cutlass.decode: SwiGLU for few tokens, at the speed at which the weights can be read.
//
// Where things are decided: the tokens of a tile and slabs from -D, its features, the ring and the order of tiles in
// decode.cuh's `Decode`; loads, the layout of a stage, the K chain, the rounding and the stores in decode.cuh; the
// activation in gate.cuh.
#include <fused_swiglu/decode.cuh>

namespace fused_swiglu {

FUSED_SWIGLU_EXPORT(Decode);

}  // namespace fused_swiglu
