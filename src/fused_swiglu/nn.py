"""GatedMLP: a SwiGLU MLP whose gate and up projections are one stacked parameter and one kernel; tensor parallel.

y = down_proj(act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from .errors import ArgumentError
from .problem import ACTIVATIONS
from .torch_ops import ARITHMETIC, product, swiglu

DOWN = ("torch", "fixed")
"""How the down projection is computed: by torch's linear, whose bits may depend on how many rows come together, or
under the arithmetic `sm90:none:out` (`torch_ops.product`), whose bits do not."""


class GatedMLP(nn.Module):
    """[..., hidden] to [..., hidden] through `intermediate` gated channels.

    Parameters: gate_up_proj.weight [2 * intermediate, hidden], gate above up; down_proj.weight
    [hidden, intermediate]; with bias=True gate_up_proj.bias and down_proj.bias.
    load_state_dict also takes checkpoints that hold gate_proj and up_proj apart, as most do.
    activation: one of `ACTIVATIONS`. down: one of `DOWN`. arithmetic, recompute: as for `torch_ops.swiglu`.
    Raises ArgumentError for a name that it does not know.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        down: str = "torch",
        arithmetic: str = ARITHMETIC,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_down(down)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_up_proj = GateUp(
            hidden, intermediate, activation=activation, arithmetic=arithmetic, recompute=recompute, **options
        )
        self.down_proj = nn.Linear(intermediate, hidden, **options)
        self.down = down
        self.register_load_state_dict_pre_hook(_merge_separate)

    def forward(self, x: Tensor) -> Tensor:
        return project_down(self.gate_up_proj(x), self.down_proj, self.down)

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """For `torch.distributed.tensor.parallel.parallelize_module(mlp, mesh, mlp.tensor_parallel_plan())`.

        Each rank computes its share of the gated channels with the fused kernel, and down_proj's partial sums are
        added over the ranks, in the activations' dtype. Raises ArgumentError for down="fixed": a sum over ranks is
        no single chain.
        """
        if self.down == "fixed":
            raise ArgumentError("down", "fixed is one chain, not one for each rank", 'build it with down="torch"')
        return {"gate_up_proj": ColwiseGateUp(), "down_proj": RowwiseParallel()}

    def extra_repr(self) -> str:
        return f"down={self.down!r}"


class GateUp(nn.Module):
    """act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up): [..., k] to [..., n].

    weight[2n, k], bias[2n] or None: gate's above up's. Split by `ColwiseGateUp` they are [2, n, k] and [2, n].
    """

    def __init__(
        self,
        k: int,
        n: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        arithmetic: str = ARITHMETIC,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ArgumentError("activation", f"unknown {activation!r}", f"choose from {', '.join(ACTIVATIONS)}")
        for name, size in (("hidden", k), ("intermediate", n)):
            if size < 1:
                raise ArgumentError(name, f"{size}", "give 1 or more")
        self.k, self.n = k, n
        self.activation, self.arithmetic, self.recompute = activation, str(arithmetic), recompute
        self.weight = nn.Parameter(torch.empty(2 * n, k, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(2 * n, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weights and biases as two nn.Linear would."""
        bound = 1 / math.sqrt(self.k)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _local(self.weight), None if self.bias is None else _local(self.bias)
        bias_gate, bias_up = (None, None) if bias is None else bias.chunk(2)
        return swiglu(
            x,
            weight,
            activation=self.activation,
            bias_gate=bias_gate,
            bias_up=bias_up,
            arithmetic=self.arithmetic,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        return f"k={self.k}, n={self.n}, bias={self.bias is not None}, activation={self.activation!r}"


class ColwiseGateUp(ParallelStyle):
    """Splits a `GateUp` by channels: each rank has as many rows of gate as of up, the same ones.

    The parameters become DTensors of [2, n, k] and [2, n], split along n. Input: replicated; output: split along the
    last dimension; both plain tensors. n must be a multiple of the number of ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, GateUp):
            raise ArgumentError("plan", f"splits a GateUp, not a {type(module).__name__}", "use ColwiseParallel for it")
        if module.n % device_mesh.size():
            wrong = f"{module.n} channels do not divide by {device_mesh.size()} ranks"
            raise ArgumentError("intermediate", wrong, "choose another mesh")
        return distribute_module(module, device_mesh, self._split, _replicated_input, None)  # type: ignore[arg-type]

    def _split(self, _: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            pair = parameter.detach().unflatten(0, (2, -1))
            split = distribute_tensor(pair, mesh, [Shard(1)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


def _replicated_input(module: nn.Module, inputs: tuple[Any, ...], mesh: Any) -> Tensor:
    """x as each rank has it whole; what flows back is this rank's part of its gradient, to be added up."""
    (x,) = inputs
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _local(parameter: Tensor) -> Tensor:
    """The parameter, or this rank's part of it as a parameter would be: gate's rows above up's."""
    return parameter.to_local().flatten(0, 1) if isinstance(parameter, DTensor) else parameter


def project_down(hidden: Tensor, linear: nn.Module, down: str) -> Tensor:
    """The down projection: by the module, or, for down="fixed", by `product` with its weight and bias."""
    if down == "torch":
        return linear(hidden)
    return product(hidden, linear.weight, linear.bias)  # type: ignore[arg-type]


def check_down(down: str) -> None:
    """Raises ArgumentError for a name that is not in `DOWN`."""
    if down not in DOWN:
        raise ArgumentError("down", f"unknown {down!r}", f"choose from {', '.join(DOWN)}")


def _merge_separate(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: gate_proj above up_proj is gate_up_proj. One without the other is left, and is reported."""
    for kind in ("weight", "bias"):
        gate, up = (f"{prefix}{part}_proj.{kind}" for part in ("gate", "up"))
        if gate in state and up in state:
            state[f"{prefix}gate_up_proj.{kind}"] = torch.cat((state.pop(gate), state.pop(up)))
