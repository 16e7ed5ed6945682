"""patch swaps what it can, leaves the rest and says why; unpatch restores; what the model computes stays."""

import copy
import gc
import weakref

import pytest
import torch
from modelled import swiglu_by_the_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fused_swiglu import ArgumentError, select
from fused_swiglu.capture import capture
from fused_swiglu.patching import FusedMLP, patch, unpatch

pytestmark = pytest.mark.filterwarnings("ignore:swiglu runs by torch:UserWarning")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"mlp_bias": True}),
    "smollm2": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "gelu": (Qwen2ForCausalLM, Qwen2Config, {"hidden_act": "gelu_pytorch_tanh"}),
}
NAMES = tuple(f"model.layers.{i}.mlp" for i in range(3))
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(5))


def build(family: str = "qwen2", **more) -> nn.Module:
    torch.manual_seed(0)
    model, config, options = FAMILIES[family]
    return model(config(**TINY | options | more)).to(torch.bfloat16).eval()


def layer(model: nn.Module, i: int = 0) -> nn.Module:
    return model.model.layers[i].mlp


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_models_compute_the_same_and_unpatch_restores(family):
    model = build(family)
    before, modules = logits(model), [layer(model, i) for i in range(3)]
    parameters, state = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    addresses = {name: p.data_ptr() for name, p in parameters.items()}

    report = patch(model)
    assert report.swapped == NAMES
    assert not report.left
    assert str(report) == "swapped 3 of 3 gated MLPs"
    assert all(isinstance(layer(model, i), FusedMLP) for i in range(3))
    torch.testing.assert_close(logits(model), before, rtol=0.05, atol=0.02)
    now = dict(model.named_parameters())
    assert list(now) == list(parameters)
    assert all(now[name] is p and p.data_ptr() == addresses[name] for name, p in parameters.items())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())

    assert unpatch(model) == NAMES
    assert [layer(model, i) for i in range(3)] == modules
    assert torch.equal(logits(model), before)
    assert unpatch(model) == ()


def test_the_fused_path_is_what_runs(monkeypatch):
    """Not the original forward: each MLP is one call."""
    model, calls, real = build(), [], select.swiglu
    patch(model)
    monkeypatch.setattr(select, "swiglu", lambda *given, **more: calls.append(given[0].shape) or real(*given, **more))
    logits(model)
    assert calls == [(18, 32)] * 3


def test_saves_loads_moves_copies_and_trains(tmp_path):
    model = build()
    patch(model)
    model.save_pretrained(tmp_path)
    again = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    patch(again)
    torch.testing.assert_close(logits(again), logits(model), rtol=0.05, atol=0.02)
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)

    twin = copy.deepcopy(model)
    unpatch(twin)
    assert isinstance(layer(model), FusedMLP)
    assert layer(twin).gate_proj.weight.data_ptr() != layer(model).gate_proj.weight.data_ptr()

    model.half().bfloat16().train()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert all(p.grad is not None for p in layer(model).parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = layer(model).gate_proj.weight.clone()
    unpatch(model)
    assert layer(model).training
    assert torch.equal(layer(model).gate_proj.weight, after)


def test_a_discarded_model_is_freed():
    model = build()
    patch(model)
    gone = weakref.ref(layer(model).gate_proj.weight)
    del model
    gc.collect()
    assert gone() is None


class Lora(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora_A = base_layer, nn.Linear(1, 1)

    def forward(self, x):
        return self.base_layer(x)


class Int8Linear(nn.Linear):
    """As quantisers have them."""


class Subclass(torch.Tensor):
    """A weight that is no plain tensor."""


class OtherMLP(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _replace(mlp, name, module):
    setattr(mlp, name, module)


def _subclassed(mlp):
    weight = torch.Tensor._make_subclass(Subclass, mlp.up_proj.weight.data)
    mlp.up_proj.weight = nn.Parameter(weight)


LEFT = {
    "lora": (lambda mlp: _replace(mlp, "gate_proj", Lora(mlp.gate_proj)), "gate_proj is adapted"),
    "quantised": (lambda mlp: _replace(mlp, "up_proj", Int8Linear(32, 48)), "up_proj is quantised or wrapped"),
    "tensor subclass": (_subclassed, "up_proj is quantised or wrapped"),
    "dynamic int8": (
        lambda mlp: torch.ao.quantization.quantize_dynamic(mlp.float(), {nn.Linear}, inplace=True),
        "gate_proj is quantised or wrapped",
    ),
    "meta": (lambda mlp: mlp.gate_proj.to("meta"), "gate_proj is offloaded"),
    "hook inside": (
        lambda mlp: mlp.up_proj.register_forward_hook(lambda *_: None),
        "up_proj has hooks, which a fused call would not run",
    ),
    "hook": (lambda mlp: mlp.register_forward_pre_hook(lambda *_: None), "it has hooks"),
    "replaced forward": (lambda mlp: setattr(mlp, "forward", mlp.down_proj.forward), "its forward is replaced"),
    "activation": (lambda mlp: _replace(mlp, "act_fn", nn.Mish()), "its activation is Mish"),
    "fp32": (lambda mlp: mlp.float(), "its weights are float32"),
    "one bias": (lambda mlp: _replace(mlp, "up_proj", nn.Linear(32, 48).bfloat16()), "only one of gate and up"),
    "shapes": (lambda mlp: _replace(mlp, "up_proj", nn.Linear(32, 40, False).bfloat16()), "differ in shape"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantiz")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_and_why(case):
    model = build()
    change, reason = LEFT[case]
    change(layer(model, 1))
    changed = layer(model, 1)
    report = patch(model)
    assert report.swapped == (NAMES[0], NAMES[2])
    assert list(report.left) == [NAMES[1]]
    assert reason in report.left[NAMES[1]]
    assert layer(model, 1) is changed
    assert f"swapped 2 of 3 gated MLPs\nleft {NAMES[1]}: " in str(report)
    unpatch(model)
    assert layer(model, 1) is changed


def test_down_proj_may_be_adapted_unless_it_is_computed_here():
    model = build()
    for i in range(3):
        layer(model, i).down_proj = Lora(layer(model, i).down_proj)
    assert patch(model, down="fixed").swapped == ()
    before = logits(model)
    assert patch(model).swapped == NAMES
    torch.testing.assert_close(logits(model), before, rtol=0.05, atol=0.02)


def test_offloaded_by_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = build()
    accelerate.cpu_offload(model, execution_device="cpu")
    report = patch(model)
    assert report.swapped == ()
    assert all("offload" in reason for reason in report.left.values())
    assert len(str(report).splitlines()) == 2  # one reason, said once


def test_sharded_by_dtensor(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = build()
        for name in ("gate_proj", "up_proj"):
            linear = getattr(layer(model), name)
            linear.weight = nn.Parameter(DTensor.from_local(linear.weight.data, mesh))
        report = patch(model)
        assert report.swapped == NAMES[1:]
        assert "gate_proj is sharded (DTensor)" in report.left[NAMES[0]]
    finally:
        torch.distributed.destroy_process_group()


def test_unknown_classes_merged_ones_and_the_model_itself():
    model = build()
    for i in range(3):
        model.model.layers[i].mlp = OtherMLP(layer(model, i))
    assert "OtherMLP is not known" in patch(model).left[NAMES[0]]
    assert patch(model, classes=["OtherMLP"]).swapped == NAMES
    assert patch(model).left == dict.fromkeys(NAMES, "it is patched already")
    merged = patch(Phi3ForCausalLM(Phi3Config(**TINY)))
    assert merged.swapped == ()
    assert "gate and up merged" in merged.left[NAMES[0]]
    alone = layer(build())
    assert "the model itself" in patch(alone).left[""]
    assert str(patch(nn.Linear(1, 1))) == "swapped 0 of 0 gated MLPs"
    with pytest.raises(ArgumentError, match="down: unknown 'cublas'"):
        patch(model, down="cublas")


def test_a_shared_mlp_stays_one():
    model = build()
    model.model.layers[2].mlp = layer(model, 0)
    assert patch(model).swapped == NAMES
    assert layer(model, 2) is layer(model, 0)
    unpatch(model)
    assert layer(model, 2) is layer(model, 0)
    assert not isinstance(layer(model), FusedMLP)


@pytest.mark.parametrize("down", ["torch", "fixed"])
def test_hidden_rows_of_a_real_run_have_the_same_bits_in_any_batch(monkeypatch, down):
    """Under the declared arithmetic, which its model computes here. The whole MLP with down="fixed"."""
    monkeypatch.setattr("fused_swiglu.select.swiglu", swiglu_by_the_model)
    model = build()
    ids = torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(6))
    rows = capture(model, ids, [1])[1]
    patch(model, down=down)
    mlp = layer(model, 1)
    gated: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: gated.append(inputs[0]))
    with torch.no_grad():
        alone = [mlp(row[None])[0] for row in rows]
        for m in (2, 3, 8, 17, 64):
            batch = mlp(rows[:m])
            if down == "fixed":
                assert torch.equal(batch, torch.stack(alone[:m]))
            else:
                assert torch.equal(gated[-1], torch.cat(gated[:m]))
