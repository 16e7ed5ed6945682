"""`fused-swiglu model`: a tiny model's rows on the CPU, what they hold, and what is refused in one line."""

import json

import pytest
import torch
from test_capture import directory as directory  # a model's directory with a tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_swiglu import ArgumentError, model_run
from fused_swiglu.checkpoints import smollm2_path
from fused_swiglu.cli import main
from fused_swiglu.model_run import Decoding, Text, greedy, logits_of, perplexity, say, sharing_copy, variants_of
from fused_swiglu.patching import FusedMLP

pytestmark = pytest.mark.filterwarnings("ignore:swiglu runs by torch:UserWarning")
TEXT = "one product gates the other product and the other gates one\n"


def build(dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


def test_variants_share_weights_and_only_the_patched_are_patched():
    model = build()
    variants = variants_of(model, ("torch", "fixed"))
    assert list(variants) == ["original", "patched", "patched fixed"]
    assert variants["original"] is model
    for name, one in variants.items():
        assert all(a is b for a, b in zip(one.parameters(), model.parameters(), strict=True))
        assert any(isinstance(m, FusedMLP) for m in one.modules()) == name.startswith("patched")
    with pytest.raises(ArgumentError, match="weights: no MLP can be patched: its weights are float32"):
        variants_of(build(torch.float32))


def test_what_the_text_rows_hold():
    model, ids = build(), torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    worse = sharing_copy(model)
    worse.lm_head = torch.nn.Linear(32, 64, bias=False).bfloat16()
    found = dict(say(variants_of(model) | {"worse": worse}, Text(ids, lambda told: str(told.tolist()), prompt=6), 5))
    original, patched, worse = found["original"], found["patched"], found["worse"]
    assert original["logits_max"] == original["logits_rms"] == 0
    assert original["top1"] == 1
    assert 0 < original["fp32_rms"] < 0.05
    assert original["greedy_equal"] == original["greedy_tokens"] == 5
    assert 0 < patched["logits_rms"] < 0.05
    assert patched["perplexity"] == pytest.approx(original["perplexity"], rel=0.01)
    assert worse["logits_rms"] > 0.5
    assert worse["top1"] < 0.5
    assert worse["greedy_equal"] < 5
    assert original["greedy"] == str(greedy(model, ids[:, :6], 5)[0].tolist())
    assert 0 <= original["batch_equal"] <= 1


def test_perplexity_and_greedy_are_transformers():
    model, ids = build(torch.float32), torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids)
    assert perplexity(out.logits, ids) == pytest.approx(out.loss.exp().item(), rel=1e-5)
    model.generation_config.eos_token_id = None
    told = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(greedy(model, ids, 6), told[:, 12:])


def test_a_decoding_step_is_the_next_token_of_the_text():
    """At a fixed place it is the same each time; advancing, it fills the cache as a model without one reads."""
    model = build(torch.float32)
    with torch.no_grad():
        decoding = Decoding(model, batch=2, context=5)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 64, (2, 5), generator=generator)
        whole = torch.cat([ids, ids[:, :1], ids[:, :1]], dim=1)
        wanted = model(input_ids=whole, use_cache=False).logits
        for _ in range(2):
            torch.testing.assert_close(decoding.capture(model)()[:, 0], wanted[:, 5], rtol=1e-4, atol=1e-4)
        decoding = Decoding(model, batch=2, context=5, length=7)
        step = decoding.capture(model, advance=True)
        for place in (5, 6):
            torch.testing.assert_close(step()[:, 0], wanted[:, place], rtol=1e-4, atol=1e-4)


def test_the_command_writes_rows(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fused_swiglu.timing.CPU_SECONDS", 0.05)
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "rows.jsonl"
    given = ["model", "--weights", str(directory), "--text", str(tmp_path / "text.txt"), "--new", "3"]
    given += ["--prefill", "7", "--decode", "2", "--context", "9", "--down", "torch", "fixed", "--device", "cpu"]
    assert main([*given, "--out", str(out)]) == 0
    environment, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert environment["environment"]["run"] == rows[0]["run"]
    assert [(row["phase"], row["variant"]) for row in rows] == [
        (phase, variant)
        for phase in ("text", "prefill", "decode")
        for variant in ("original", "patched", "patched fixed")
    ]
    shown = capsys.readouterr().out
    assert len([line for line in shown.splitlines() if not line.startswith("  ")]) == 9
    for row in rows:
        assert row["status"] == "ok"
        assert (row["layers"], row["k"], row["n"], row["ran_on"]) == (3, 32, 48, "cpu")
        if row["phase"] != "text":
            assert row["time_us"] > row["mlp_us"] * 0.5
            assert row["mlp_share"] == pytest.approx(row["mlp_us"] / row["time_us"])
            assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["tokens"] / row["time_us"] * 1e6)
            assert (row["variant"] == "original") == ("ratio" not in row)
    assert (rows[-1]["batch"], rows[-1]["tokens"], rows[-1]["context"]) == (2, 1, 9)


def test_random_weights_and_a_variant_that_fails(monkeypatch, capsys):
    monkeypatch.setattr("fused_swiglu.timing.CPU_SECONDS", 0.05)
    monkeypatch.setitem(model_run.SHAPES, "qwen2.5-0.5b", (24, 4, 2, 64))
    monkeypatch.setitem(model_run.MODELS, "qwen2.5-0.5b", (32, 48))

    def broken(*_, **__):
        raise RuntimeError("no compiler here")

    def fake_compile(model, **_):
        model.forward = broken
        return model

    monkeypatch.setattr(torch, "compile", fake_compile)
    given = ["model", "--like", "qwen2.5-0.5b", "--layers", "1", "--prefill", "4", "--device", "cpu", "--compile"]
    assert main(given) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "tokens/s" in lines[0]
    assert "of the original" in lines[1]
    assert all("failed: RuntimeError: no compiler here" in line for line in lines[2:])


@pytest.mark.parametrize(
    ("options", "argument", "remedy"),
    [
        ("--decode 1", "weights", "give one of them"),
        ("--like qwen2.5-0.5b --weights x --decode 1", "weights", "give one of them"),
        ("--like llama --decode 1", "like", "choose from"),
        ("--like qwen2.5-0.5b --text x", "text", "--weights"),
        ("--weights x --layers 2 --decode 1", "layers", "--like"),
        ("--weights x", "text", "say what to do"),
        ("--weights {tmp}/none --decode 1", "weights", "give a .gguf file"),
        ("--weights x --text {tmp}/none", "text", "UTF-8"),
        ("--like qwen2.5-0.5b --decode 0", "decode", "1 or more"),
        ("--like qwen2.5-0.5b --decode 1 --down cublas", "down", "choose from"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, options, argument, remedy):
    assert main(["model", *options.replace("{tmp}", str(tmp_path)).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument --{argument}" in line
    assert remedy in line


def test_smollm2_says_the_same():
    """The real model, where its package is installed: one short text."""
    from fused_swiglu.capture import load_model

    try:
        path = smollm2_path()
    except ArgumentError as error:
        pytest.skip(str(error))
    model, tokenizer = load_model(path, head=True)
    ids = tokenizer("The first product proposes what should pass, the second", return_tensors="pt")["input_ids"]
    wanted, found = (logits_of(model, ids) for model in variants_of(model).values())
    assert (wanted.argmax(-1) == found.argmax(-1)).float().mean() >= 0.9
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert perplexity(found, ids) == pytest.approx(perplexity(wanted, ids), rel=0.02)
