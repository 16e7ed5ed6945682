"""Builds and loads units: `why_not`, `build`, `load`. The tools are found in compiler.py, builds kept in cache.py."""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache as once
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_swiglu.errors import ArgumentError

from . import cache
from .compiler import INSTALL, Tools, find_tools
from .unit import Unit

if TYPE_CHECKING:
    from tvm_ffi import Module

MEMORY_PER_JOB = 4 * 2**30  # a GEMM from CUTLASS's collective builder needs as much


class BuildError(RuntimeError):
    """nvcc failed. Says for which unit, and its first errors; `log` is the file with all of them."""

    def __init__(self, unit: Unit, errors: list[str], log: Path) -> None:
        super().__init__(f"{unit}: {' | '.join(errors)}; see {log}")
        self.unit = unit
        self.errors = errors
        self.log = log

    def __reduce__(self):
        return type(self), (self.unit, self.errors, self.log)


def why_not(unit: Unit, folder: str | Path | None = None) -> str | None:
    """Why this unit cannot be had here, in one line; None if it is built, or can be."""
    if not unit.ctypes and find_spec("tvm_ffi") is None:
        return f"needs apache-tvm-ffi; {INSTALL}"
    if find(unit, folder) is not None:
        return None
    where = cache.root(folder)
    try:
        find_tools()
    except ArgumentError as error:
        return f"no build of it in {where}, and none can be made: {error}"
    return None if cache.writable(where) else f"no build of it, and {cache.unwritable(where)}"


def find(unit: Unit, folder: str | Path | None = None) -> Path | None:
    """The library of a unit that is built. It must come from the tools that are here, so that a new compiler or new
    headers count; where nothing can be built, the newest of any tools serves."""
    where = cache.root(folder)
    try:
        tools = find_tools()
    except ArgumentError:
        return cache.newest(where, f"{unit.name}-*")
    built = cache.newest(where, f"{unit.name}-{tools.key}")
    return built if built or cache.writable(where) else cache.newest(where, f"{unit.name}-*")


def build(
    units: Iterable[Unit],
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    folder: str | Path | None = None,
) -> dict[Unit, Path]:
    """Compiles what is not built yet, and returns each unit's library.

    jobs: how many nvcc run at a time; by default as many as cores and memory allow.
    progress: called with the number that is done, that of all, and the unit that was done last.
    Raises an ExceptionGroup of BuildErrors after all others are built; ArgumentError where nothing can be built.
    """
    units = list(dict.fromkeys(units))
    if any(not unit.ctypes for unit in units) and find_tools().tvm_ffi is None:
        raise ArgumentError("apache-tvm-ffi", "not installed, and the kernels are compiled with its headers", INSTALL)
    libraries: dict[Unit, Path] = {}
    failures: list[BuildError] = []
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(jobs or _default_jobs()) as pool:
        futures = {pool.submit(build_one, unit, folder, running): unit for unit in units}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                unit = futures[future]
                try:
                    libraries[unit] = future.result()
                except BuildError as error:
                    failures.append(error)
                if progress:
                    progress(done, len(units), str(unit))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):  # a thread may be about to start one more
                for process in tuple(running):
                    process.terminate()
                time.sleep(0.05)
            raise
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(units)} units do not compile", failures)
    return {unit: libraries[unit] for unit in units}


def _default_jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_PER_JOB))


def build_one(
    unit: Unit, folder: str | Path | None = None, running: set[subprocess.Popen[bytes]] | None = None
) -> Path:
    """The library of a unit, compiled if need be, by a process that is in `running` as long as it runs.
    Raises BuildError, and ArgumentError where nothing can be built."""
    built = find(unit, folder)
    if built is not None:
        return built
    tools = find_tools()
    where, name = cache.root(folder), unit.name
    # The folder is of this process alone until it is renamed, and holds nvcc's own temporary files too.
    aside = where / f"{cache.UNFINISHED}{name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        aside.mkdir(parents=True)
        for leftover in cache.leftovers(where):
            shutil.rmtree(leftover, ignore_errors=True)
        _compile(unit, tools, aside, set() if running is None else running)
        if unit.name == name:
            return _publish(aside, where / f"{name}-{tools.key}")
    except OSError as error:
        raise cache.unwritable(where, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return build_one(unit, folder, running)  # a source was edited meanwhile: nobody knows which text nvcc read


def _compile(unit: Unit, tools: Tools, aside: Path, running: set[subprocess.Popen[bytes]]) -> None:
    """Fills a folder with a build. Raises BuildError, its log beside the folder."""
    command = unit.command(tools, aside / cache.LIBRARY)
    started = time.time()
    with open(aside / cache.LOG, "w", encoding="utf-8") as log:
        log.write(f"{shlex.join(command)}\n")
        log.flush()
        environment = os.environ | {"TMPDIR": str(aside)}
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
            running.add(process)
            code = process.wait()
            running.discard(process)
    if code or not (aside / cache.LIBRARY).is_file():
        kept = aside.parent / f"{unit.name}{cache.FAILED}"
        os.replace(aside / cache.LOG, kept)
        raise BuildError(unit, _first_errors(kept, code), kept)
    record = {
        "source": unit.source,
        "defines": unit.defines,
        "flags": unit.flags,
        "ctypes": unit.ctypes,
        "tools": tools.versions,
        "command": command,
        "built": started,
        "seconds": round(time.time() - started, 1),
        "size": (aside / cache.LIBRARY).stat().st_size,
        "sha256": cache.digest(aside / cache.LIBRARY),
    }
    (aside / cache.RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _publish(aside: Path, final: Path) -> Path:
    """Renames a finished folder to its place. Whoever comes second takes the first's; a broken build gives way."""
    if final.exists() and not cache.entry(final).intact:
        shutil.rmtree(final, ignore_errors=True)
    try:
        os.rename(aside, final)
    except OSError:
        if not cache.entry(final).intact:
            raise
    return final / cache.LIBRARY


def _first_errors(log: Path, code: int) -> list[str]:
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[1:] if line.strip()]
    errors = [line for line in said if re.search(r"\b(error|fatal)\b[^:]{0,12}:", line)]
    return [line[:200] for line in errors[:3] or said[-3:]] or [f"nvcc ended with code {code} and said nothing"]


def load(unit: Unit, folder: str | Path | None = None) -> Module:
    """The functions that a unit exports with TVM_FFI_DLL_EXPORT_TYPED_FUNC, as a tvm_ffi module's attributes; for a
    unit with `ctypes` a ctypes.CDLL. Builds the unit if need be, and raises what `build_one` does."""
    return _load(build_one(unit, folder), unit.ctypes)


@once
def _load(library: Path, plain: bool) -> Any:
    if plain:
        return ctypes.CDLL(str(library))
    try:
        import tvm_ffi
    except ImportError as error:
        raise ImportError(f"needs apache-tvm-ffi; {INSTALL}") from error
    return tvm_ffi.load_module(str(library))
