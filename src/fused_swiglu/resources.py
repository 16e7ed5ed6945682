"""What a compiled kernel takes and is made of: registers, shared memory, spills, instructions; read without a GPU.

From a cubin or a shared library with SM90 code, by the disassembler that comes with Triton or the CUDA toolkit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .errors import ArgumentError

# Instructions that say what a kernel does: tensor-core products, TMA loads and stores, special functions, fp32
# multiply-adds, stores of 8x8 matrices to shared memory, spills.
TELLING = ("HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "MUFU", "FFMA", "STSM", "LDL", "STL")


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


def _read(option: str, path: str | Path) -> str:
    tool = cuobjdump()
    # cuobjdump calls nvdisasm, which lies beside it.
    environment = os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([tool, option, path], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise ArgumentError("path", f"cuobjdump cannot read {path}: {said[-1]}", "give a cubin or a built library")
    return done.stdout


def disassemble(path: str | Path) -> dict[str, list[Instruction]]:
    """The instructions of each kernel function in a cubin or library, in order of their addresses.
    Raises ArgumentError for a file without device code."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in _read("-sass", path).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            current = functions.setdefault(match[1], [])
        elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+?)\s*(?:\s(.*?))?;", line):
            current.append(Instruction(int(match[1], 16), match[2], f"{match[2]} {match[3] or ''}".strip()))
    if not functions:
        raise ArgumentError("path", f"{path} holds no device code", "give a cubin or a built library")
    return functions


def resources(path: str | Path) -> list[Resources]:
    """The Resources of each kernel function in a cubin or library. Raises ArgumentError for a file without any."""
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
