"""Unit: a CUDA C++ source with its compile-time choices. Its key, and the command that compiles it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fused_swiglu.errors import ArgumentError

from .compiler import Tools

SOURCES = Path(__file__).parent
FLAGS = (
    "-gencode=arch=compute_90a,code=sm_90a",  # plain sm_90 has neither wgmma nor setmaxnreg, and fails only when run
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",  # CuTe
    "-fmad=false",  # bits: a kernel writes its fused multiply-adds out, the compiler makes none
    "-shared",
    "-cudart=static",  # torch's own runtime may be of another version
    "-Xcompiler=-fPIC,-fvisibility=hidden",  # a process loads many units, and none may see another's statics
    "-Xptxas=-v",  # registers and spills, for the log
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A .cu and what it is compiled with: one shared library.

    source: the name of a .cu beside this file, or an absolute path. It may include what is in `include/` beside it.
    defines: (name, value) of macros. flags: for nvcc, beside FLAGS.
    ctypes: it exports plain C functions, for ctypes, and needs no tvm-ffi.
    Raises ArgumentError for a source that is not there.
    """

    source: str
    defines: tuple[tuple[str, str | int], ...] = ()
    flags: tuple[str, ...] = ()
    ctypes: bool = False

    def __post_init__(self) -> None:
        path = SOURCES / self.source
        if not path.is_file():
            raise ArgumentError("source", f"there is no {path}", "name a .cu in cutlass_kernels, or an absolute path")
        # One unit has one spelling: what is in the package is named without its folder, true is 1.
        object.__setattr__(self, "source", path.name if path.parent == SOURCES else str(path))
        object.__setattr__(self, "defines", tuple((k, int(v) if isinstance(v, bool) else v) for k, v in self.defines))
        object.__setattr__(self, "flags", tuple(self.flags))

    def __str__(self) -> str:
        return " ".join([Path(self.source).name, *(f"{name}={value}" for name, value in self.defines), *self.flags])

    @property
    def path(self) -> Path:
        return SOURCES / self.source

    @property
    def key(self) -> str:
        """Hash of all that decides what is compiled, but for the tools: it is the same on every machine."""
        folder = self.path.parent.resolve() / "include"
        texts = [
            ("", digest(self.path)),
            *((path.relative_to(folder).as_posix(), digest(path)) for path in self.headers),
        ]
        parts = (texts, self.defines, FLAGS, self.flags, self.ctypes)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def headers(self) -> list[Path]:
        """The files of `include/` that the source includes, directly or through others, sorted."""
        source = self.path.resolve()
        folder = source.parent / "include"
        found: set[Path] = set()
        seen: set[str] = set()
        open_ends = [source]
        while open_ends:
            path = open_ends.pop()
            for name in _included(path, digest(path)):
                # As text: to resolve a path takes long, and `swiglu` waits for this whenever it meets a new shape.
                candidates = {os.path.normpath(os.path.join(place, name)) for place in (path.parent, folder)}
                for candidate in candidates - seen:
                    seen.add(candidate)
                    if candidate.startswith(f"{folder}{os.sep}") and os.path.isfile(candidate):
                        found.add(Path(candidate))
                        open_ends.append(Path(candidate))
        return sorted(found)

    @property
    def name(self) -> str:
        return f"{self.path.stem}-{self.key}"

    def command(self, tools: Tools, out: Path) -> list[str]:
        """What compiles it into the shared library `out`."""
        libraries = tools.nvcc.parent.parent / "lib"  # where the wheels keep the runtime
        includes = (self.path.parent / "include", *tools.includes)
        return [
            str(tools.nvcc),
            *FLAGS,
            *self.flags,
            *(f"-D{name}={value}" for name, value in self.defines),
            *(f"-I{folder}" for folder in includes),
            *([f"-L{libraries}"] if (libraries / "libcudart_static.a").is_file() else []),
            str(self.path),
            "-o",
            str(out),
        ]


@cache
def _included(path: Path, _digest: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def digest(path: Path) -> str:
    """SHA-256 of a file, computed again only when the file has changed. Raises OSError if it cannot be read."""
    status = path.stat()
    return _digest(path, status.st_mtime_ns, status.st_size, status.st_ino)


@cache
def _digest(path: Path, *_version: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
