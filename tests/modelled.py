"""In place of `select.swiglu` on a CPU: the model of the declared arithmetic, with its bits, slowly."""

from fused_swiglu import Arithmetic, Weights
from fused_swiglu.sm90 import execute


def swiglu_by_the_model(
    x, w_gate, w_up=None, *, activation="silu", bias_gate=None, bias_up=None, out, preactivations=None, arithmetic
):
    """Its arguments are those that `torch_ops` gives, for a forward that stores nothing."""
    assert preactivations is None
    biases = {"bias_gate": bias_gate, "bias_up": bias_up}
    weights = Weights.from_stacked(w_gate, **biases) if w_up is None else Weights(w_gate, w_up, **biases)
    return out.copy_(execute(Arithmetic.parse(arithmetic), x, weights, activation, out_dtype=x.dtype))
