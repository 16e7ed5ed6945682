"""claims: what the paper claims, each read again from stored rows: the figure, where it holds, and the rows behind it.

The claims are those of the abstract of "Tile-Level Activation Overlap for Efficient LLM Inference" (H100, Qwen-2.5 from
0.5B to 72B, bf16). One sentence of it can be read in more than one way; each reading stands on its own, and says what
it takes the sentence to mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from .bandwidth import Elsewhere
from .effects import BEST, Cell, answers, cells, effects
from .numerics import TOLERANCES
from .results import Environment, Row
from .standings import Comparison, Standing, standings
from .tables import EAGER, short_arithmetic

if TYPE_CHECKING:
    import pandas

GEMM, COMPILE = "cublas.gemm", "torch.compile"
PAPER = ("cutlass.pingpong", "cutlass.evt")
OURS = (*PAPER, "cutlass.interleaved", "cutlass.decode")
FUSED = (*OURS, "triton.fused")
DATASHEET_TFLOPS = 989.4  # dense bf16 of an H100 or H200 SXM, by NVIDIA's datasheets; what the paper's share is of
TOLERANCE = TOLERANCES[-1]
MODEL_PREFIX = "qwen2.5-"


@dataclass(frozen=True, slots=True)
class Value:
    """One cell of a reading. line, column: where it stands. range: what it may be at least and at most, where that was
    measured. rows: what it was computed from."""

    line: str
    column: int
    value: float
    range: tuple[float, float] | None
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Reading:
    """One way to read a claim. unit: `x` for a ratio of times, `%` for a share in 0..1. column: what the columns are.
    wanted: the claimed range, None where the claim gives no figure for this reading."""

    title: str
    unit: str
    values: tuple[Value, ...]
    wanted: tuple[float, float] | None = None
    column: str = "m"
    headline: bool = True  # whether a summary has it

    @property
    def inside(self) -> list[Value]:
        """The cells in which it holds."""
        least, most = self.wanted or (-inf, inf)
        return [value for value in self.values if least <= value.value <= most]


@dataclass(frozen=True)
class Evidence:
    """What the readings are read from: rows, and the environments of their runs by id."""

    rows: tuple[Row, ...]
    environments: dict[str, Environment]
    elsewhere: Elsewhere
    standings: tuple[Standing, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "standings", tuple(standings(self.rows)))

    @property
    def models(self) -> Iterator[tuple[str, Standing]]:
        """The standings that the claims are about, each with its line: a Qwen-2.5 model's, on normal operands."""
        for standing in self.standings:
            model = standing.model or ""
            if model.startswith(MODEL_PREFIX) and standing.inputs == "normal":
                yield f"{model} {standing.regime}", standing

    def down(self, standing: Standing) -> Row | None:
        """The GEMM of the down projection, [m, n] by [k, n]: the bare GEMM whose output has k columns and whose dot
        products have n terms."""
        wanted = (standing.n, standing.k // 2, standing.m, standing.regime, standing.ran_on)
        found = (s for s in self.standings if (s.k, s.n, s.m, s.regime, s.ran_on) == wanted)
        return next((s.best(GEMM) for s in found), None)


@dataclass(frozen=True)
class Claim:
    """name: of its figure and section. says: what the paper says, in few words."""

    name: str
    says: str
    readings: Callable[[Evidence], list[Reading]]


def evidence(rows: Iterable[Row], environments: Iterable[Environment], elsewhere: Elsewhere | None = None) -> Evidence:
    """elsewhere: the GPU whose bandwidth the model asks about; an H100 if None."""
    return Evidence(tuple(rows), {e.run: e for e in environments}, elsewhere or Elsewhere())


def _values(found: Evidence, read: Callable[[Standing], tuple[float, tuple[float, float] | None, list[Row]] | None]):
    """A Value for each model's standing of which there is something to read."""
    made = []
    for line, standing in found.models:
        if one := read(standing):
            value, interval, rows = one
            made.append(Value(line, standing.m, value, interval, tuple(rows)))
    return tuple(made)


def _ratio(standing: Standing, of: tuple[str, ...], over: tuple[str, ...], calls: bool = False):
    """Best of the one over best of the other, for `_values`."""
    row, other = standing.best(*of, calls=calls), standing.best(*over, calls=calls)
    compared = standing.compare(row, other, calls) if row and other else None
    return compared and _read(compared)


def _read(compared: Comparison) -> tuple[float, tuple[float, float] | None, list[Row]]:
    mid, low, high = compared.ratio
    return mid, None if low == high else (low, high), [compared.row, compared.other]


def _intermediates(found: Evidence) -> list[Reading]:
    """Of an MLP run by torch.eager: what it spends beside its GEMMs, and what a fused kernel saves, over the time of
    the whole MLP, down projection included."""

    def share(standing: Standing, by: tuple[str, ...]):
        eager, other = standing.best(EAGER), standing.best(*by)
        compared = standing.compare(other, eager) if eager and other else None
        gemm = standing.best(GEMM)
        if not compared or not gemm or not eager or not eager.time_us:
            return None
        down = found.down(standing)
        bare = standing.compare(gemm, eager)
        # as a share of torch.eager's time; where it was not timed, half of the bare GEMM's, which has twice its flops
        if down and down.time_us:
            whole = 1 + down.time_us / eager.time_us
        elif bare:
            whole = 1 + bare.ratio[0] / 2
        else:
            return None
        mid, low, high = ((1 - ratio) / whole for ratio in compared.ratio)
        return mid, (high, low), [eager, other, down or gemm]

    wanted = (0.09, 0.37)
    return [
        Reading(
            "share of MLP time that torch.eager spends beside GEMMs: eager less the bare GEMM of [gate; up]",
            "%",
            _values(found, lambda standing: share(standing, (GEMM,))),
            wanted,
        ),
        Reading(
            "share of MLP time that the best fused kernel saves: eager less fused",
            "%",
            _values(found, lambda standing: share(standing, FUSED)),
            wanted,
        ),
    ]


def _of_effects(found: Evidence, factor: str, kernel: str, base: str) -> tuple[Value, ...]:
    """A Value for each level of a factor over the one that starts with `base`, or of that the other way round."""
    made = []
    for cell in _ablated(found):
        for effect in effects(cell, every=True):
            if effect.factor != factor or effect.kernel != kernel:
                continue
            level, middle, (least, most) = effect.level, effect.middle, effect.range
            if level.startswith(base) and not effect.base.startswith(base):
                level, middle, least, most = effect.base, 1 / middle, 1 / most, 1 / least
            elif not effect.base.startswith(base):
                continue
            line = ", ".join(filter(None, (_line(cell.row), level, effect.context)))
            rows = tuple(row for pair in effect.pairs for row in (pair.row, pair.other))
            made.append(Value(line, cell.row.m, middle, (least, most), rows))
    return tuple(made)


def _ablated(found: Evidence) -> list[Cell]:
    rows = [row for row in found.rows if row.is_result and row.inputs == "normal" and row.kernel.startswith("cutlass.")]
    return [cell for cell in cells(rows) if _line(cell.row).startswith(MODEL_PREFIX)]


def _line(row: Row) -> str:
    return f"{Standing([row]).model or ''} {row.regime}"


def _overlap(found: Evidence) -> list[Reading]:
    """Swish at another place over Swish under the other warpgroup's tensor work, all else equal."""
    return [
        Reading(
            "Kernel-1 with Swish elsewhere over Swish overlapped (held: the tensor cores wait; epilogue: after the Up "
            "pass; sliced: between its own Up wgmmas), time",
            "x",
            _of_effects(found, "swish", "cutlass.pingpong", "overlap"),
        )
    ]


def _evt(found: Evidence) -> list[Reading]:
    """Kernel-2 with its activation over the same kernel without; Kernel-1 over Kernel-2."""
    best = tuple(
        Value(
            f"{_line(cell.row)}, {answer.context}",
            cell.row.m,
            answer.pair.ratio[0],
            answer.pair.ratio[1:],
            (answer.pair.row, answer.pair.other),
        )
        for cell in _ablated(found)
        for answer in answers(cell)
        if answer.question == BEST
    )
    return [
        Reading(
            "Kernel-2 with SwiGLU over gate * up alone, time",
            "x",
            _of_effects(found, "activation", "cutlass.evt", "off"),
        ),
        Reading("Kernel-1 (overlap) over Kernel-2, each with its best config, time", "x", best),
    ]


def _speedup(found: Evidence) -> list[Reading]:
    """torch.eager's time over a fused kernel's."""
    wanted = (2.47, inf)
    return [
        Reading(
            "torch.eager over the better of Kernel-1 and Kernel-2, GPU time",
            "x",
            _values(found, lambda s: _ratio(s, (EAGER,), PAPER)),
            wanted,
        ),
        Reading(
            "torch.eager over the best kernel of this library, GPU time",
            "x",
            _values(found, lambda s: _ratio(s, (EAGER,), FUSED)),
            wanted,
        ),
        Reading(
            "the same ratio by calls from Python, which take the host's part where that is longer",
            "x",
            _values(found, lambda s: _ratio(s, (EAGER,), FUSED, calls=True)),
            wanted,
        ),
        Reading(
            f"the same ratio, GPU time, as it would be with {found.elsewhere.name}'s memory bandwidth, by model",
            "x",
            _values(found, lambda s: found.elsewhere.speedup(s, s.best(*FUSED), found.environments)),
            wanted,
        ),
    ]


def _peak(found: Evidence) -> list[Reading]:
    """4mnk floating-point operations over the time of the best fused kernel."""

    def share(standing: Standing, of: Callable[[Row], float | None]):
        row = standing.best(*FUSED)
        value = of(row) if row else None
        return None if row is None or value is None else (value, None, [row])

    wanted = (0.795, inf)
    return [
        Reading(
            f"share of {DATASHEET_TFLOPS} TFLOP/s, the best kernel of this library",
            "%",
            _values(found, lambda s: share(s, lambda row: row.tflops and row.tflops / DATASHEET_TFLOPS)),
            wanted,
        ),
        Reading(
            "share of the matrix rate measured in the same run",
            "%",
            _values(found, lambda s: share(s, lambda row: row.peak)),
            wanted,
            headline=False,
        ),
    ]


def _compile(found: Evidence) -> list[Reading]:
    """torch.compile's best mode over the best fused kernel."""
    return [
        Reading(
            f"torch.compile's best over the best kernel of this library, {name}",
            "x",
            _values(found, lambda s, calls=calls: _ratio(s, (COMPILE,), FUSED, calls)),
            (3.0, 7.0),
        )
        for name, calls in (("GPU time", False), ("by calls from Python", True))
    ]


def _mismatches(found: Evidence) -> list[Reading]:
    """Of normal operands, by k: M0 under the declared arithmetic; M1 > 0; M2 at rtol 5e-3, atol 1e-4."""
    rtol, atol = TOLERANCE

    def m2(row: Row) -> float | None:
        return next((share for r, a, share in row.m2 or () if (r, a) == TOLERANCE), None)

    taken = [row for row in found.rows if row.status == "ok" and row.is_result and row.inputs == "normal"]
    taken = [row for row in taken if row.rung is None and row.relation is None and row.role != "control"]
    ours = [row for row in taken if row.role == "fused"]
    theirs = [row for row in taken if row.role == "unfused" and not row.kernel.startswith(("triton.", "cutlass."))]
    named = f"M2, rtol {rtol:g}, atol {atol:g}"
    return [
        Reading("fused kernels: M0, bits other than the declared arithmetic's", "%", _worst(ours, "m0"), (0, 0), "k"),
        Reading(f"fused kernels: {named}", "%", _worst(ours, m2), (0, 0), "k"),
        Reading(f"torch, cuBLAS: {named}", "%", _worst(theirs, m2), (0.045, 0.11), "k"),
        Reading("fused kernels: M1 > 0, not correctly rounded", "%", _worst(ours, "m1_gt0"), None, "k", False),
        Reading("torch, cuBLAS: M1 > 0", "%", _worst(theirs, "m1_gt0"), None, "k", False),
    ]


def _worst(rows: list[Row], of: str | Callable[[Row], float | None]) -> tuple[Value, ...]:
    """For each kernel, arithmetic and k the largest share of any row, and all the rows that have one."""
    groups: dict[tuple[str, int], list[tuple[float, Row]]] = {}
    for row in rows:
        share = getattr(row, of) if isinstance(of, str) else of(row)
        if share is not None:
            line = f"{row.kernel} {short_arithmetic(row.arithmetic)}"
            groups.setdefault((line, row.k), []).append((share, row))
    return tuple(
        Value(line, k, max(share for share, _ in group), None, tuple(row for _, row in group))
        for (line, k), group in sorted(groups.items())
    )


CLAIMS = (
    Claim("intermediates", "the intermediate tensors cost 9-37% of MLP time", _intermediates),
    Claim("overlap", "Kernel-1: Swish on the Gate accumulator overlaps the loading of Up tiles", _overlap),
    Claim("evt", "Kernel-2: SwiGLU interleaved with tile stores by an epilogue visitor tree", _evt),
    Claim("speedup", "up to 2.47x over PyTorch", _speedup),
    Claim("peak", "79.5% of peak bf16 throughput", _peak),
    Claim("compile", "torch.compile is 3-7x slower than the fused kernels", _compile),
    Claim("mismatches", "zero mismatches, against 4.5-11% for cuBLAS", _mismatches),
)


def to_frame(claims: Iterable[Claim], found: Evidence) -> pandas.DataFrame:
    """One line per cell of each reading: claim, reading, line, m or k, value, low, high, holds (None where the claim
    gives no figure), and of the rows behind it the kernels, their configs and runs, each joined by spaces."""
    import pandas

    made = []
    for claim in claims:
        for reading in claim.readings(found):
            inside = set(map(id, reading.inside))
            for value in reading.values:
                low, high = value.range or (None, None)
                made.append(
                    {
                        "claim": claim.name,
                        "reading": reading.title,
                        "line": value.line,
                        reading.column: value.column,
                        "value": value.value,
                        "low": low,
                        "high": high,
                        "holds": id(value) in inside if reading.wanted else None,
                        **{name: _joined(value.rows, name) for name in ("kernel", "config", "run")},
                    }
                )
    frame = pandas.DataFrame(made)
    return frame.astype({name: "Int64" for name in ("m", "k") if name in frame})


def _joined(rows: Iterable[Row], name: str) -> str:
    return " ".join(dict.fromkeys(str(getattr(row, name)) for row in rows))
