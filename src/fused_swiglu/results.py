"""Row: one kernel's result on one problem; the file that rows go to; the environment that they were made in."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import uuid
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .errors import ArgumentError

if TYPE_CHECKING:
    import pandas
    import torch

SCHEMA = 1
STATUSES = ("ok", "unsupported", "failed", "timeout")
SETTINGS = ("CUBLAS_WORKSPACE_CONFIG",)  # by it cuBLAS may split k, or not


class _Record:
    """A dataclass as a JSON object: what is None is absent, and a field that this version does not know is left out."""

    def to_dict(self) -> dict[str, Any]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in values if value is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, kw_only=True)
class Row(_Record):
    """What one kernel did on one problem under one regime. A field that is not known is None, never guessed.

    kernel, config, arithmetic: their ids; the last two are None where the kernel could not even be loaded.
    ran_on: the GPU's name, `cpu`, `interpreter` or `model`; None where it did not run. reason: why it is not ok.
    m, n, k, dtype, activation, bias, layout: the Problem. inputs, seed: where the operands came from.
    time_us, time_us_q1, time_us_q3: median and quartiles of one launch, in microseconds; host_us: the host's part.
    tflops, gbs: 4mnk floating-point operations, and the fewest bytes, over the median time (10^12/s, 10^9/s).
    peak: tflops as a share of the matrix rate measured in this run. samples: how many times were taken. rounds: each of
    them, in microseconds; the same place is the same round in all rows that were timed together. cache: `cold` where a
    launch finds nothing of its own tensors in the L2 cache, `warm` where it may.
    ratios: {name: (median, low, high)} of this kernel's time over the named kernel's, paired, 95% interval.
    sm_mhz, power_w, temperature_c: mean SM clock, power and temperature; in a burst the clock alone, by the GPU's own
    counters. throttled: what held the clock down, `power`, `thermal`, `hardware` joined by +, or `no`; a mere True or
    False in rows of earlier versions. uneven: in how many rounds that differed from the first reference's.
    run_to_run, batch: share of output words that change over repeats, and of a row's words with the rows around it.
    first_m: of `determinism`, where batch is the share of the first row's words that differ from those at m = first_m.
    m0, m1_*, plain_*, m2: mismatch with the model, with the exact result in ulps (floored, plain), and beyond
    tolerances (rtol, atol, share); shares in 0..1. outputs: how many outputs were compared.
    relation, contradicted: the property that a test measured, and the share of outputs that contradict it.
    rung, flipped, hypothesis: of `explain`: a step of the attribution ladder, the share of outputs that flip there, and
    what arithmetic the ladder is of; m1_*, plain_* and m2 are the rung's model's, at the rung `rest` the kernel's.
    """

    kernel: str
    config: str | None
    arithmetic: str | None
    m: int
    n: int
    k: int
    status: str
    schema: int = SCHEMA
    run: str | None = None
    role: str | None = None
    ran_on: str | None = None
    dtype: str | None = None
    activation: str | None = None
    bias: bool | None = None
    layout: str | None = None
    inputs: str | None = None
    seed: int | None = None
    reason: str | None = None
    regime: str | None = None
    launch: str | None = None
    time_us: float | None = None
    time_us_q1: float | None = None
    time_us_q3: float | None = None
    host_us: float | None = None
    samples: int | None = None
    rounds: tuple[float, ...] | None = None
    cache: str | None = None
    tflops: float | None = None
    gbs: float | None = None
    peak: float | None = None
    ratios: dict[str, tuple[float, float, float]] | None = None
    sm_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: str | bool | None = None
    uneven: int | None = None
    run_to_run: float | None = None
    batch: float | None = None
    first_m: int | None = None
    m0: float | None = None
    m1_gt0: float | None = None
    m1_gt1: float | None = None
    m1_max: float | None = None
    plain_gt0: float | None = None
    plain_gt1: float | None = None
    plain_max: float | None = None
    m2: tuple[tuple[float, float, float], ...] | None = None
    outputs: int | None = None
    relation: str | None = None
    contradicted: float | None = None
    rung: str | None = None
    flipped: float | None = None
    hypothesis: str | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ArgumentError("status", f"unknown {self.status!r}", f"choose from {', '.join(STATUSES)}")
        if self.schema != SCHEMA:
            raise ArgumentError("rows", f"a row has schema {self.schema}", f"this version reads schema {SCHEMA}")
        if self.ratios is not None:
            object.__setattr__(self, "ratios", {name: tuple(ratio) for name, ratio in self.ratios.items()})
        if self.rounds is not None:
            object.__setattr__(self, "rounds", tuple(self.rounds))
        if self.m2 is not None:
            object.__setattr__(self, "m2", tuple(tuple(share) for share in self.m2))

    @property
    def case(self) -> tuple[Any, ...]:
        """What rows must share to be compared: the problem, where its operands came from, and the run."""
        return self.run, self.m, self.n, self.k, self.dtype, self.activation, self.bias, self.layout, self.inputs

    @property
    def is_result(self) -> bool:
        """Whether its time is a GPU's: a time on a CPU, in an interpreter or a model is no result."""
        return self.ran_on not in (None, "cpu", "interpreter", "model")

    def to_json(self) -> str:
        """One line of JSON, without the fields that are None."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The row that `to_json` wrote. Raises ValueError where the line is no row, or one of another schema."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        return cls._from_values(values)

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Self:
        _check_values(values)
        try:
            return cls.from_dict({"config": None, "arithmetic": None, **values})
        except TypeError as error:
            raise ValueError(f"not a row: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Environment(_Record):
    """What a run ran on: versions, device, command, ceilings. No host name, and no path that the user did not type.

    revision: of the checkout that holds this source, `-dirty` where it has changes. command: as typed.
    peak_tflops, peak_gbs: the matrix rate (10^12/s) and read bandwidth (10^9/s) measured in this run.
    settings: environment variables that were set and change what a library computes (`SETTINGS`).
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    schema: int = SCHEMA
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    version: str | None = None
    revision: str | None = None
    command: str | None = None
    gpu: str | None = None
    driver: str | None = None
    cpu: str | None = None
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    numpy: str | None = None
    nvcc: str | None = None
    cutlass: str | None = None
    peak_tflops: float | None = None
    peak_gbs: float | None = None
    settings: dict[str, str] | None = None

    @classmethod
    def collect(cls, device: torch.device, command: str | None = None) -> Self:
        """Looks at this machine, and on a GPU measures its ceilings. `command` defaults to the program's name."""
        import torch

        from . import timing

        ceilings = timing.ceilings(device)
        return cls(
            version=_version("fused-swiglu"),
            revision=_revision(),
            command=Path(sys.argv[0]).name if command is None else command,
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            driver=_driver() if device.type == "cuda" else None,
            cpu=_cpu(),
            python=platform.python_version(),
            torch=torch.__version__,
            triton=_version("triton"),
            numpy=_version("numpy"),
            nvcc=_version("nvidia-cuda-nvcc") or _nvcc_on_path(),
            cutlass=_version("nvidia-cutlass"),
            peak_tflops=ceilings.tflops if ceilings else None,
            peak_gbs=ceilings.gbs if ceilings else None,
            settings={name: os.environ[name] for name in SETTINGS if name in os.environ} or None,
        )

    def to_json(self) -> str:
        """One line of JSON: an object whose only key is `environment`."""
        return json.dumps({"environment": self.to_dict()})


def _check_values(values: dict[str, Any]) -> None:
    """Raises ValueError for a field that a table or figure could not show."""
    wanted = {"kernel": str, "status": str, "m": int, "n": int, "k": int}
    optional = {
        "config": str, "arithmetic": str, "inputs": str, "ran_on": str, "reason": str, "regime": str, "launch": str,
        "time_us": (int, float), "time_us_q1": (int, float), "time_us_q3": (int, float), "tflops": (int, float),
        "peak": (int, float), "outputs": int, "relation": str, "contradicted": (int, float),
        "rung": str, "flipped": (int, float), "hypothesis": str, "run": str, "first_m": int,
        "run_to_run": (int, float), "batch": (int, float),
    }  # fmt: skip
    for name, kind in (wanted | optional).items():
        value = values.get(name)
        if not isinstance(value, kind) and (name in wanted or value is not None):
            raise ValueError(f"not a row: {name} is {value!r}")
    triples = [*(values.get("ratios") or {}).values(), *(values.get("m2") or ())]
    if any(len(triple) != 3 for triple in triples):
        raise ValueError("not a row: ratios and m2 hold triples")


class RowFile:
    """Appends rows and environments to a JSONL file, each written through at once: a killed run loses none.

    Raises ArgumentError, at once or later, where the file cannot be written or holds something other than rows.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        try:
            torn = _torn(self._path)
            self._file = self._path.open("ab", buffering=0)  # a line is written at once, or not at all
        except OSError as error:
            raise self._unwritable(error) from None
        if torn:
            self._append(b"\n")

    def write(self, record: Row | Environment) -> None:
        self._append(record.to_json().encode() + b"\n")

    def _append(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ArgumentError:
        return ArgumentError("out", f"cannot write {str(self._path)!r}: {error.strerror}", "give a file that can be")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _torn(path: Path) -> bool:
    """Whether an earlier run was killed within its last line. Raises ArgumentError for a file that holds no rows."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        if not re.match(rb'\{"(environment|kernel)": ', file.readline(100)):
            raise ArgumentError("out", f"{str(path)!r} holds something other than rows", "give another file")
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def load(*paths: str | PathLike[str]) -> tuple[list[Row], list[Environment]]:
    """The rows and environments of JSONL files, in order. Records of another kind (an object with one name, of an
    object, as `timeline` and `generated` write) are passed over; any other line that is no row, with a warning.

    Raises ArgumentError for a file that cannot be read.
    """
    rows: list[Row] = []
    environments: list[Environment] = []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise ArgumentError("FILE", f"cannot read {str(path)!r}: {error.strerror}", "check the path") from None
        if lines and not lines[0].startswith("{"):
            raise ArgumentError(
                "FILE", f"{str(path)!r} holds something other than rows", "give what compare --out wrote"
            )
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                if "environment" in values:
                    environments.append(Environment.from_dict(values["environment"]))
                elif [type(value) for value in values.values()] != [dict]:
                    rows.append(Row._from_values(values))
            except (ValueError, TypeError, AttributeError) as error:
                warnings.warn(f"{path}:{number} skipped: {error}", stacklevel=2)
    return rows, environments


def to_frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """One line per row, one column per field; what is not known is NA.

    Ratios become `ratio NAME`, `ratio NAME low` and `ratio NAME high`; tolerances become `m2 rtol=R atol=A`.
    """
    import pandas

    flat = [_flat(row) for row in rows]
    columns = dict.fromkeys(f.name for f in fields(Row) if f.name not in ("ratios", "m2"))
    for values in flat:
        columns |= dict.fromkeys(values)
    return pandas.DataFrame(flat, columns=list(columns))


def _flat(row: Row) -> dict[str, Any]:
    values = row.to_dict()
    for name, ratio in values.pop("ratios", {}).items():
        values.update(zip((f"ratio {name}", f"ratio {name} low", f"ratio {name} high"), ratio, strict=True))
    for rtol, atol, share in values.pop("m2", ()):
        values[f"m2 rtol={rtol:g} atol={atol:g}"] = share
    return values


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _revision() -> str | None:
    """The git revision of the checkout that this file belongs to; for an installed copy what FUSED_SWIGLU_REVISION
    states, or None."""
    if stated := os.environ.get("FUSED_SWIGLU_REVISION"):
        return stated
    here = Path(__file__).resolve().parent
    top = _output("git", "-C", str(here), "rev-parse", "--show-toplevel")
    if top is None or Path(top) / "src" / here.name != here:
        return None
    return _output("git", "-C", top, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None


def _cpu() -> str | None:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.machine() or None


def _nvcc_on_path() -> str | None:
    found = re.search(r"V(\d[\d.]*)", _output("nvcc", "--version") or "") if shutil.which("nvcc") else None
    return found.group(1) if found else None
