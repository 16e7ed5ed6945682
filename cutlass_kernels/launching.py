"""How the CUTLASS kernels are built, bound and launched, and how they run as their model without an SM90 GPU."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fused_swiglu import DTYPES, Arithmetic, Bound, Compiled, Config, Kernel, Operands, Problem
from fused_swiglu.errors import ArgumentError
from fused_swiglu.operands import check_fit
from fused_swiglu.problem import ACTIVATIONS
from fused_swiglu.resources import Binary
from fused_swiglu.sm90 import accumulate, execute

from . import toolchain
from .unit import Unit

# As gate.cuh numbers them.
ACTIVATION_NUMBERS = {name: i for i, name in enumerate(("silu", "gelu_tanh", "relu", "sigmoid"))}
IDENTITY = 4  # no activation
RECIPE_NUMBERS = {name: i for i, name in enumerate(("ieee", "ex2", "tanh", "poly3", "none"))}
DEBUG_BUILDS = {"dump": "FS_DUMP", "stamps": "FS_STAMPS"}
# As events.cuh numbers them: what ends at the stamp. `None` is an entry that was not written.
EVENTS = (
    None, "turn_taken", "gate_issued", "gate_done", "swished", "up_issued", "up_done", "stored", "loading", "loaded"
)  # fmt: skip
ROLES, STAMPS_OF_A_ROLE = ("consumer 0", "consumer 1", "producer"), 256
FILL, EPILOGUE = 43, 224  # see best_first
SHARED_MEMORY = 227 * 1024  # bytes that a thread block can have on an SM


class CutlassKernel(Kernel):
    """What the CUTLASS kernels share. Weights are read in place, stacked or separate.

    A build is of one config, dtype, activation and recipe, and serves every size and stride.
    """

    source: ClassVar[str]
    dtypes = ("bf16", "fp16")
    activations = ACTIVATIONS
    adds_bias = True
    writes_preactivations = True

    @abstractmethod
    def table(self) -> tuple[Any, ...]:
        """Every geometry that is offered, whatever the problem."""

    @abstractmethod
    def defines(self, config: Any) -> dict[str, int]:
        """The config as macros."""

    @abstractmethod
    def invalid(self, config: Any) -> str | None:
        """Why no such kernel can be built; None where it can."""

    def units(self) -> Iterator[tuple[str, Unit]]:
        """What `fused-swiglu build` offers: every config in bf16, for each recipe of silu."""
        problem = Problem(1, 8, 8)
        for config in self.table():
            for arithmetic in self.arithmetics(problem):
                yield f"{config} {arithmetic}", self.unit(problem, config, arithmetic)

    def unit(self, problem: Problem, config: Any, arithmetic: Arithmetic, *, debug: str | None = None) -> Unit:
        """What is compiled for this. debug: `dump` or `stamps`, whose `bind` takes a buffer for the fp32 accumulators
        or for time stamps."""
        options = {
            "FS_DTYPE": ("bf16", "fp16").index(problem.dtype),
            "FS_ACTIVATION": ACTIVATION_NUMBERS[problem.activation],
            "FS_RECIPE": RECIPE_NUMBERS[arithmetic.recipe],
            "FS_BIAS": int(problem.bias),
            "FS_PREACTIVATIONS": int("preactivations" in problem.outputs),
        }
        if debug:
            options[DEBUG_BUILDS[debug]] = 1
        return Unit(self.source, tuple(sorted((options | self.defines(config)).items())))

    def binaries(
        self, problem: Problem, config: Any, arithmetic: Arithmetic, *, build: bool = False
    ) -> Iterator[Binary]:
        """The library, if it is built or to be built."""
        unit = self.unit(problem, config, arithmetic)
        if library := toolchain.build_one(unit) if build else toolchain.find(unit):
            stages, shared = self.ring(config)
            yield Binary(library, shared, stages)

    def is_built(self, problem: Problem, config: Any, arithmetic: Arithmetic) -> bool:
        return toolchain.find(self.unit(problem, config, arithmetic)) is not None

    def ring(self, config: Any) -> tuple[int, int]:
        """Stages, and bytes of shared memory with them: those of tile.cuh's `Shared`, which is aligned to 1024."""
        used = bytes_of(config.bm, config.bn, self.defines(config)["FS_PASSES"], config.stages)
        return config.stages, -(-used // 1024) * 1024

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        recipes = ("none",) if problem.activation == "relu" else ("ieee", "ex2", "tanh", "poly3")
        return tuple(Arithmetic("sm90", recipe) for recipe in recipes)

    def why_not(self, problem: Problem, config: Any, arithmetic: Arithmetic, device: torch.device) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        if reason := self.invalid(config):
            return reason
        if problem.no_tma:
            return f"moves rows by TMA: {problem.no_tma}"
        if device.type == "cuda" and _has_sm90(device):
            return toolchain.why_not(self.unit(problem, config, arithmetic))
        return None

    def compile(self, problem: Problem, config: Any, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        if device.type != "cuda" or not _has_sm90(device):
            return _Model(self, problem, arithmetic)
        return _Built(self, problem, config, arithmetic, toolchain.load(self.unit(problem, config, arithmetic)))

    def predict(self, problem: Problem, arithmetic: Arithmetic, operands: Operands) -> torch.Tensor:
        """By the model, on a CPU, what a run writes."""
        return execute(
            arithmetic, operands.x, operands.weights, problem.activation, out_dtype=DTYPES[problem.out_dtype]
        )

    def accumulators(self, problem: Problem, config: Any, arithmetic: Arithmetic, operands: Operands) -> torch.Tensor:
        """fp32 [m, 2n], gate beside up: the sums of a debug build of this config, before bias and activation.
        Needs an SM90 GPU and nvcc."""
        sums = torch.full((problem.m, 2 * problem.n), torch.nan, device=operands.x.device)
        module = toolchain.load(self.unit(problem, config, arithmetic, debug="dump"))
        _Launch(module, problem, config, operands, sums).run()
        return sums

    def timeline(
        self, problem: Problem, config: Any, arithmetic: Arithmetic, operands: Operands
    ) -> list[tuple[int, str, int, str]]:
        """(thread block, role, cycles since the thread block's first stamp, event) of a second run of a build with time
        stamps, in that order; the first `STAMPS_OF_A_ROLE` - 1 of each role. Needs an SM90 GPU and nvcc."""
        blocks = torch.cuda.get_device_properties(operands.x.device).multi_processor_count
        stamps = torch.zeros((blocks, len(ROLES), STAMPS_OF_A_ROLE), dtype=torch.int64, device=operands.x.device)
        launch = _Launch(
            toolchain.load(self.unit(problem, config, arithmetic, debug="stamps")), problem, config, operands, stamps
        )
        launch.run()
        stamps.zero_()
        launch.run()
        found = []
        for block, roles in enumerate(stamps[:, :, :-1].cpu().tolist()):
            start = min((word >> 8 for role in roles for word in role if word), default=0)
            for role, words in zip(ROLES, roles, strict=True):
                found += [(block, role, (word >> 8) - start, str(EVENTS[word & 255])) for word in words if word]
        return found


class WithoutActivation(CutlassKernel):
    """Makes a fused kernel the control that computes gate * up: what its activation costs is a difference of rows."""

    role = "control"
    computes = "product"
    adds_bias = False
    writes_preactivations = False

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic("sm90", "none"),)

    def defines(self, config: Any) -> dict[str, int]:
        return super().defines(config) | {"FS_ACTIVATION": IDENTITY}

    def predict(self, problem: Problem, arithmetic: Arithmetic, operands: Operands) -> torch.Tensor:
        gate, up = preactivations(operands).chunk(2, dim=1)
        return (gate * up).to(DTYPES[problem.out_dtype])


def _has_sm90(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


class _Launch(Bound):
    """A handle of a built library: descriptors, grid and arguments, made once."""

    def __init__(
        self, module: Any, problem: Problem, config: Any, operands: Operands, debug: torch.Tensor | None = None
    ) -> None:
        self.out, self._tensors = operands.out, (operands, debug)
        weights, device = operands.weights, operands.x.device.index
        handle = module.bind(
            *map(_address, (operands.out, operands.x, weights.gate, weights.up, weights.bias_gate, weights.bias_up)),
            _address(operands.preactivations), _address(debug),
            problem.m, problem.n, problem.k, problem.x_stride, problem.gate_stride, problem.up_stride,
            operands.out.stride(0) if problem.m > 1 else operands.out.shape[1],
            operands.preactivations.stride(0) if operands.preactivations is not None else 0,
            device, config.at_launch,
        )  # fmt: skip
        self._launch = _launcher(module, handle, device)

    def run(self) -> torch.Tensor:
        self._launch()
        return self.out

    def launcher(self) -> Callable[[], object]:
        return self._launch


def _launcher(module: Any, handle: int, device: int) -> Callable[[], object]:
    """Launches on the device's current stream. The handle is released with the function: a launch under way or captured
    in a graph has a copy of what it holds, the kernel's one parameter, tensor maps and all."""
    run, stream = module.run, torch._C._cuda_getCurrentRawStream

    def launch() -> None:
        run(handle, stream(device))

    weakref.finalize(launch, module.release, handle)
    return launch


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(slots=True)
class _Built(Compiled):
    kernel: CutlassKernel
    problem: Problem
    config: Any
    arithmetic: Arithmetic
    module: Any
    ran_on: str | None = None

    def bind(self, operands: Operands) -> Bound:
        _check(self.kernel, self.problem, operands, "cuda")
        return _Launch(self.module, self.problem, self.config, operands)


@dataclass(slots=True)
class _Model(Compiled):
    kernel: CutlassKernel
    problem: Problem
    arithmetic: Arithmetic
    ran_on: str | None = "model"

    def bind(self, operands: Operands) -> Bound:
        _check(self.kernel, self.problem, operands, operands.x.device.type)
        return _BoundModel(self.kernel, self.problem, self.arithmetic, operands)


@dataclass(slots=True)
class _BoundModel(Bound):
    kernel: CutlassKernel
    problem: Problem
    arithmetic: Arithmetic
    operands: Operands

    def run(self) -> torch.Tensor:
        given = self.operands
        given.out.copy_(self.kernel.predict(self.problem, self.arithmetic, given))
        if given.preactivations is not None:
            given.preactivations.copy_(preactivations(given).to(given.preactivations.dtype))
        return given.out


def preactivations(operands: Operands) -> torch.Tensor:
    """By the model: fp32 [m, 2n], the accumulators with their biases, gate beside up."""
    weights, x = operands.weights, operands.x
    halves = []
    for weight, bias in ((weights.gate, weights.bias_gate), (weights.up, weights.bias_up)):
        total = torch.from_numpy(accumulate(x, weight))
        halves.append(total if bias is None else total + bias.cpu().float())
    return torch.cat(halves, dim=1)


def _check(kernel: CutlassKernel, problem: Problem, operands: Operands, device_type: str) -> None:
    check_fit(problem, operands, kernel.output_shape(problem), device_type)
    weights = operands.weights
    vectors = {"bias_gate": weights.bias_gate, "bias_up": weights.bias_up} if problem.bias else {}
    for name, bias in vectors.items():
        if bias is None or bias.shape != (problem.n,) or bias.dtype != DTYPES[problem.dtype] or bias.stride(0) != 1:
            raise ArgumentError(name, f"is {bias if bias is None else tuple(bias.shape)}", f"give [{problem.n}]")
    if "preactivations" in problem.outputs:
        given = operands.preactivations
        if given is None or given.shape != (problem.m, 2 * problem.n) or given.dtype != DTYPES[problem.out_dtype]:
            raise ArgumentError("preactivations", "missing or misshapen", f"give [{problem.m}, {2 * problem.n}]")
        if given.stride(1) != 1 or given.stride(0) % 8 or given.data_ptr() % 16:
            raise ArgumentError("preactivations", f"has strides {given.stride()}", "align its rows to 16 bytes")


def bytes_of(bm: int, bn: int, passes: int, stages: int) -> int:
    """Shared memory of a kernel on CuTe's atoms: tile.cuh's `Shared`."""
    chunk = bn if bn <= 128 else bn // 2
    return stages * ((bm + width_of(bn, passes)) * 64 * 2 + 16) + 2 * 64 * chunk * 2


def most_stages(bm: int, bn: int, passes: int) -> int:
    """As many stages as fit."""
    return next(s for s in range(12, 0, -1) if bytes_of(bm, bn, passes, s) <= SHARED_MEMORY - 1024)


TEAMS = {"pingpong": 1, "cooperative": 2}  # warpgroups that work on one tile


def invalid_geometry(config: Any, step: int, widest: int) -> str | None:
    """What all kernels assert of tile and schedule, in words. step, widest: of bn."""
    if config.schedule not in TEAMS:
        return f"has the schedules pingpong and cooperative, not {config.schedule!r}"
    rows = 64 * TEAMS[config.schedule]
    if config.bm < rows or config.bm % rows or config.bm > 256:
        return f"takes bm in multiples of {rows} up to 256 in the {config.schedule} schedule, not {config.bm}"
    if config.bn < 16 or config.bn % step or config.bn > widest:
        return f"takes bn in multiples of {step} up to {widest}, not {config.bn}"
    if config.bm // rows * config.bn > 208:
        return "has too few registers for these accumulators: choose a smaller tile"
    if {config.cluster_m, config.cluster_n} - {1, 2, 4}:
        return "takes clusters of 1, 2 or 4 along either dimension"
    if config.bn % (8 * config.cluster_m) or config.bm % (8 * config.cluster_n):
        return "each thread block of a cluster loads whole groups of 8 rows: choose a smaller cluster"
    if config.band < 1:
        return f"takes a band of at least 1, not {config.band}"
    return None


def invalid_tile(config: Any, passes: int) -> str | None:
    """What tile.cuh asserts, in words."""
    if reason := invalid_geometry(config, 16 if config.bn <= 128 else 32, 128 * passes):
        return reason
    if min(config.cluster_m, config.cluster_n) > 1:
        return "takes clusters along one dimension"
    if config.stages < 2:
        return "takes at least 2 stages"
    if bytes_of(config.bm, config.bn, passes, config.stages) > SHARED_MEMORY - 1024:
        return f"has shared memory for at most {most_stages(config.bm, config.bn, passes)} stages of this tile"
    return None


def geometry_defines(config: Any) -> dict[str, int]:
    """What options.cuh reads, and the cluster."""
    return {
        "FS_BM": config.bm,
        "FS_BN": config.bn,
        "FS_STAGES": config.stages,
        "FS_PINGPONG": int(config.schedule == "pingpong"),
        "FS_CLUSTER_M": config.cluster_m,
        "FS_CLUSTER_N": config.cluster_n,
    }


def tile_defines(config: Any, passes: int) -> dict[str, int]:
    """What tile.cuh reads."""
    return geometry_defines(config) | {"FS_PASSES": passes, "FS_WIDTH": width_of(config.bn, passes)}


def width_of(bn: int, passes: int) -> int:
    """Of a wgmma."""
    return bn * (2 if passes == 1 else 1)


@dataclass(frozen=True, slots=True)
class TileConfig(Config):
    """bm x bn: output tile, of a warpgroup in the pingpong schedule and of two in the cooperative one. stages: of 64
    along k. cluster_m, cluster_n: thread blocks along m that share a tile of the weights, or along n that share one of
    x. band: rows of clusters swept together, a launch argument."""

    bm: int
    bn: int
    stages: int
    schedule: str = "pingpong"
    cluster_m: int = 1
    cluster_n: int = 1
    band: int = 8

    @property
    def at_launch(self) -> int:
        """What is chosen at launch and not compiled."""
        return self.band


def best_first(problem: Problem, table: Iterable[Any], passes: int = 1) -> tuple[Any, ...]:
    """The geometries for a problem, the one that should be quickest first, by the time of the busiest SM of 132.

    A tile takes its products' time, longer where its operands would have to come from L2 at more than FILL bytes a
    clock. The cooperative schedule adds what its epilogue does not hide, as much as EPILOGUE steps along k.
    Both constants are rough fits to times on an H200.
    """

    def cost(config: Any) -> float:
        cluster, pingpong = config.cluster_m * config.cluster_n, config.schedule == "pingpong"
        clusters = -(-problem.m // (config.bm * config.cluster_m)) * -(-problem.n // (config.bn * config.cluster_n))
        waves = -(-clusters // (132 // cluster * (2 if pingpong else 1)))
        width = width_of(config.bn, getattr(config, "passes", passes))
        fill = 4096 * (1 / (width * config.cluster_n) + 1 / (config.bm * config.cluster_m))  # bytes a clock
        k = problem.k * max(1.0, fill / FILL) + (0 if pingpong else EPILOGUE)
        return waves * (2 if pingpong else 1) * config.bm * config.bn * k

    return tuple(sorted(table, key=cost))
