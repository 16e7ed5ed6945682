"""Timing: the only file that times. Kernels are timed together, on rotated buffers, so that their ratios are paired.

Two regimes, never mixed (a CPU knows neither and just repeats):
- `burst`: short bursts after idle, at boost clock; variants interleaved launch by launch.
- `sustained`: the power-limited steady state; each variant runs alone in blocks of a second, in ABBA order.

Kernels of less than about 100 us are timed by CUDA-graph replay, so that the GPU is measured and not the host;
one that cannot be captured is then timed by stream launches, beside the baselines timed in the same way.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from scipy import stats

from .kernel import Bound
from .problem import Problem
from .telemetry import Sampler, Telemetry

REGIMES = ("burst", "sustained")
GRAPH_BELOW_US = 100.0
BURST_MS, BURST_CALLS, IDLE_S, ROUNDS = 25.0, 160, 0.15, 24
BLOCK_S, PASSES = 1.2, 2
CPU_SECONDS = 1.0
_SLEEP_CYCLES_A_US = 1800


@dataclass(slots=True)
class Variant:
    """One kernel, config and arithmetic, bound to each set of rotated buffers. `key` starts with `kernel|`."""

    key: str
    bounds: Sequence[Bound]
    capturable: bool = True
    owns_graph: bool = False

    @property
    def kernel(self) -> str:
        return self.key.partition("|")[0]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch: median and quartiles. `ratios`: this time over a baseline's in the same rounds, as
    median and the ends of its 95% bootstrap interval. host_us: what the host spends on a launch."""

    time_us: float
    time_us_q1: float
    time_us_q3: float
    samples: int
    launch: str
    regime: str | None = None
    host_us: float | None = None
    ratios: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    sm_mhz: float | None = None
    power_w: float | None = None
    throttled: bool | None = None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU does at best: the rate of a large bf16 matrix product (TFLOP/s), and of reading memory (GB/s)."""

    tflops: float
    gbs: float


def buffer_sets(problem: Problem, device: torch.device) -> int:
    """How many sets of tensors to rotate, so that each launch finds none of its own left in the L2 cache."""
    if device.type == "cpu":
        return 1
    properties = torch.cuda.get_device_properties(device)
    wanted = 1 + -(-3 * properties.L2_cache_size // max(problem.bytes, 1))
    affordable = int(0.05 * properties.total_memory // max(problem.bytes, 1))
    return max(2, min(wanted, affordable, 64))


def measure(
    variants: Sequence[Variant],
    device: torch.device,
    regime: str = "burst",
    baselines: Iterable[str] = (),
) -> list[tuple[str, Timing | Exception]]:
    """Times all variants together. A key comes twice where it was timed by graph replay and by stream launches; a
    variant that raised comes with its exception, and the rest are timed."""
    failures: list[tuple[str, Timing | Exception]] = []
    usable = []
    costs = {}
    for variant in variants:
        try:
            costs[variant.key] = _estimate(variant, device)
            usable.append(variant)
        except Exception as error:
            failures.append((variant.key, error))
    if not usable:
        return failures
    failed: dict[str, Exception] = {}
    if device.type == "cpu":
        samples = _repeat_on_cpu(usable, costs, failed)
        return [*failures, *failed.items(), *_summaries(samples, "stream", None, baselines)]
    timer = {"burst": _burst, "sustained": _sustained}[regime]
    results = []
    for launch, group in _by_launch(usable, costs, set(baselines)).items():
        runs = []
        for variant in group:
            try:
                runs.append(_replays(variant) if launch == "graph" else _Runs(variant, _launches(variant), 1))
            except Exception as error:
                failed[variant.key] = error
        samples, telemetry = timer(runs, costs, device, failed)
        for key, timing in _summaries(samples, launch, regime, baselines):
            seen = telemetry.get(key, Telemetry())
            results.append(
                (
                    key,
                    replace(
                        timing,
                        host_us=costs[key].host_us,
                        sm_mhz=seen.mean_sm_mhz,
                        power_w=seen.mean_power_w,
                        throttled=seen.throttled,
                    ),
                )
            )
        del runs
    return [*failures, *failed.items(), *results]


@dataclass(frozen=True, slots=True)
class _Cost:
    time_us: float
    host_us: float | None = None


@dataclass(slots=True)
class _Runs:
    """How a variant is launched: calls to take in turn, each of which is `count` launches."""

    variant: Variant
    calls: itertools.cycle[Callable[[], object]]
    count: int
    graph: object = None


def _launches(variant: Variant) -> itertools.cycle[Callable[[], object]]:
    return itertools.cycle([bound.run for bound in variant.bounds])


def _estimate(variant: Variant, device: torch.device) -> _Cost:
    """Warms up and takes a first look at a launch's time on the device and on the host."""
    run = variant.bounds[-1].run
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return _Cost((time.perf_counter() - begin) * 1e6)
    for bound in variant.bounds:
        bound.run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    begin = time.perf_counter()
    repeats = 10
    for _ in range(repeats):
        run()
    host_us = (time.perf_counter() - begin) * 1e6 / repeats
    end.record()
    torch.cuda.synchronize(device)
    return _Cost(start.elapsed_time(end) * 1e3 / repeats, host_us)


def _by_launch(variants: list[Variant], costs: dict[str, _Cost], baselines: set[str]) -> dict[str, list[Variant]]:
    """Which variants are timed by which launch: like is compared with like."""
    quickest = min(cost.time_us for cost in costs.values())
    captured = [v for v in variants if v.capturable]
    if quickest > GRAPH_BELOW_US or not captured:
        return {"stream": list(variants)}
    others = [v for v in variants if not v.capturable]
    groups = {"graph": captured}
    if others:
        groups["stream"] = [v for v in captured if v.kernel in baselines] + others
    return groups


def _replays(variant: Variant) -> _Runs:
    """A CUDA graph that launches the variant on every set of buffers, more than once where there are few."""
    repeats = -(-16 // len(variant.bounds))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for bound in list(variant.bounds) * repeats:
            bound.run()
    return _Runs(variant, itertools.cycle([graph.replay]), repeats * len(variant.bounds), graph)


_Samples = dict[str, list[float]]


def _burst(
    runs: list[_Runs], costs: dict[str, _Cost], device: torch.device, failed: dict[str, Exception]
) -> tuple[_Samples, dict[str, Telemetry]]:
    """Rounds of one call each, interleaved, in bursts of `BURST_MS` after idle; microseconds a launch."""
    shuffle = random.Random(0)
    samples = defaultdict(list)
    calls = [r for _ in range(ROUNDS) for r in shuffle.sample(runs, len(runs))]
    while calls:
        burst, calls = _first_burst(calls, costs)
        time.sleep(IDLE_S)
        # The GPU waits until the burst is queued, so that no event pair times the host; its clock rises meanwhile.
        host_us = sum(20 + (costs[r.variant.key].host_us or 0) for r in burst)
        torch.cuda._sleep(int((500 + 2 * host_us) * _SLEEP_CYCLES_A_US))
        pending = []
        for r in burst:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            if _called(r, failed):
                end.record()
                pending.append((r, start, end))
        torch.cuda.synchronize(device)
        for r, start, end in pending:
            samples[r.variant.key].append(start.elapsed_time(end) * 1e3 / r.count)
    return {key: times for key, times in samples.items() if key not in failed}, {}


def _called(r: _Runs, failed: dict[str, Exception]) -> bool:
    """Makes the next call, unless the variant has failed before; what it raises is noted."""
    if r.variant.key in failed:
        return False
    try:
        next(r.calls)()
    except Exception as error:
        failed[r.variant.key] = error
        return False
    return True


def _first_burst(calls: list[_Runs], costs: dict[str, _Cost]) -> tuple[list[_Runs], list[_Runs]]:
    """The calls that fit into one burst, one at least, and the rest; a burst may end in the middle of a round."""
    spent_ms, count = 0.0, 0
    for r in calls[:BURST_CALLS]:
        spent_ms += costs[r.variant.key].time_us * r.count / 1e3
        if count and spent_ms > BURST_MS:
            break
        count += 1
    return calls[:count], calls[count:]


def _sustained(
    runs: list[_Runs], costs: dict[str, _Cost], device: torch.device, failed: dict[str, Exception]
) -> tuple[_Samples, dict[str, Telemetry]]:
    """Blocks of `BLOCK_S` a variant in the order A B B A; one sample a block: its last two thirds."""
    samples = defaultdict(list)
    telemetry: dict[str, Telemetry] = {}
    for _ in range(PASSES):
        for order in (runs, runs[::-1]):
            for r in (r for r in order if r.variant.key not in failed):
                try:
                    _block(r, costs, device, BLOCK_S / 3)
                    with Sampler(device) as seen:
                        samples[r.variant.key].append(_block(r, costs, device, BLOCK_S * 2 / 3))
                except Exception as error:
                    failed[r.variant.key] = error
                    samples.pop(r.variant.key, None)
                    continue
                total = telemetry.setdefault(r.variant.key, Telemetry())
                total.sm_mhz += seen.sm_mhz
                total.power_w += seen.power_w
                total.reasons |= seen.reasons
    return samples, telemetry


def _block(r: _Runs, costs: dict[str, _Cost], device: torch.device, seconds: float) -> float:
    """Keeps the GPU busy with one variant for that long; microseconds a launch."""
    call_us = costs[r.variant.key].time_us * r.count
    batch = max(1, round(10_000 / call_us))
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(batch):
            next(r.calls)()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        # Two batches are queued ahead: the GPU never starves, and the block ends when it should.
        if len(marks) > 2:
            marks[-3].synchronize()
    torch.cuda.synchronize(device)
    return marks[0].elapsed_time(marks[-1]) * 1e3 / (batch * r.count * (len(marks) - 1))


def _repeat_on_cpu(variants: list[Variant], costs: dict[str, _Cost], failed: dict[str, Exception]) -> _Samples:
    """Rounds of one run each; a slow variant takes part in fewer. For orientation only."""
    samples = defaultdict(list)
    for i in range(10):
        for variant in variants:
            slow = i > 0 and (i + 1) * costs[variant.key].time_us >= CPU_SECONDS * 1e6
            if slow or variant.key in failed:
                continue
            try:
                samples[variant.key].append(_estimate(variant, torch.device("cpu")).time_us)
            except Exception as error:
                failed[variant.key] = error
                samples.pop(variant.key, None)
    return samples


def _summaries(
    samples: _Samples, launch: str, regime: str | None, baselines: Iterable[str]
) -> Iterable[tuple[str, Timing]]:
    baselines = tuple(baselines)
    references = {}
    for key in samples:
        name = key.partition("|")[0]
        if name in baselines:
            references.setdefault(name, samples[key])
    for key, times in samples.items():
        q1, mid, q3 = np.quantile(times, (0.25, 0.5, 0.75))
        ratios = {name: paired_ratio(times, reference) for name, reference in references.items()}
        yield key, Timing(float(mid), float(q1), float(q3), len(times), launch, regime, ratios=ratios)


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Median of the round-by-round ratio, with the ends of its 95% bootstrap interval (percentile method)."""
    rounds = min(len(times), len(reference))
    ratios = np.asarray(times[:rounds]) / np.asarray(reference[:rounds])
    mid = float(np.median(ratios))
    if rounds < 2 or np.ptp(ratios) == 0:
        return mid, float(ratios.min()), float(ratios.max())
    interval = stats.bootstrap(
        (ratios,), np.median, n_resamples=2000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return mid, float(interval.low), float(interval.high)


@cache
def ceilings(device: torch.device) -> Ceilings | None:
    """Measures, once a process, a burst of 8192 x 8192 x 8192 bf16 products and a read of 4 GiB. None on a CPU."""
    if device.type == "cpu":
        return None
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(8192, 8192, device=device, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    data = torch.randn(2**30, device=device, generator=generator)
    total = torch.empty((), device=device)
    bounds = {"mm|": _Callable(lambda: torch.mm(a, b, out=product))}
    bounds["read|"] = _Callable(lambda: torch.sum(data, dim=0, out=total))
    best = {}
    for key, bound in bounds.items():
        variant = Variant(key, [bound])
        costs = {key: _estimate(variant, device)}
        samples, _ = _burst([_Runs(variant, _launches(variant), 1)], costs, device, {})
        best[key] = float(np.median(samples[key]))
    return Ceilings(2 * 8192**3 / best["mm|"] / 1e6, data.nbytes / best["read|"] / 1e3)


@dataclass(slots=True)
class _Callable(Bound):
    call: Callable[[], torch.Tensor]

    def run(self) -> torch.Tensor:
        return self.call()
