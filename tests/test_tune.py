"""tune: what is found quickest, and the file that remembers it; on fake kernels of known speed."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from addressed import Addressed
from fakes import BrokenBuild, Tile, good, raises, wrong
from hypothesis import given
from hypothesis import strategies as st

from fused_swiglu import Arithmetic, Kernel, Operands, Problem, choice, registry, select, swiglu, timing, tuned
from fused_swiglu.cli import main
from fused_swiglu.results import load
from fused_swiglu.tune import OF_EACH_KERNEL, search

CPU = torch.device("cpu")
IEEE = Arithmetic()
PROBLEM = Problem(5, 24, 32)
PICK = tuned.Pick("cutlass.interleaved", "tile=128,fast=no", 5, 1.0, 2.0)
Registered = Callable[..., None]


Times = Callable[[Callable[[str], float]], None]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """In place of the clock: a candidate's time, by its key, in units of 100 to 102 us over the rounds."""

    def plant(time_of: Callable[[str], float]) -> None:
        def measure(variants: list[timing.Variant], device: torch.device) -> list[tuple[str, timing.Timing]]:
            planted = []
            for variant in variants:
                rounds = tuple(time_of(variant.key) * (100 + i % 3) for i in range(24))
                planted.append(
                    (variant.key, timing.Timing(rounds[1], rounds[0], rounds[2], 24, "graph", rounds=rounds))
                )
            return planted

        monkeypatch.setattr(timing, "measure", measure)

    return plant


def quick_at_128(key: str) -> float:
    return 0.5 if "tile=128" in key else 1.0


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "cache" / "tuning.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    return path


@pytest.fixture(autouse=True)
def _fresh(path: Path) -> Iterator[None]:
    another_process()
    yield
    another_process()


def another_process() -> None:
    """Forgets what a process keeps in memory."""
    select.forget()
    for kept in (tuned._session, tuned._read, tuned._warned):
        kept.clear()
    tuned.machine_key.cache_clear()


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Registered:
    """Leaves only these kernels, on a CPU that counts as a device with kernels."""
    for module in (choice, select):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)

    def register(*kernels: Kernel) -> None:
        monkeypatch.setattr(registry, "_installed", dict)
        monkeypatch.setattr(registry, "_registered", {kernel.name: kernel for kernel in kernels})

    return register


def config_of(problem: Problem = PROBLEM) -> str:
    return str(choice.choose(problem, IEEE, CPU)[1])


def call(**options: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    swiglu(*(torch.randn(rows, 32, generator=generator).bfloat16() for rows in (5, 24, 24)), **options)  # type: ignore[arg-type]


# What is found.


def test_the_quickest_is_found_kept_and_picked(only: Registered, times: Times, path: Path) -> None:
    times(quick_at_128)
    only(Addressed())
    assert config_of() == "tile=64,fast=no"
    found = search(PROBLEM, IEEE, CPU)
    assert str(found.quickest.config) == "tile=128,fast=no"
    assert (found.heuristic_us, found.time_us) == (101, 50.5)
    assert found.ratio == (0.5, 0.5, 0.5)
    assert [row.status for row in found.rows] == ["ok", "ok"]
    assert config_of() == "tile=128,fast=no"
    assert config_of(replace(PROBLEM, m=8)) == "tile=128,fast=no"  # of one bucket
    assert config_of(replace(PROBLEM, m=9)) == "tile=64,fast=no"
    assert config_of(replace(PROBLEM, dtype="fp16", weight_dtype="fp16", out_dtype="fp16")) == "tile=64,fast=no"
    another_process()
    assert config_of() == "tile=128,fast=no"
    assert sorted(os.listdir(path.parent)) == [".tuning.json.lock", "tuning.json"]


@pytest.mark.parametrize(("second", "picked"), [(1.0, 64), (0.998, 64), (0.98, 128), (1.02, 64)])
def test_what_is_not_distinguished_stays_with_the_heuristic(
    only: Registered, times: Times, second: float, picked: int
) -> None:
    times(lambda key: second if "tile=128" in key else 1.0)
    only(Addressed())
    found = search(PROBLEM, IEEE, CPU)
    assert found.quickest.config == Tile(picked)
    assert found.ratio[0] == pytest.approx(second if picked == 128 else 1)
    assert config_of() == f"tile={picked},fast=no"


def test_the_clock_is_asked(only: Registered) -> None:
    """Without planted times: what sleeps a while is not the quickest."""
    only(Addressed(wait=lambda config: time.sleep(0.03) if config.tile == 64 else None))
    assert search(PROBLEM, IEEE, CPU).quickest.config == Tile(128)


def test_the_pick_may_be_another_kernel(only: Registered, times: Times) -> None:
    times(lambda key: 0.5 if "own" in key else 1.0)
    only(Addressed("cutlass.interleaved"), Addressed("own.quick"))
    assert search(PROBLEM, IEEE, CPU).quickest.name == "own.quick"
    assert choice.choose(PROBLEM, IEEE, CPU)[0].name == "own.quick"


def test_a_candidate_of_other_bits_is_not_picked(only: Registered) -> None:
    def once_in_a_while(operands: Operands) -> torch.Tensor:
        return wrong(operands)

    slow = Addressed("cutlass.interleaved", wait=lambda config: time.sleep(4e-3))
    only(
        slow, Addressed("own.wrong", once_in_a_while), Addressed("own.raises", raises), BrokenBuild("own.broken", good)
    )
    found = search(PROBLEM, IEEE, CPU)
    assert found.quickest.name == "cutlass.interleaved"
    reasons = {row.kernel: row.reason for row in found.rows if row.status == "failed"}
    assert reasons["own.wrong"].endswith("of its outputs are not the heuristic's pick's")  # type: ignore[union-attr]
    assert reasons["own.raises"] == "RuntimeError: illegal memory access"
    assert reasons["own.broken"] == "ValueError: no such tile"


def test_what_is_not_built_is_left_out_unless_asked_for(only: Registered) -> None:
    built: set[int] = set()
    kernel = Addressed(
        tiles=tuple(Tile(tile) for tile in range(64, 64 + 2 * OF_EACH_KERNEL)),
        is_built=lambda problem, config, arithmetic: config.tile in built,
    )
    compile_it = kernel.compile

    def compiled(problem, config, *rest):
        built.add(config.tile)
        return compile_it(problem, config, *rest)

    kernel.compile = compiled  # type: ignore[method-assign]
    only(kernel)
    found = search(PROBLEM, IEEE, CPU)
    assert (len(found.rows), found.left_out) == (1, OF_EACH_KERNEL - 1)
    assert built == {64}
    found = search(PROBLEM, IEEE, CPU, compile_jobs=2)
    assert (len(found.rows), found.left_out) == (OF_EACH_KERNEL, 0)


def test_a_heuristic_pick_that_fails_is_an_error(only: Registered) -> None:
    only(Addressed(body=raises), Addressed("own.other"))
    with pytest.raises(
        RuntimeError, match=r"^cutlass\.interleaved\|tile=64.* cannot be timed: .*illegal memory access"
    ):
        search(PROBLEM, IEEE, CPU)
    assert tuned.find(PROBLEM, IEEE, CPU) is None


# In a call.


def test_a_call_tunes_once(only: Registered, times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    times(quick_at_128)
    launched: list[Tile] = []
    only(Addressed(wait=launched.append))
    call()
    assert launched == [Tile(64)]
    searches = []

    def counted(*args, **options):
        searches.append(args)
        return search(*args, **options)

    monkeypatch.setattr("fused_swiglu.tune.search", counted)
    call(tune=True)
    call(tune=True)
    assert len(searches) == 1
    another_process()
    call(tune=True)
    assert len(searches) == 1  # from the file
    call()
    assert launched[-1] == Tile(128)  # the pick serves those that do not ask, too


def test_a_call_goes_on_where_tuning_fails(only: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    only(Addressed())
    monkeypatch.setattr("fused_swiglu.tune.search", fails)
    with pytest.warns(UserWarning, match="not tuned: out of memory"):
        call(tune=True)


# The file.


@given(st.integers(0, 2**20))
def test_buckets(m: int) -> None:
    bucket = tuned.bucket(m)
    assert bucket >= m
    assert tuned.bucket(bucket) == bucket
    assert tuned.bucket(bucket + 1) > bucket
    if m <= 64:
        assert bucket in (8, 16, 32, 64)
    else:
        assert bucket <= 1.25 * m


def test_an_entry_holds_for_its_machine_and_sources_alone(only: Registered, monkeypatch, tmp_path: Path) -> None:
    only(Addressed())
    tuned.keep(PROBLEM, IEEE, CPU, PICK)
    changed = {
        "another torch": lambda: monkeypatch.setattr(torch, "__version__", "9.9"),
        "another library": lambda: monkeypatch.setattr("fused_swiglu.results._version", lambda package: "9.9"),
        "another GPU": lambda: monkeypatch.setattr(
            tuned, "_machine", lambda device, real=tuned._machine: real(device) | {"gpu": "B"}
        ),
        "another source": lambda: monkeypatch.setattr(tuned, "_digest", lambda package: "0"),
    }
    for what, change in changed.items():
        with monkeypatch.context():
            another_process()
            assert tuned.find(PROBLEM, IEEE, CPU) == PICK, what
            change()
            tuned.machine_key.cache_clear()
            assert tuned.find(PROBLEM, IEEE, CPU) is None, what
        monkeypatch.undo()
        monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "cache" / "tuning.json"))
        only(Addressed())


def test_a_digest_is_of_all_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "some_kernels"
    (package / "include").mkdir(parents=True)
    for name in ("__init__.py", "kernel.cu", "include/part.cuh", "notes.txt"):
        (package / name).write_text("one")
    monkeypatch.syspath_prepend(tmp_path)
    before = tuned._digest("some_kernels")
    (package / "notes.txt").write_text("two")
    assert tuned._digest("some_kernels") == before
    digests = {before}
    for name in ("__init__.py", "kernel.cu", "include/part.cuh"):
        (package / name).write_text("two")
        digests.add(tuned._digest("some_kernels"))
    assert len(digests) == 4
    assert set(tuned._sources()) >= {"cutlass_kernels", "triton_baselines"}


def well_formed(picks: object) -> str:
    return json.dumps({tuned.MARK: tuned.FORMAT, "machines": {tuned.machine_key(CPU): {"machine": {}, "picks": picks}}})


NAME = tuned.name_of(PROBLEM, IEEE)
UNUSABLE = {
    "cut short": ('{"fused-swiglu tuning": 1, "machi', "cannot be read"),
    "no text": (b"\xff\xfe\x00", "cannot be read"),
    "foreign": ('{"triton": []}', "is no tuning file"),
    "another version": ('{"fused-swiglu tuning": 99, "machines": {}}', "is no tuning file of this version"),
    "a list": ("[]", "is no tuning file"),
    "no machines": ('{"fused-swiglu tuning": 1}', "is broken"),
    "a machine without picks": ('{"fused-swiglu tuning": 1, "machines": {"a": {}}}', "is broken"),
}


@pytest.mark.parametrize(("content", "fault"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_an_unusable_file_is_named_once_ignored_and_left(
    only: Registered, path: Path, content: str | bytes, fault: str, recwarn: pytest.WarningsRecorder
) -> None:
    only(Addressed())
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    for _ in range(3):
        assert config_of() == "tile=64,fast=no"
    tuned.keep(PROBLEM, IEEE, CPU, PICK)
    assert config_of() == "tile=128,fast=no"  # in this process
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == 1
    assert messages[0].startswith(f"{path} {fault}")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "pick",
    [
        {"kernel": "cutlass.interleaved", "config": "tile=wide", "m": 5, "time_us": 1, "heuristic_us": 1},
        {"kernel": "no.such", "config": "default", "m": 5, "time_us": 1, "heuristic_us": 1},
        {"kernel": "cutlass.interleaved", "config": "depth=4", "m": 5, "time_us": 1, "heuristic_us": 1},
        {"kernel": ["a"], "config": 7, "m": 5, "time_us": 1, "heuristic_us": 1},
        {"kernel": "cutlass.interleaved"},
        {"kernel": "cutlass.interleaved", "config": "tile=64", "speed": 3},
    ],
)
@pytest.mark.filterwarnings("ignore:.*has a pick that cannot be read")
def test_a_pick_that_makes_no_sense_is_not_used(only: Registered, path: Path, pick: dict) -> None:
    only(Addressed())
    path.parent.mkdir()
    path.write_text(well_formed({NAME: pick}))
    assert config_of() == "tile=64,fast=no"


def test_a_pick_that_does_not_fit_is_not_used(only: Registered) -> None:
    kernel = Addressed(why_not=lambda problem, config, *_: "too wide" if config.tile == 128 else None)
    only(kernel)
    tuned.keep(PROBLEM, IEEE, CPU, PICK)
    assert config_of() == "tile=64,fast=no"


def test_a_folder_that_cannot_be_written(only: Registered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(Addressed())
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "file" / "tuning.json"))
    with pytest.warns(UserWarning, match=r"file/tuning\.json cannot be written .*forgotten when this process ends"):
        tuned.keep(PROBLEM, IEEE, CPU, PICK)
    assert config_of() == "tile=128,fast=no"
    another_process()
    assert config_of() == "tile=64,fast=no"


def test_old_machines_give_way(only: Registered, path: Path) -> None:
    only(Addressed())
    path.parent.mkdir()
    others = {f"{i:02}": {"machine": {}, "picks": {}} for i in range(tuned.MOST_MACHINES + 5)}
    path.write_text(json.dumps({tuned.MARK: tuned.FORMAT, "machines": others}))
    tuned.keep(PROBLEM, IEEE, CPU, PICK)
    machines = json.loads(path.read_text())["machines"]
    assert len(machines) == tuned.MOST_MACHINES
    assert list(machines)[-1] == tuned.machine_key(CPU)
    assert tuned.find(PROBLEM, IEEE, CPU) == PICK


def _keep_many(first: int) -> None:
    for n in range(first, first + 20):
        tuned.keep(Problem(5, n, 32), IEEE, CPU, PICK)


def test_processes_that_write_at_once_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_keep_many, args=(first,)) for first in (8, 108)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    (machine,) = json.loads(path.read_text())["machines"].values()
    assert len(machine["picks"]) == 40


def test_the_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.path() == tmp_path / "fused-swiglu" / "tuning.json"


# The command.


def test_the_command(
    only: Registered,
    times: Times,
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times(quick_at_128)
    monkeypatch.setenv("COLUMNS", "200")
    only(Addressed(), Addressed("own.wrong", wrong))
    out = path.parent.parent / "rows.jsonl"
    command = ["tune", "--shape", "5,32,24", "70,32,24", "--out", str(out), "--quiet"]
    assert main(command) == 1  # one is wrong
    shown = capsys.readouterr().out
    assert "cutlass.interleaved tile=64,fast=no" in shown
    assert "cutlass.interleaved tile=128,fast=no" in shown
    assert "own.wrong tile=64,fast=no: failed: RuntimeError" in shown
    assert f"kept in {path}" in shown
    rows, environments = load(out)
    assert [(row.m, row.kernel) for row in rows].count((70, "cutlass.interleaved")) == 2
    assert len(environments) == 1
    assert {row.run for row in rows} == {environments[0].run}
    assert [config_of(Problem(m, 24, 32)) for m in (7, 80)] == ["tile=128,fast=no"] * 2


BAD = {
    "--arithmetic undeclared:ieee:out": "argument --arithmetic: undeclared:ieee:out leaves bits open",
    "--arithmetic sm90:tanh:out": "argument --arithmetic: no kernel offers sm90:tanh:out",
    "--activation tanh": "argument --activation: unknown 'tanh'",
    "--compile 0": "argument --compile: 0 is too small",
    "--model qwen2.5-7b --shape 1,2,3": "argument --shape: given with --model",
    "--out ": "argument --out: is empty",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options(only: Registered, capsys: pytest.CaptureFixture[str], options: str) -> None:
    only(Addressed())
    assert main(["tune", *options.split(" ")]) == 2
    assert BAD[options] in capsys.readouterr().err


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    assert "there is no SM90 GPU here" in capsys.readouterr().err
