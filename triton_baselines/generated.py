"""What torch.compile fuses, read from the code that Inductor generates: which kernels are launched, which are GEMMs.

The code is what one call runs. Copies that replaying a CUDA graph adds (mode=reduce-overhead, max-autotune) are not in
it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from fused_swiglu import Operands, Problem
from fused_swiglu.errors import ArgumentError
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.plan import first_line

from .compiled import FUSED_CASTS, CompileConfig, TorchCompile

GEMMS = ("mm", "addmm", "bmm", "linear")
OPS = (*GEMMS, "silu", "sigmoid", "mul")  # of ATen; casts, views and transpositions are left out
LIBRARY = "library"
# How a kernel is compiled, and whose it is; any other is called by its method of AsyncCompile.
MAKERS = {"triton": "Triton", "cuda": "CUTLASS", "cutlass": "CUTLASS", "cpp_pybinding": "C++", "cutedsl": "CuTe DSL"}
ALWAYS_GEMMS = ("cuda", "cutlass", "cutedsl", "nv_universal_gemm")
MATRIX_STEP = re.compile(r"\btl\.dot\(|micro_gemm")  # of the templates in Triton and C++
GEMM_NODE = re.compile(r"call_function\[target=torch\.ops\.aten\.(?:mm|addmm|bmm)\b")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch, or a call into a library.

    by: `library` (ATen, so cuBLAS on a GPU), `Triton`, `CUTLASS`, `C++`. gemms: matrix products in it. ops: what it
    computes, of `OPS`.
    """

    name: str
    by: str
    gemms: int
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """The launches of one call, in order."""

    launches: tuple[Launch, ...]

    @property
    def gemms(self) -> tuple[Launch, ...]:
        return tuple(launch for launch in self.launches if launch.gemms)

    @property
    def gemms_fused(self) -> bool:
        """Whether one kernel computes both products."""
        return any(launch.gemms > 1 for launch in self.gemms)

    @property
    def verdict(self) -> str:
        """One line: how many kernels, and what is fused with what."""
        count = len(self.launches)
        return f"{count} kernel{'s' * (count != 1)}: {self._products}; {self._activation}"

    @property
    def rounds(self) -> tuple[str, ...]:
        """Which intermediates reach memory, and so are rounded, as Arithmetic has it. silu in a GEMM's epilogue takes
        its fp32 gate; the product in one takes its fp32 up, or, behind silu, the other GEMM's rounded output."""
        silu, product = self._last("silu", "sigmoid"), self._last("mul")
        if silu is not None and silu.gemms:
            return () if self.gemms_fused else ("up",) if silu is product else ("up", "act")
        return ("gate", "act") if product is not None and product.gemms else ("gate", "up")

    @property
    def _products(self) -> str:
        makers = Counter(launch.by for launch in self.gemms)
        by = ", ".join(f"{count} by {maker}" if len(makers) > 1 else maker for maker, count in makers.items())
        if self.gemms_fused:
            return f"both GEMMs in one kernel ({by})"
        if len(self.gemms) == 1:
            return f"one GEMM ({by})"
        return f"{len(self.gemms)} GEMMs, each a kernel of its own ({by})" if self.gemms else "no GEMM found"

    @property
    def _activation(self) -> str:
        silu, product = self._last("silu", "sigmoid"), self._last("mul")
        if silu is None or product is None:
            return "no silu or no product found"
        if silu is product:
            return f"silu and product in {self._place(silu)}"
        return f"silu in {self._place(silu)}, product in {self._place(product)}"

    def _last(self, *ops: str) -> Launch | None:
        return next((launch for launch in reversed(self.launches) if set(ops) & set(launch.ops)), None)

    def _place(self, launch: Launch) -> str:
        if not launch.gemms:
            return f"one pointwise kernel ({launch.by})"
        return f"the epilogue of {'both GEMMs' if self.gemms_fused else 'one GEMM'} ({launch.by})"


def parse(code: str) -> Generated:
    """The launches in the Python module that Inductor generates for a graph."""
    module, lines = ast.parse(code), code.splitlines()
    made = dict(filter(None, (_definition(node, lines) for node in module.body)))
    calls = {
        id(node): node
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef) and re.fullmatch(r"call|partition_\d+", function.name)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    }
    ordered = sorted(calls.values(), key=lambda node: (node.lineno, node.col_offset))
    return Generated(tuple(filter(None, (_launch(node, made, lines) for node in ordered))))


def _definition(node: ast.stmt, lines: list[str]) -> tuple[str, Launch] | None:
    """Of `name = async_compile.method(..., source, ...)`."""
    if not (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
    ):
        return None
    whose, _, method = ast.unparse(node.value.func).partition(".")
    if whose != "async_compile" or not method:
        return None
    name, comment = node.targets[0].id, _comment_above(node, lines)
    strings = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    source = max(strings, key=len, default="")
    is_gemm = method in ALWAYS_GEMMS or MATRIX_STEP.search(source) is not None
    gemms = max(1, len(GEMM_NODE.findall(comment))) if is_gemm else 0
    return name, Launch(name, MAKERS.get(method, method), gemms, _ops(comment, name))


def _launch(node: ast.Call, made: dict[str, Launch], lines: list[str]) -> Launch | None:
    called = ast.unparse(node.func)
    if launch := made.get(called.partition(".")[0]):  # name.run(...), name.name(...) of CUTLASS, name(...) of C++
        return launch
    if not called.startswith(("extern_kernels.", "torch.ops.", "aten.")):
        return None
    words = set(re.findall(r"[a-z]+", called))
    return Launch(called, LIBRARY, int(bool(words & set(GEMMS))), _ops(_comment_above(node, lines), called))


def _comment_above(node: ast.stmt | ast.Call, lines: list[str]) -> str:
    last = node.lineno - 1
    first = last
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return "\n".join(lines[first:last])


def _ops(comment: str, name: str) -> tuple[str, ...]:
    """From what Inductor says above a kernel; where it says nothing, from the kernel's name."""
    said = re.search(r"Original ATen: \[([^\]]*)\]", comment)
    words = re.findall(r"[a-z]+", said[1] if said else name)
    return tuple(op for op in OPS if op in words)


@dataclass(frozen=True)
class Report:
    """What torch.compile made of one problem in one mode. status: as in Row; reason: why it is not ok."""

    config: str
    m: int
    n: int
    k: int
    dtype: str
    ran_on: str
    torch: str
    status: str = "ok"
    reason: str | None = None
    generated: Generated | None = None
    run: str | None = None

    def to_json(self) -> str:
        """One line of JSON: an object whose only key is `generated`."""
        values = {name: value for name, value in vars(self).items() if value is not None and name != "generated"}
        if self.generated:
            launches = [asdict(launch) for launch in self.generated.launches]
            values |= {"launches": launches, "verdict": self.generated.verdict}
        return json.dumps({"generated": values})

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """What `to_json` wrote under its key. Raises TypeError, KeyError or AttributeError for anything else."""
        rest = {name: value for name, value in values.items() if name not in ("launches", "verdict")}
        if "launches" in values:
            launches = (Launch(**(launch | {"ops": tuple(launch["ops"])})) for launch in values["launches"])
            rest["generated"] = Generated(tuple(launches))
        return cls(**rest)


def load(path: str | PathLike[str]) -> list[Report]:
    """The reports of a JSONL file, in order. Raises ArgumentError where it cannot be read or holds none."""
    try:
        objects = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        found = [Report.from_values(values["generated"]) for values in objects if "generated" in values]
    except OSError as error:
        raise ArgumentError("from", f"cannot read {str(path)!r}: {error.strerror}", "check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        found = []
    if not found:
        raise ArgumentError("from", f"{str(path)!r} holds no generated code", "give what `generated --out` wrote")
    return found


def code_of(problem: Problem, config: CompileConfig, device: torch.device) -> list[str]:
    """Compiles and runs the expression as `torch.compile` does in this library; the modules that Inductor generated."""
    kernel = TorchCompile()
    inputs = make_inputs(problem, "normal", 0, device)
    weights = kernel.prepare(inputs.weights, problem, config)
    operands = Operands(inputs.x, weights, make_out(problem, device=device))  # type: ignore[arg-type]
    compiled = kernel.compile(problem, config, FUSED_CASTS, device)
    compiled.watch = True
    compiled.bind(operands)
    return compiled.codes


def examine(problem: Problem, config: CompileConfig, device: torch.device, run: str | None = None) -> Report:
    """Compiles, and reads what was generated. A mode that cannot run here, or fails, is a report too."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    status, reason, generated = "ok", TorchCompile().why_not(problem, config, FUSED_CASTS, device), None
    if reason:
        status = "unsupported"
    else:
        try:
            launches = [launch for code in code_of(problem, config, device) for launch in parse(code).launches]
            generated = Generated(tuple(launches))
        except Exception as error:  # the other modes are still examined
            status, reason = "failed", first_line(error)
    return Report(
        str(config), problem.m, problem.n, problem.k, problem.dtype, where, torch.__version__, status, reason,
        generated, run,
    )  # fmt: skip
