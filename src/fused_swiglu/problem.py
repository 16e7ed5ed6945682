"""Problem: what is computed. The models whose shapes are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import ArgumentError

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ACTIVATIONS = ("silu", "gelu_tanh", "relu", "sigmoid")
LAYOUTS = ("stacked", "separate")
OUTPUTS = ("out", "preactivations")

# (k, n): hidden size and intermediate size, from each model's published configuration.
MODELS: dict[str, tuple[int, int]] = {
    "qwen2.5-0.5b": (896, 4864),
    "qwen2.5-1.5b": (1536, 8960),
    "qwen2.5-3b": (2048, 11008),
    "qwen2.5-7b": (3584, 18944),
    "qwen2.5-14b": (5120, 13824),
    "qwen2.5-32b": (5120, 27648),
    "qwen2.5-72b": (8192, 29568),
    "smollm2-135m": (576, 1536),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """out[m, n] = act(x[m, k] @ w_gate[n, k].T + b_gate) * (x[m, k] @ w_up[n, k].T + b_up).

    m, n, k: rows of x (tokens), columns of out (intermediate size), length of the dot products (hidden size).
    dtype, weight_dtype, out_dtype: names from `DTYPES`; the last two follow `dtype` when empty (bf16 for fp8 inputs).
    layout: `stacked` for one [2n, k] tensor, gate above up, as checkpoints store it; `separate` for two.
    bias: whether b_gate[n] and b_up[n] are added to the accumulators.
    outputs: `out`, and `preactivations` ([m, 2n], gate beside up, in out_dtype) where training wants them.
    scaling: how fp8 operands are scaled: `none`, one factor per `tensor`, or one per `row`.
    x_stride, gate_stride, up_stride, out_stride: distance between rows in elements; 0 means contiguous.
    alignment: the largest power of two, up to 16 bytes, that divides every operand's address.

    Raises ArgumentError for a size, name or stride that makes no sense.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    weight_dtype: str = ""
    out_dtype: str = ""
    activation: str = "silu"
    layout: str = "stacked"
    bias: bool = False
    outputs: tuple[str, ...] = ("out",)
    scaling: str = "none"
    x_stride: int = 0
    gate_stride: int = 0
    up_stride: int = 0
    out_stride: int = 0
    alignment: int = 16

    def __post_init__(self) -> None:
        if self.m < 0:
            raise ArgumentError("m", f"{self.m} rows", "give 0 or more")
        for name in ("m", "n", "k"):
            if getattr(self, name) >= 2**31:
                raise ArgumentError(name, f"{getattr(self, name)} is too large", "give less than 2^31")
        for name in ("n", "k"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, f"{getattr(self, name)}", "give 1 or more")
        set_field = object.__setattr__
        if not self.weight_dtype:
            set_field(self, "weight_dtype", self.dtype)
        if not self.out_dtype:
            set_field(self, "out_dtype", "bf16" if self.dtype.startswith("fp8") else self.dtype)
        for field, names in (
            ("dtype", DTYPES),
            ("weight_dtype", DTYPES),
            ("out_dtype", DTYPES),
            ("activation", ACTIVATIONS),
            ("layout", LAYOUTS),
            ("scaling", ("none", "tensor", "row")),
        ):
            if getattr(self, field) not in names:
                raise ArgumentError(field, f"unknown {getattr(self, field)!r}", f"choose from {', '.join(names)}")
        if not set(self.outputs) <= set(OUTPUTS) or "out" not in self.outputs:
            raise ArgumentError("outputs", f"{self.outputs}", "give ('out',) or ('out', 'preactivations')")
        for field, contiguous in (
            ("x_stride", self.k),
            ("gate_stride", self.k),
            ("up_stride", self.k),
            ("out_stride", self.n),
        ):
            stride = getattr(self, field) or contiguous
            if stride < contiguous:
                raise ArgumentError(field, f"{stride} is less than the row's {contiguous} elements", "rows overlap")
            set_field(self, field, stride)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products: 4 m n k."""
        return 4 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """The fewest bytes a kernel moves: x and the weights read once, out written once."""
        x, w, out = (DTYPES[d].itemsize for d in (self.dtype, self.weight_dtype, self.out_dtype))
        written = self.m * self.n * (3 if "preactivations" in self.outputs else 1)
        return x * self.m * self.k + w * 2 * self.n * self.k + out * written

    @property
    def row_alignment(self) -> int:
        """The largest power of two, up to 16 bytes, that divides the address of every row of every operand."""
        step = self.alignment
        for stride, dtype in (
            (self.x_stride, self.dtype),
            (self.gate_stride, self.weight_dtype),
            (self.up_stride, self.weight_dtype),
            (self.out_stride, self.out_dtype),
        ):
            while stride * DTYPES[dtype].itemsize % step:
                step //= 2
        return step

    @property
    def no_tma(self) -> str | None:
        """Why TMA cannot move these matrices, in one clause; None where it can. It moves rows in pieces of 16 bytes: a
        row that ends elsewhere would be written into its padding, or read from there."""
        for name, dtype in (
            ("x_stride", self.dtype),
            ("gate_stride", self.weight_dtype),
            ("up_stride", self.weight_dtype),
            ("out_stride", self.out_dtype),
            ("k", self.dtype),
            ("k", self.weight_dtype),
            ("n", self.out_dtype),
        ):
            piece = 16 // DTYPES[dtype].itemsize
            if getattr(self, name) % piece:
                return f"{name} must be a multiple of {piece}, not {getattr(self, name)}"
        if self.alignment < 16:
            return f"every tensor must start at a multiple of 16 bytes, not of {self.alignment}"
        return None

    def __str__(self) -> str:
        return f"{self.m},{self.k},{self.n}"


def address_alignment(*tensors: torch.Tensor) -> int:
    """The largest power of two, up to 16, that divides every tensor's address (bytes)."""
    step = 16
    for tensor in tensors:
        while tensor.data_ptr() % step:
            step //= 2
    return step
