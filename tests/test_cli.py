"""The command line: what it prints, what it refuses in one line, what it keeps when interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fused_swiglu import __version__, registry
from fused_swiglu.cli import COMMANDS, main
from fused_swiglu.results import load

pytestmark = pytest.mark.usefixtures("kernels")
TINY = ["compare", "--device", "cpu", "--shape", "8,32,16"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two layers' projections, k = 32 and n = 16."""
    path = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("gate", "up")]
    save_file({name: torch.randn(16, 32, generator=generator).bfloat16() for name in names}, path)
    return path


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """Ten tokens of both layers, k = 32."""
    path = tmp_path / "hidden.safetensors"
    save_file({f"layers.{layer}.mlp_input": torch.full((10, 32), 0.5).bfloat16() for layer in range(2)}, path)
    return path


BAD = [
    ("--model qwen9", "model", "choose from qwen2.5-0.5b"),
    ("--shape 8,32", "shape", "give three"),
    ("--shape 8,32,16,4", "shape", "give three"),
    ("--shape 8,0,16", "shape", "give 1 or more"),
    ("--shape a,b,c", "shape", "give integers"),
    ("--tokens 0", "tokens", "give 1 or more"),
    ("--tokens -1", "tokens", "give 1 or more"),
    ("--tokens many", "tokens", "give integers"),
    ("--tokens", "tokens", "--help"),
    ("--kernels fake.nothing", "kernels", "known kernels are"),
    ("--kernels tiled.good --config stages=3", "config", "choose the kernel"),
    ("--kernels tiled.good --config tile=wide", "config", "give an int"),
    ("--arithmetic sm80:*", "arithmetic", "choose from"),
    ("--dtype fp64", "dtype", "choose from bf16, fp16"),
    ("--layout rows", "layout", "choose from stacked, separate"),
    ("--inputs strange", "inputs", "choose from normal"),
    ("--regime steady", "regime", "choose from burst, sustained"),
    ("--seed -3", "seed", "give 0 or more"),
    ("--seed 1,2", "seed", "give one integer"),
    ("--seed 99999999999999999999", "seed", "less than 2^32"),
    ("--device tpu", "device", "choose from auto, cpu, cuda"),
    ("--model qwen2.5-7b --shape 8,32,16", "shape", "leave one of them out"),
    ("--model qwen2.5-7b --weights {checkpoint}", "weights", "leave one of them out"),
    ("--shape 8,32,16 --weights {checkpoint}", "weights", "leave one of them out"),
    ("--shape 8,32,16 --tokens 4", "tokens", "leave one of them out"),
    ("--layer 1", "layer", "add --weights FILE"),
    ("--weights {folder}/missing.safetensors", "weights", "give a"),
    ("--weights {text}", "weights", "fetch it again"),
    ("--weights {hidden}", "weights", "give a dense SwiGLU"),
    ("--weights {checkpoint} --layer 7", "layer", "0 to 1"),
    ("--weights {checkpoint} --layer one", "layer", "give integers"),
    ("--weights {checkpoint} --hidden {folder}/missing.safetensors", "hidden", "give a"),
    ("--weights {checkpoint} --hidden {checkpoint}", "hidden", "capture"),
    ("--weights {checkpoint} --hidden {hidden} --tokens 11", "tokens", "take fewer"),
    ("--weights {checkpoint} --hidden {hidden} --inputs normal", "inputs", "leave one of them out"),
    ("--model qwen2.5-0.5b --hidden {hidden}", "hidden", "capture both from one model"),
    ("--shape 11,32,16 --hidden {hidden}", "shape", "take fewer"),
    ("--out {folder}", "out", "give a file"),
    ("--out {folder}/missing/rows.jsonl", "out", "give a file"),
    ("--out {text}", "out", "give another file"),
    ("--plot {folder}/figure.txt", "plot", "ends in .png"),
    ("--plot {folder}/missing/figure.png", "plot", "create it"),
    ("--plot {folder}/figure.png --once", "plot", "leave one of them out"),
]


@pytest.mark.parametrize(("options", "argument", "remedy"), BAD, ids=[case[0] for case in BAD])
def test_bad_input_is_one_line_that_names_the_argument_and_the_remedy(
    options: str,
    argument: str,
    remedy: str,
    checkpoint: Path,
    hidden: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a tensor\n")
    monkeypatch.setattr("fused_swiglu.compare.run", None)  # no work may be begun
    before = sorted(tmp_path.iterdir())
    filled = options.format(checkpoint=checkpoint, hidden=hidden, text=text, folder=tmp_path)
    assert main(["compare", *filled.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"fused-swiglu: argument --{argument}: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert remedy in err
    assert sorted(tmp_path.iterdir()) == before
    assert text.read_text() == "not a tensor\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--device", "cuda"]) == 2
    assert capfd.readouterr().err.startswith("fused-swiglu: argument --device: torch finds no GPU; use cpu")


@pytest.mark.parametrize("argv", [[], ["compute"], ["--quiet"], ["--", "compare"], ["compare", "--tok", "3"]])
def test_a_command_line_that_cannot_be_read_is_one_line(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("fused-swiglu: ")


def test_every_command_has_help_with_an_example(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capfd.readouterr().out
    assert "example:" in out
    for name, (_, summary) in COMMANDS.items():
        assert summary in out
        assert main([name, "--help"]) == 0
        assert f"fused-swiglu {name} " in capfd.readouterr().out.partition("example")[2]


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"fused-swiglu {__version__}\n"


def test_rows_and_an_environment_are_written_and_a_table_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    argv = [*TINY, "--kernels", "torch.eager,fake.good", "fake.elsewhere", "--seed", "5", "--out", str(path)]
    assert main(argv) == 0
    rows, [environment] = load(path)
    assert {(row.kernel, row.status) for row in rows} == {
        ("torch.eager", "ok"),
        ("fake.good", "ok"),
        ("fake.elsewhere", "unsupported"),
    }
    assert {(row.run, row.m, row.k, row.n, row.seed) for row in rows} == {(environment.run, 8, 32, 16, 5)}
    assert environment.command is not None
    assert environment.command.startswith("fused-swiglu compare --device cpu --shape 8,32,16 --kernels torch.eager,")
    out = capfd.readouterr().out
    assert "CPU time" in out
    assert "no result" in out
    assert "fake.elsewhere default sm90:ieee:out: unsupported: needs a machine that nobody has" in out
    assert main(argv) == 0
    assert len(load(path)[0]) == 2 * len(rows)


def test_nothing_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "--kernels", "fake.good"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_fails_gives_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--kernels", "fake.raises", "fake.good"]) == 1
    assert "fake.raises default sm90:ieee:out: failed: RuntimeError: illegal memory access" in capfd.readouterr().out


def test_an_interrupt_keeps_the_rows_and_gives_exit_code_130(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert main([*TINY, "--kernels", "fake.raises", "fake.good", "stop.here", "--out", str(path)]) == 130
    assert {(row.kernel, row.status) for row in load(path)[0]} == {("fake.raises", "failed"), ("fake.good", "ok")}
    out, err = capfd.readouterr()
    assert "fake.good" in out
    assert err == f"fused-swiglu: interrupted; 2 rows kept in {path}\n"


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    assert main([*TINY, "--kernels", "fake.good", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_once_takes_no_times(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert main([*TINY, "--once", "--kernels", "fake.good", "--out", str(path)]) == 0
    [row] = load(path)[0]
    assert (row.status, row.time_us) == ("ok", None)


def test_tokens_and_families_make_cases(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    argv = ["compare", "--device", "cpu", "--model", "smollm2-135m", "--tokens", "1,3", "2", "--dtype", "fp16"]
    assert main([*argv, "--layout", "separate", "--inputs", "normal", "--kernels", "fake.own", "--out", str(path)]) == 0
    rows = load(path)[0]
    assert [(row.m, row.k, row.n) for row in rows] == [(m, 576, 1536) for m in (1, 3, 2)]
    assert {(row.dtype, row.layout, row.inputs) for row in rows} == {("fp16", "separate", "normal")}


def test_real_weights_and_hidden_states_are_read(checkpoint: Path, hidden: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    argv = ["compare", "--device", "cpu", "--kernels", "fake.good", "--out", str(path), "--layer", "0,1"]
    assert main([*argv, "--weights", str(checkpoint), "--hidden", str(hidden)]) == 0
    assert main([*argv, "--weights", str(checkpoint), "--hidden", str(hidden), "--tokens", "4"]) == 0
    assert main([*argv, "--weights", str(checkpoint), "--tokens", "3"]) == 0
    assert main([*argv, "--shape", "2,32,8", "--hidden", str(hidden)]) == 0
    rows = load(path)[0]
    assert [(row.m, row.n, row.k, row.inputs) for row in rows] == [
        (10, 16, 32, "weights:model.safetensors:layer0+hidden:hidden.safetensors"),
        (10, 16, 32, "weights:model.safetensors:layer1+hidden:hidden.safetensors"),
        (4, 16, 32, "weights:model.safetensors:layer0+hidden:hidden.safetensors"),
        (4, 16, 32, "weights:model.safetensors:layer1+hidden:hidden.safetensors"),
        (3, 16, 32, "weights:model.safetensors:layer0+normal"),
        (3, 16, 32, "weights:model.safetensors:layer1+normal"),
        (2, 8, 32, "normal+hidden:hidden.safetensors:layer0"),
        (2, 8, 32, "normal+hidden:hidden.safetensors:layer1"),
    ]
    assert {(row.status, row.m1_max) for row in rows} == {("ok", 0)}


def test_without_options_it_is_the_full_first_model_with_64_tokens_and_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr("fused_swiglu.compare.run", lambda work, **_: seen.extend(work) or iter(()))
    assert main(["compare"]) == 0
    [(case, candidates)] = seen
    assert (case.problem.m, case.problem.k, case.problem.n) == (64, 896, 4864)
    assert (case.problem.dtype, case.family) == ("bf16", "normal")
    assert {c.name for c in candidates} == set(registry.kernel_names())


def test_as_a_module_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fused_swiglu", *TINY, "--kernels", "torch.eager"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch.eager" in done.stdout
    assert "CPU time" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        (["--kernels", ""], "--kernels"),
        (["--out", ""], "--out"),
        (["--weights", ""], "--weights"),
        (["--config", ""], "--config"),
        (["--tokens", "99999999999999999999"], "--m"),
        (["--shape", "9999999999,16,16"], "--m"),
    ],
)
def test_empty_and_huge_values(options: list[str], argument: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--device", "cpu", *options]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert argument in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compare", "--shape", "2,16,8", "--kernels", "torch.eager", "--device", "cpu", "--out", "/dev/full"]) == 2
    )
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "argument --out" in err


def test_a_file_of_other_json_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}\n')
    assert (
        main(["compare", "--shape", "2,16,8", "--kernels", "torch.eager", "--device", "cpu", "--out", str(path)]) == 2
    )
    assert path.read_text() == '{"a": 1}\n'
