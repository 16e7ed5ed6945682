"""Captured hidden states are what the model's MLPs really see; bad input is refused in one line."""

import argparse
import hashlib
import json
import socket
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2Model,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fused_swiglu import ArgumentError
from fused_swiglu.capture import add_arguments, capture, run
from fused_swiglu.checkpoints import check_hidden, load_hidden, load_projections

TEXT = "one product gates the other product\r\nand the other gates one\n"
# A token per byte, in the letters that byte-level BPE writes them with.
VOCABULARY = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
LETTERS = {" ": "Ġ", "\r": "č", "\n": "Ċ"}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**TINY)),
    }[family]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A model directory as transformers saves one: weights, configuration, tokenizer."""
    path = tmp_path_factory.mktemp("model")
    build("qwen2").to(torch.bfloat16).save_pretrained(path)
    tokenizer = Tokenizer(models.BPE(VOCABULARY, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


@pytest.fixture
def call(directory, tmp_path):
    """Run the subcommand in a scratch directory; keywords replace options."""
    (tmp_path / "text.txt").write_bytes(TEXT.encode())

    def call(**changed):
        options = {
            "weights": str(directory),
            "layer": "0,2",
            "text": str(tmp_path / "text.txt"),
            "out": str(tmp_path / "hidden.safetensors"),
            "save-projections": str(tmp_path / "projections.safetensors"),
        } | {name.replace("_", "-"): value for name, value in changed.items()}
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return run(parser.parse_args([f"--{name}={value}" for name, value in options.items()]))

    return call


@contextmanager
def refused(argument: str, *words: str):
    with pytest.raises(ArgumentError) as caught:
        yield
    message = str(caught.value)
    assert caught.value.argument == argument, message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_captured_states_reproduce_the_models_own_intermediate(tmp_path, family):
    """act(gate) * up of captured states and loaded projections is what the model feeds its own down_proj."""
    model, input_ids = build(family), torch.randint(0, 256, (1, 11))
    model.save_pretrained(tmp_path)
    own: dict[int, torch.Tensor] = {}
    for i, block in enumerate(model.model.layers):
        block.mlp.down_proj.register_forward_pre_hook(lambda _, inputs, i=i: own.update({i: inputs[0]}))
    hidden = capture(model, input_ids, [2, 0])
    assert sorted(hidden) == [0, 2]
    assert len(own) == 3  # the model ran whole, once
    for layer, x in hidden.items():
        assert x.shape == (11, 32)
        assert x.dtype == torch.float32
        weights = load_projections(tmp_path, layer, torch.float32)
        gate, up = x @ weights.gate.T, x @ weights.up.T
        torch.testing.assert_close(torch.nn.functional.silu(gate) * up, own[layer][0])
    assert not torch.equal(hidden[0], hidden[2])


def test_hooks_are_removed_even_after_a_failure():
    model = build("qwen2")

    def hooks():
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    before = hooks()
    capture(model, torch.zeros(1, 2, dtype=torch.long), [0])
    with pytest.raises(IndexError):
        capture(model, torch.full((1, 2), 256), [0, 1])  # beyond the vocabulary
    assert hooks() == before


def test_the_command_writes_what_compare_reads(call, directory, tmp_path, monkeypatch, capsys):
    def no_network(*_):
        raise AssertionError("capture asked for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    assert call() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"layer {i}: {len(TEXT)} tokens x 32" for i in (0, 2)]

    with safe_open(tmp_path / "hidden.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["layers.0.mlp_input", "layers.2.mlp_input"]
        assert file.metadata() == {
            "model": directory.name,
            "text_sha256": hashlib.sha256((tmp_path / "text.txt").read_bytes()).hexdigest(),
            "tokens": str(len(TEXT)),
            "dtype": "bfloat16",
        }
    ids = torch.tensor([[VOCABULARY[LETTERS.get(letter, letter)] for letter in TEXT]])
    model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    expected = capture(model, ids, [0, 2])
    for layer in (0, 2):
        hidden = load_hidden(tmp_path / "hidden.safetensors", layer)
        weights = load_projections(tmp_path / "projections.safetensors", layer)
        assert torch.equal(hidden, expected[layer])
        assert torch.equal(weights.up, load_projections(directory, layer).up)
        check_hidden(hidden, weights.gate.shape[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hidden.safetensors", "projections.safetensors", "text.txt"]


def test_bad_options_are_refused_before_the_model_is_loaded(call, tmp_path, monkeypatch):
    monkeypatch.setattr("fused_swiglu.capture.load_model", lambda path: pytest.fail("the model was loaded"))
    for layers in ("", "0,x", "0;1"):
        with refused("layer", repr(layers), "0 15 29"):
            call(layer=layers)
    for name, content, reason in (
        ("none", None, "No such file"),
        ("latin", b"\xe9", "not UTF-8"),
        ("empty", b" \n", ""),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with refused("text", str(tmp_path / name), reason):
            call(text=str(tmp_path / name))
    with refused("out", "does not exist"):
        call(out=str(tmp_path / "none" / "hidden.safetensors"))
    with refused("save-projections", "is a directory"):
        call(save_projections=str(tmp_path))


def test_models_that_cannot_be_used(call, directory, tmp_path):
    with refused("layer", "has no layer 3", "choose one of its 3: 0 to 2"):
        call(layer="0,3")
    with refused("weights", "does not exist"):
        call(weights=str(tmp_path / "none"))
    with refused("weights", "give the model's directory"):
        call(weights=str(directory / "model.safetensors"))
    with refused("weights", f"cannot load {tmp_path}"):
        call(weights=str(tmp_path))
    (tmp_path / "text.txt").write_text("g" * 101)
    with refused("text", "101 tokens", "at most 100"):
        call()
    assert not (tmp_path / "hidden.safetensors").exists()


def test_a_model_without_gated_layers():
    gpt2 = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with refused("weights", "GPT2Model has no layers.N.mlp"):
        capture(gpt2, torch.zeros(1, 2, dtype=torch.long), [0])


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_packages_missing(call, tmp_path, monkeypatch, package):
    (tmp_path / "model.gguf").write_text("once upon a time")
    monkeypatch.setattr("fused_swiglu.capture.find_spec", lambda name: name != package or None)
    with refused("weights", f"needs {package}", "pip install '.[notebooks]'"):
        call(weights=str(tmp_path / "model.gguf"))


def test_a_damaged_gguf_is_refused(call, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_text("once upon a time")
    monkeypatch.setattr("fused_swiglu.capture.find_spec", lambda name: True)
    with refused("weights", "cannot load", "model.gguf"):
        call(weights=str(tmp_path / "model.gguf"))


def test_a_gguf_model_is_captured(call, tmp_path):
    """The same tiny model as GGUF: the captured states fit its projections, and layer 0's are checked by hand."""
    pytest.importorskip("accelerate", reason="transformers loads GGUF through accelerate")
    embedding = torch.randn(257, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    write_gguf_model(tmp_path / "model.gguf", embedding)
    assert call(weights=str(tmp_path / "model.gguf"), layer="0") == 0
    hidden = load_hidden(tmp_path / "hidden.safetensors", 0, torch.float32)
    check_hidden(hidden, load_projections(tmp_path / "projections.safetensors", 0).gate.shape[1])
    # Attention writes nothing (its output projection is zero), so the MLP reads the normalised embedding.
    ids = torch.tensor([VOCABULARY[LETTERS.get(letter, letter)] for letter in TEXT])
    expected = torch.nn.functional.rms_norm(embedding[ids], (32,), eps=1e-5)
    torch.testing.assert_close(hidden, expected, rtol=2**-7, atol=0)


def write_gguf_model(path: Path, embedding: torch.Tensor) -> None:
    """One Llama layer whose attention writes nothing; a byte tokenizer (with a merge: without any, none loads)."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(100)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(257)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*VOCABULARY, "zz"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["z z"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    shapes = {
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "ffn_gate": (48, 32),
        "ffn_up": (48, 32),
        "ffn_down": (32, 48),
    }
    tensors = {f"blk.0.{part}": rng.standard_normal(shape, dtype=np.float32) for part, shape in shapes.items()}
    tensors["blk.0.attn_output"] = np.zeros((32, 32), np.float32)
    tensors["token_embd"] = embedding.numpy()
    for norm in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[norm] = np.ones(32, np.float32)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_damaged_model_is_refused(call, directory, tmp_path):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-100])
    with refused("weights", f"cannot load {tmp_path}"):
        call(weights=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    with refused("weights", f"cannot load {tmp_path}"):
        call(weights=str(tmp_path))
