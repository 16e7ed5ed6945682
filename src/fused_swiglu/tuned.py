"""tuned: the file that remembers which kernel and config was quickest, and for what that holds.

    FUSED_SWIGLU_TUNING, or fused-swiglu/tuning.json in the user's cache folder

holds a JSON object, `{"fused-swiglu tuning": 1, "machines": {KEY: {"machine": {...}, "picks": {...}}}}`. A machine is a
GPU, its driver, the versions of torch, Triton and this library, and a hash of every kernel package's sources: what was
tuned on another, or before a kernel changed, is not looked at. Many machines can share a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from . import registry, results
from .arithmetic import Arithmetic
from .problem import Problem

VARIABLE = "FUSED_SWIGLU_TUNING"
MARK, FORMAT = "fused-swiglu tuning", 1
MOST_MACHINES = 32
SOURCES = (".py", ".cu", ".cuh", ".h", ".hpp")


@dataclass(frozen=True, slots=True)
class Pick:
    """What tuning chose: a kernel's name, and its config's id. m: of the problem that was timed. time_us: the median of
    a launch; heuristic_us: that of what the heuristic picks, in the same rounds."""

    kernel: str
    config: str
    m: int
    time_us: float
    heuristic_us: float


_session: dict[tuple[str, str, str], Pick] = {}  # (path, machine, problem): what was tuned here, kept or not
_warned: set[tuple[str, object]] = set()
_read: dict[str, tuple[object, dict[str, Any] | None]] = {}


def path() -> Path:
    """The file. It need not exist."""
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base, "fused-swiglu", "tuning.json").absolute()


def bucket(m: int) -> int:
    """The largest m that shares a pick with this one: 8, 16, 32 or 64, as far as a tile of decode reaches; beyond, a
    quarter of an octave: 80, 96, 112, 128, 160, ..."""
    if m <= 64:
        return max(8, 1 << max(m - 1, 0).bit_length())
    step = 1 << ((m - 1).bit_length() - 3)
    return -(-m // step) * step


def name_of(problem: Problem, arithmetic: Arithmetic) -> str:
    """What a pick holds for. Strides, layout and pre-activations do not count: a pick that does not fit them is not
    used."""
    p = problem
    bias = ",bias" if p.bias else ""
    return f"m<={bucket(p.m)},k={p.k},n={p.n},{p.dtype},{p.activation}{bias},{arithmetic}"


def find(problem: Problem, arithmetic: Arithmetic, device: torch.device) -> Pick | None:
    """The pick for this problem, on this machine, with these sources; None where none was tuned."""
    where = path()
    machines = _load(where) or {}
    if not machines and not _session:
        return None  # which machine this is takes a while to say
    machine, name = machine_key(device), name_of(problem, arithmetic)
    known = _session.get((str(where), machine, name))
    if known is not None:
        return known
    values = machines.get(machine, {"picks": {}})["picks"].get(name)
    if values is None:
        return None
    try:
        pick = Pick(**values)
        if not isinstance(pick.kernel, str) or not isinstance(pick.config, str):
            raise TypeError
    except TypeError:
        _warn(where, f"has a pick that cannot be read, {name}")
        return None
    return pick


def keep(problem: Problem, arithmetic: Arithmetic, device: torch.device, pick: Pick) -> None:
    """Remembers a pick in this process, and in the file where that can be written: it warns once where not. A file that
    is broken or something else is left as it is; what other processes keep stays."""
    where, machine, name = path(), machine_key(device), name_of(problem, arithmetic)
    _session[str(where), machine, name] = pick
    try:
        with _locked(where):
            machines = _load(where)
            if machines is None:
                return
            mine = machines.pop(machine, {"machine": _machine(device), "picks": {}})
            mine["picks"][name] = asdict(pick)
            machines[machine] = mine  # at the end: the last that was tuned
            for old in list(machines)[:-MOST_MACHINES]:
                del machines[old]
            aside = where.with_name(f".{where.name}-{os.getpid()}-{secrets.token_hex(4)}")
            try:
                aside.write_text(json.dumps({MARK: FORMAT, "machines": machines}, indent=1) + "\n", encoding="utf-8")
                os.replace(aside, where)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        _warn(where, f"cannot be written ({error.strerror}): what was tuned is forgotten when this process ends")


@contextmanager
def _locked(where: Path) -> Iterator[None]:
    """One process at a time reads, adds and writes."""
    import fcntl

    where.parent.mkdir(parents=True, exist_ok=True)
    with open(where.with_name(f".{where.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load(where: Path) -> dict[str, Any] | None:
    """The file's machines; None, and a warning, where it is broken or something else."""
    try:
        status = where.stat()
    except OSError:
        return {}
    version = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _read.get(str(where))
    if known is not None and known[0] == version:
        return known[1]
    machines: dict[str, Any] | None = None
    try:
        values = json.loads(where.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get(MARK) != FORMAT:
            _warn(where, f"is no tuning file of this version ({MARK!r}: {FORMAT})", version)
        elif not _well_formed(values.get("machines")):
            _warn(where, "is broken: its machines cannot be read", version)
        else:
            machines = values["machines"]
    except (OSError, ValueError) as error:
        _warn(where, f"cannot be read ({error})", version)
    _read[str(where)] = version, machines
    return machines


def _well_formed(machines: object) -> bool:
    return isinstance(machines, dict) and all(
        isinstance(machine, dict)
        and isinstance(machine.get("picks"), dict)
        and all(isinstance(pick, dict) for pick in machine["picks"].values())
        for machine in machines.values()
    )


def _warn(where: Path, fault: str, version: object = None) -> None:
    """Once for each state of a file."""
    if (key := (f"{where} {fault}", version)) not in _warned:
        _warned.add(key)
        warnings.warn(f"{where} {fault}; it is ignored: delete it, or set {VARIABLE}", stacklevel=2)


@cache
def machine_key(device: torch.device) -> str:
    return hashlib.sha256(json.dumps(_machine(device), sort_keys=True).encode()).hexdigest()[:16]


def _machine(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "driver": results._driver() if on_gpu else None,
        "torch": torch.__version__,
        "triton": results._version("triton"),
        "fused_swiglu": results._version("fused-swiglu"),
        "sources": _sources(),
    }


def _sources() -> dict[str, str]:
    """Of every package that has kernels, a hash of its sources; none of them is imported for it."""
    packages = {point.value.partition(".")[0].partition(":")[0] for point in registry._installed().values()}
    packages |= {type(kernel).__module__.partition(".")[0] for kernel in registry._registered.values()}
    return {package: _digest(package) for package in sorted(packages)}


def _digest(package: str) -> str:
    found = hashlib.sha256()
    for file in _files(package):
        found.update(f"{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _files(package: str) -> list[Path]:
    """A package's sources, or a module's; none for what has no file, such as a notebook's own."""
    module = sys.modules.get(package)
    spec = module.__spec__ if module else find_spec(package)
    if spec is None or spec.origin is None or not spec.has_location:
        return []
    origin = Path(spec.origin)
    if not spec.submodule_search_locations:
        return [origin]
    return sorted(file for file in origin.parent.rglob("*") if file.suffix in SOURCES)
