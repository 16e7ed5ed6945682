"""patch(model): the gated MLPs of a transformers model run on the fused kernels, in place; unpatch(model) undoes it.

The kernels read the model's own parameters where they are: nothing is copied or packed, names and storage stay, and
optimizers, tied weights, state dicts and `.to()` go on as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .nn import check_down, project_down
from .torch_ops import ARITHMETIC, KERNEL_DTYPES, swiglu

# Classes of transformers whose forward is down_proj(act_fn(gate_proj(x)) * up_proj(x)), and nothing else.
CLASSES = frozenset(
    {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen2MoeMLP", "Qwen3MLP", "Qwen3MoeMLP", "SmolLM3MLP", "GemmaMLP"}
)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# By class name, so that transformers need not be there. GELUTanh is an approximation by definition, and this one.
ACTIVATION_CLASSES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What `patch` did: the names of the modules that it swapped, and of those that it left, each with the reason."""

    swapped: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)} of {len(self.swapped) + len(self.left)} gated MLPs"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"left {', '.join(names[:3])}{more}: {reason}")
        return "\n".join(lines)


class FusedMLP(nn.Module):
    """What stands in a patched model for an MLP: the same submodules under the same names, computed by `swiglu`."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Module

    def __init__(self, original: nn.Module, activation: str, down: str, arithmetic: str, recompute: bool) -> None:
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        self.original = (original,)  # in a tuple: no submodule, its parameters have one name
        self.activation, self.down, self.arithmetic, self.recompute = activation, down, arithmetic, recompute
        self.train(original.training)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        hidden = swiglu(
            x,
            gate.weight,
            up.weight,
            activation=self.activation,
            bias_gate=gate.bias,
            bias_up=up.bias,
            arithmetic=self.arithmetic,
            recompute=self.recompute,
        )
        return project_down(hidden, self.down_proj, self.down)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, down={self.down!r}, arithmetic={self.arithmetic!r}"


def patch(
    model: nn.Module,
    *,
    down: str = "torch",
    arithmetic: str = ARITHMETIC,
    recompute: bool = False,
    classes: Collection[str] = (),
) -> Report:
    """Swaps every gated MLP of `model` that the kernels can compute for one that they do; the others stay.

    down, arithmetic, recompute: as for `GatedMLP`. classes: names of further module classes whose forward is
    down_proj(act_fn(gate_proj(x)) * up_proj(x)) and nothing else; those of `CLASSES` are known.
    Left are MLPs that are quantised, adapted (LoRA), sharded, offloaded or hooked, of another dtype than bf16 and fp16,
    or of an activation without a kernel. Patching twice changes nothing. Not for a model that runs in another thread
    meanwhile. Raises ArgumentError for an unknown `down`.
    """
    check_down(down)
    swapped: list[str] = []
    left: dict[str, str] = {}
    made: dict[int, FusedMLP] = {}
    for name, parent, own, module in _gated(model):
        if isinstance(module, FusedMLP):
            left[name] = "it is patched already"
            continue
        activation, reason = _activation(module), _why_not(module, CLASSES | set(classes), down)
        if reason is None and activation is None:
            reason = f"its activation is {type(getattr(module, 'act_fn', None)).__name__}, which has no kernel"
        if reason is None and parent is None:
            reason = "it is the model itself: build a fused_swiglu.nn.GatedMLP"
        if reason is not None:
            left[name] = reason
            continue
        if id(module) not in made:  # an MLP that two layers share stays one
            made[id(module)] = FusedMLP(module, str(activation), down, str(arithmetic), recompute)
        setattr(parent, own, made[id(module)])
        swapped.append(name)
    return Report(tuple(swapped), left)


def unpatch(model: nn.Module) -> tuple[str, ...]:
    """Puts the original modules back, with the weights as they are now. Returns the names of these modules."""
    names = []
    for name, parent, own, module in _modules(model):
        if isinstance(module, FusedMLP) and parent is not None:
            (original,) = module.original
            for child, now in module.named_children():  # .to() may have made new ones
                setattr(original, child, now)
            original.train(module.training)
            setattr(parent, own, original)
            names.append(name)
    return tuple(names)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, str, nn.Module]]:
    """(name, parent, name within the parent, module) of each place that holds a module; a snapshot."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        parent, _, own = name.rpartition(".")
        yield name, model.get_submodule(parent) if name else None, own, module


def _gated(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, str, nn.Module]]:
    """The places of MLPs with three projections, or with gate and up merged in one."""
    for place in _modules(model):
        children = dict(place[3].named_children())
        if set(PROJECTIONS) <= children.keys() or {"gate_up_proj", "down_proj"} <= children.keys():
            yield place


def _activation(module: nn.Module) -> str | None:
    return ACTIVATION_CLASSES.get(type(getattr(module, "act_fn", None)).__name__)


def _why_not(module: nn.Module, classes: Collection[str], down: str) -> str | None:
    """Why a fused call would not do what this module does, in one clause; None where it would."""
    kind = type(module).__name__
    if "gate_up_proj" in dict(module.named_children()):
        return f"{kind} has gate and up merged: load its checkpoint into a fused_swiglu.nn.GatedMLP"
    projections = {name: getattr(module, name) for name in PROJECTIONS}
    for name in PROJECTIONS if down == "fixed" else PROJECTIONS[:2]:
        if reason := _no_plain_linear(projections[name]):
            return f"{name} {reason}"
    if hasattr(module, "_hf_hook") or "forward" in vars(module):
        return "its forward is replaced, as offloading does"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it has hooks, which would be lost: register them after patching"
    if kind not in classes:
        return f"{kind} is not known to be down_proj(act_fn(gate_proj(x)) * up_proj(x)): if it is, name it in classes"
    gate, up = projections["gate_proj"], projections["up_proj"]
    if gate.weight.dtype not in KERNEL_DTYPES or up.weight.dtype != gate.weight.dtype:
        return f"its weights are {str(gate.weight.dtype).removeprefix('torch.')}: cast the model to bf16 or fp16"
    if gate.weight.shape != up.weight.shape or gate.weight.device != up.weight.device:
        return "gate and up differ in shape or device"
    if (gate.bias is None) != (up.bias is None):
        return "only one of gate and up has a bias"
    return None


def _no_plain_linear(linear: nn.Module) -> str | None:
    """Why this is not a plain nn.Linear with its weight at hand."""
    kind = type(linear)
    weight = getattr(linear, "weight", None)
    if hasattr(linear, "lora_A") or hasattr(linear, "base_layer"):
        return f"is adapted ({kind.__module__}.{kind.__name__}): merge the adapter first"
    if isinstance(weight, DTensor) or isinstance(getattr(weight, "data", None), DTensor):
        return "is sharded (DTensor): use fused_swiglu.nn.GatedMLP and its tensor_parallel_plan"
    if isinstance(weight, Tensor) and weight.device.type == "meta":
        return "is offloaded: its weight is on the meta device"
    if hasattr(linear, "_hf_hook") or "forward" in vars(linear):
        return "has a forward that is replaced, as offloading does"
    if kind is not nn.Linear or type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"is quantised or wrapped ({kind.__module__}.{kind.__name__}), no plain nn.Linear"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return "has hooks, which a fused call would not run"
    if weight.dim() != 2 or not weight.is_contiguous():
        return "has a weight that is not contiguous"
    return None
