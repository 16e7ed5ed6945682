// cutlass.gemm, the control: the products with w_gate and w_up side by side in [m, 2n], without activation.
//
// One pass is the control of cutlass.interleaved and cutlass.evt, two passes that of cutlass.pingpong; all else is the
// same code: see interleaved.cu and pingpong.cu for where things are decided.
#include <fused_swiglu/finish.cuh>
#include <fused_swiglu/one_pass.cuh>
#include <fused_swiglu/two_passes.cuh>

namespace fused_swiglu {

using Consume = cute::conditional_t<PASSES == 1, OnePass<Products>, TwoPasses<Products>>;
using Gemm = Bound<Consume, 2>;
FUSED_SWIGLU_EXPORT(Gemm);

}  // namespace fused_swiglu
