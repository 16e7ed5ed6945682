"""What a compiled kernel takes and is made of: registers, shared memory, spills, instructions; read without a GPU.

From a cubin or a shared library with SM90 code, by the disassembler that comes with Triton or the CUDA toolkit.
A kernel that can be compiled without a GPU is a `Compilable`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .errors import ArgumentError

if TYPE_CHECKING:
    from .arithmetic import Arithmetic
    from .problem import Problem

# Instructions that say what a kernel does: tensor-core products, TMA loads and stores, special functions, fp32
# multiply-adds, stores of 8x8 matrices to shared memory, spills.
SPILLS = ("LDL", "STL")
TELLING = ("HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "MUFU", "FFMA", "STSM", *SPILLS)


@dataclass(frozen=True, slots=True)
class Instruction:
    """address: in bytes. name: with its modifiers, such as `HGMMA.64x192x16.F32.BF16`. text: with its operands."""

    address: int
    name: str
    text: str

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel function. registers: of a thread at launch. shared: static, bytes of a thread block. stack: bytes
    of a thread's local memory. counts: static counts of the `TELLING` instructions."""

    function: str
    registers: int
    shared: int
    stack: int
    instructions: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code for SM90. code: a cubin, or the path of a library. dynamic: bytes of shared memory that a launch
    asks for beside what is static. stages: tiles of operands in flight; None where it keeps none."""

    code: bytes | Path
    dynamic: int
    stages: int | None = None


@runtime_checkable
class Compilable(Protocol):
    """What a kernel has that is compiled without a GPU."""

    def binaries(
        self, problem: Problem, config: Any, arithmetic: Arithmetic, *, build: bool = False
    ) -> Iterable[Binary]:
        """One Binary for each of its launches, in order; none where it is not built and compiling takes `build`."""
        ...


@cache
def cuobjdump() -> Path:
    """The disassembler: of CUDA_HOME, of Triton's wheel, or on PATH. Raises ArgumentError where there is none."""
    places = []
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home) / "bin" / "cuobjdump")
    if (spec := find_spec("triton")) and spec.origin:
        places.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    if found := shutil.which("cuobjdump"):
        places.append(Path(found))
    for place in places:
        if place.is_file():
            return place
    raise ArgumentError("cuobjdump", "not found", "install triton, or set CUDA_HOME to a CUDA toolkit")


def _read(option: str, code: str | Path | bytes) -> str:
    if isinstance(code, bytes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            return _read(option, file.name)
    path, tool = code, cuobjdump()
    # cuobjdump calls nvdisasm, which lies beside it.
    environment = os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([tool, option, path], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise ArgumentError("path", f"cuobjdump cannot read {path}: {said[-1]}", "give a cubin or a built library")
    return done.stdout


def disassemble(path: str | Path | bytes) -> dict[str, list[Instruction]]:
    """The instructions of each kernel function in order of their addresses. path: of a cubin or library, or a cubin.
    Raises ArgumentError for a file without device code."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in _read("-sass", path).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            current = functions.setdefault(match[1], [])
        elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+?)\s*(?:\s(.*?))?;", line):
            current.append(Instruction(int(match[1], 16), match[2], f"{match[2]} {match[3] or ''}".strip()))
    if not functions:
        raise ArgumentError(
            "path",
            f"{'it' if isinstance(path, bytes) else path} holds no device code",
            "give a cubin or a built library",
        )
    return functions


def resources(path: str | Path | bytes) -> list[Resources]:
    """The Resources of each kernel function. path: of a cubin or library, or a cubin.
    Raises ArgumentError for a file without any."""
    usage = re.findall(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", _read("-res-usage", path))
    by_name = {name: tuple(map(int, numbers)) for name, *numbers in usage}
    found = []
    for name, instructions in disassemble(path).items():
        registers, stack, shared = by_name[name]
        counts = Counter(instruction.opcode for instruction in instructions)
        found.append(
            Resources(name, registers, shared, stack, len(instructions), {key: counts[key] for key in TELLING})
        )
    return found
