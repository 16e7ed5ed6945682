"""Finds what compiles: nvcc, a host compiler, and the headers of CUTLASS and tvm-ffi."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from fused_swiglu.errors import ArgumentError

OLDEST = (12, 8)
INSTALL = "pip install '.[cuda]'"
# nvcc reads them by itself. They belong to the key of a build, since they change what comes out.
NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")


@dataclass(frozen=True, slots=True)
class Tools:
    """A compiler and the headers. Two with one `key` build the same from the same unit."""

    nvcc: Path
    nvcc_version: str
    cutlass: Path
    cutlass_version: str
    tvm_ffi: Path | None
    tvm_ffi_version: str | None

    @property
    def includes(self) -> tuple[Path, ...]:
        return (self.cutlass,) if self.tvm_ffi is None else (self.cutlass, self.tvm_ffi)

    @property
    def versions(self) -> dict[str, str]:
        """What a build records. Headers count by their version, not by their text: it is the same everywhere."""
        found = {"nvcc": self.nvcc_version, "cutlass": self.cutlass_version, "tvm_ffi": self.tvm_ffi_version}
        found |= {name: os.environ.get(name) for name in NVCC_VARIABLES}
        return {name: value for name, value in found.items() if value}

    @property
    def key(self) -> str:
        return hashlib.sha256(repr(sorted(self.versions.items())).encode()).hexdigest()[:8]


def find_tools() -> Tools:
    """The compiler and the headers. Raises ArgumentError that names the environment variable to set, or the package
    to install. Costs a few file look-ups after the first call."""
    nvcc, version = _find_nvcc()
    if not any(os.environ.get(name) for name in NVCC_VARIABLES) and shutil.which("g++") is None:
        raise ArgumentError("NVCC_CCBIN", "not set, and PATH has no g++, which nvcc needs", "install g++, or set it")
    return Tools(nvcc, version, *_find_cutlass(), *_find_tvm_ffi())


def _find_nvcc() -> tuple[Path, str]:
    """nvcc and its version: from CUDA_HOME, which says so itself; from this Python's packages; from PATH."""
    home = os.environ.get("CUDA_HOME")
    faults = []
    for nvcc in (Path(home, "bin", "nvcc"),) if home else (*_packaged(), *_on_path()):
        version, fault = _version(nvcc, nvcc.stat().st_mtime_ns) if nvcc.is_file() else (None, f"there is no {nvcc}")
        if version is not None:
            return nvcc, version
        faults.append(fault)
    if home:
        raise ArgumentError("CUDA_HOME", f"is {home!r}, but {faults[0]}", f"correct it, or unset it and {INSTALL}")
    wrong = "; ".join(["not set", *faults]) if faults else "not set, and neither Python's packages nor PATH has nvcc"
    raise ArgumentError("CUDA_HOME", wrong, f"{INSTALL}, or set it to a CUDA toolkit")


@cache
def _package(name: str) -> tuple[Path, str]:
    """Where an installed package's files are, and its version. One that is missing is looked for again at each call:
    a notebook may install it."""
    found = distribution(name)
    return Path(str(found.locate_file(""))), found.version


def _packaged() -> Iterator[Path]:
    try:
        nvcc = _package("nvidia-cuda-nvcc")[0] / "nvidia/cu13/bin/nvcc"
    except PackageNotFoundError:
        return
    if nvcc.is_file():
        yield nvcc


def _on_path() -> Iterator[Path]:
    for folder in os.get_exec_path():
        nvcc = Path(folder, "nvcc")
        if nvcc.is_file() and os.access(nvcc, os.X_OK):
            yield nvcc


@cache
def _version(nvcc: Path, changed: int) -> tuple[str | None, str]:
    """The version of an nvcc that can be used, or None and what is wrong with it."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        return None, f"{nvcc} cannot be run: {getattr(error, 'strerror', None) or type(error).__name__}"
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", done.stdout)
    if done.returncode or not found:
        said = (done.stderr or done.stdout).strip().splitlines()
        return None, f"{nvcc} --version fails: {said[0] if said else f'exit code {done.returncode}'}"
    version = ".".join(found.groups())
    if (int(found[1]), int(found[2])) < OLDEST:
        return None, f"{nvcc} is version {version}, older than {'.'.join(map(str, OLDEST))}"
    return version, ""


def _find_cutlass() -> tuple[Path, str]:
    """CUTLASS's include folder and its version."""
    named = os.environ.get("CUTLASS_PATH")
    if named:
        folders = [Path(named, "include"), Path(named)]
        wrong, remedy = f"is {named!r}, which has no include/cutlass/version.h", "name a checkout of CUTLASS"
    else:
        folders = []
        wrong, remedy = "not set, and nvidia-cutlass is not installed", "pip install nvidia-cutlass==4.2.0.0"
        try:
            folders.append(_package("nvidia-cutlass")[0] / "cutlass_library/source/include")
            wrong = f"not set, and nvidia-cutlass has no {folders[0]}"
        except PackageNotFoundError:
            pass
    for folder in folders:
        header = folder / "cutlass" / "version.h"
        if header.is_file():
            text = header.read_text(encoding="utf-8")
            parts = [re.search(rf"#define\s+CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
            return folder, ".".join(part[1] if part else "?" for part in parts)
    raise ArgumentError("CUTLASS_PATH", wrong, remedy)


def _find_tvm_ffi() -> tuple[Path | None, str | None]:
    """tvm-ffi's include folder and its version; None where it is not installed, which units for ctypes allow."""
    try:
        files, version = _package("apache-tvm-ffi")
    except PackageNotFoundError:
        return None, None
    return files / "tvm_ffi/include", version
