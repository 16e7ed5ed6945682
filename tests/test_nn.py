"""GatedMLP: the module that it stands for, the checkpoints that it loads, the same bits in any batch."""

import pytest
import torch
from modelled import swiglu_by_the_model
from torch import nn
from torch.nn.functional import gelu, silu

from fused_swiglu import ArgumentError
from fused_swiglu.nn import DOWN, GatedMLP

pytestmark = pytest.mark.filterwarnings("ignore:swiglu runs by torch:UserWarning")
HIDDEN, INTERMEDIATE = 32, 48


def build(**options) -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(HIDDEN, INTERMEDIATE, **{"dtype": torch.bfloat16} | options)


class Separate(nn.Module):
    """As a transformers model has it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=bias)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("bias", [False, True])
def test_loads_a_checkpoint_with_separate_names_and_computes_the_same(bias):
    """In fp32, where torch computes both."""
    separate = Separate(bias)
    outer, wanted = nn.ModuleDict({"mlp": build(bias=bias, dtype=torch.float32)}), nn.ModuleDict({"mlp": separate})
    state = wanted.state_dict()
    before = list(state)
    assert outer.load_state_dict(state, strict=True) == ([], [])
    assert list(state) == before  # the caller's is not changed
    x = torch.randn(2, 5, HIDDEN)
    torch.testing.assert_close(outer["mlp"](x), separate(x))
    outer["mlp"](x).sum().backward()
    separate(x).sum().backward()
    grad = outer["mlp"].gate_up_proj.weight.grad
    torch.testing.assert_close(grad, torch.cat((separate.gate_proj.weight.grad, separate.up_proj.weight.grad)))


def test_state_dict_round_trips_and_assign_keeps_the_storage():
    first, second = build(bias=True), build(bias=True)
    nn.init.zeros_(second.gate_up_proj.weight)
    state = first.state_dict()
    assert sorted(state) == [f"{part}_proj.{kind}" for part in ("down", "gate_up") for kind in ("bias", "weight")]
    second.load_state_dict(state)
    for (name, a), (other, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    second.load_state_dict(state, assign=True)
    assert second.gate_up_proj.weight.data_ptr() == state["gate_up_proj.weight"].data_ptr()


def test_half_a_checkpoint_is_reported():
    mlp, state = build(), Separate(False).state_dict()
    del state["up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_up_proj.weight(.|\n)*Unexpected key.*gate_proj"):
        mlp.load_state_dict(state)


def test_options_and_bad_input():
    x = torch.randn(3, HIDDEN).bfloat16()
    mlp = build(activation="gelu_tanh")
    gate, up = (x @ mlp.gate_up_proj.weight.T).float().chunk(2, dim=1)
    wanted = mlp.down_proj((gelu(gate, approximate="tanh") * up).bfloat16())
    torch.testing.assert_close(mlp(x), wanted, rtol=0.05, atol=0.01)
    for options, argument in (
        ({"activation": "swish"}, "activation"),
        ({"down": "cublas"}, "down"),
        ({"hidden": 0}, "hidden"),
        ({"intermediate": -8}, "intermediate"),
    ):
        with pytest.raises(ArgumentError) as caught:
            GatedMLP(**{"hidden": HIDDEN, "intermediate": INTERMEDIATE} | options)
        assert caught.value.argument == argument
    with pytest.raises(ArgumentError, match="down: fixed is one chain"):
        build(down="fixed").tensor_parallel_plan()
    assert "down='fixed'" in repr(build(down="fixed"))


@pytest.mark.parametrize("down", DOWN)
def test_compiles_whole_and_trains(down):
    torch._dynamo.reset()
    mlp = build(down=down, bias=True)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, HIDDEN).bfloat16()
    torch.testing.assert_close(compiled(x), mlp(x), rtol=2**-6, atol=1e-3)
    compiled(x).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mlp.parameters())


def test_a_row_has_the_same_bits_in_any_batch(monkeypatch):
    """Under the declared arithmetic: gate and up, and with down="fixed" the whole MLP."""
    monkeypatch.setattr("fused_swiglu.select.swiglu", swiglu_by_the_model)
    mlp = build(down="fixed", bias=True)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        gated, whole = mlp.gate_up_proj(x), mlp(x)
        for m in range(1, 65):
            assert torch.equal(mlp.gate_up_proj(x[:m]), gated[:m])
            if m in (1, 2, 3, 8, 33):
                assert torch.equal(mlp(x[:m]), whole[:m])
                assert torch.equal(mlp(x[64 - m :]), whole[64 - m :])  # and wherever it is in the batch
