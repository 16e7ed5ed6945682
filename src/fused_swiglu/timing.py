"""Timing: the only file that times. Kernels are timed together, on rotated buffers, so that their ratios are paired.

Two regimes, never mixed (a CPU knows neither and just repeats):
- `burst`: short bursts after idle, at boost clock; variants interleaved launch by launch.
- `sustained`: the power-limited steady state; each variant runs alone in blocks of a second, in ABBA order.

Kernels of less than about 100 us are timed by CUDA-graph replay, so that the GPU is measured and not the host;
one that cannot be captured is then timed by stream launches, beside the baselines timed in the same way.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from .intervals import Interval, paired_ratio
from .kernel import Bound
from .probes import SmClock, reader
from .problem import Problem
from .telemetry import Sampler, Telemetry

REGIMES = ("burst", "sustained")
GRAPH_BELOW_US = 100.0
BURST_MS, BURST_CALLS, IDLE_S, ROUNDS = 25.0, 160, 0.15, 24
BLOCK_S, PASSES = 1.0, 3
CPU_SECONDS = 1.0
HOST_LOOKS, HOST_CALLS = 5, 10


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
    """Microseconds of one launch: median and quartiles. `rounds`: of each round, in an order that is the same for all
    that were timed together. `ratios`: this time over a baseline's in the same rounds, as median and the ends of its
    95% bootstrap interval. host_us: what the host spends on a launch. sm_mhz, power_w, temperature_c, throttled:
    within the blocks of this variant; in a burst only the clock, of the bursts that it took part in. uneven: in how
    many rounds something else held the clock down than for the first baseline."""

    time_us: float
    time_us_q1: float
    time_us_q3: float
    samples: int
    launch: str
    regime: str | None = None
    rounds: tuple[float, ...] = ()
    host_us: float | None = None
    ratios: dict[str, Interval] = field(default_factory=dict)
    sm_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None
    uneven: int | None = None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU does at best: the rate of a large bf16 matrix product (TFLOP/s), and of reading memory (GB/s)."""

    tflops: float
    gbs: float


class Event(Protocol):
    """As torch.cuda.Event: a point in the stream."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class Gpu:
    """The device and the clock on the wall, as far as the timers need them; a test puts a simulated one here."""

    _SLEEP_CYCLES_A_US = 1800

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def busy(self, us: float) -> None:
        """Queues that much of nothing."""
        torch.cuda._sleep(int(us * self._SLEEP_CYCLES_A_US))

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def now(self) -> float:
        return time.perf_counter()

    def clock(self) -> SmClock | None:
        """None where the clock cannot be read within a burst."""
        try:
            clock = SmClock(self.device)
            clock.stamp()
        except Exception:
            return None
        return clock

    def sampler(self) -> Sampler:
        return Sampler(self.device)


def buffer_sets(problem: Problem, device: torch.device) -> int:
    """How many sets of tensors to rotate, so that each launch finds none of its own left in the L2 cache."""
    if device.type == "cpu":
        return 1
    properties = torch.cuda.get_device_properties(device)
    wanted = 1 + -(-3 * properties.L2_cache_size // max(problem.bytes, 1))
    affordable = int(0.05 * properties.total_memory // max(problem.bytes, 1))
    return max(2, min(wanted, affordable, 64))


def cache_state(problem: Problem, sets: int, device: torch.device) -> str | None:
    """`cold` where the other sets of tensors fill the L2 cache twice between two uses of one; else `warm`: some of a
    set may be left. None on a CPU."""
    if device.type == "cpu":
        return None
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return "cold" if (sets - 1) * problem.bytes >= 2 * size else "warm"


def measure(
    variants: Sequence[Variant],
    device: torch.device,
    regime: str = "burst",
    baselines: Iterable[str] = (),
    gpu: Gpu | None = None,
) -> list[tuple[str, Timing | Exception]]:
    """Times all variants together. A key comes twice where it was timed by graph replay and by stream launches; a
    variant that raised comes with its exception, and the rest are timed. gpu: `Gpu(device)` if None."""
    failures: list[tuple[str, Timing | Exception]] = []
    usable = []
    costs = {}
    gpu = gpu or (None if device.type == "cpu" else Gpu(device))
    for variant in variants:
        try:
            costs[variant.key] = _estimate(variant, gpu) if gpu else _estimate_on_cpu(variant)
            usable.append(variant)
        except Exception as error:
            failures.append((variant.key, error))
    if not usable:
        return failures
    failed: dict[str, Exception] = {}
    baselines = tuple(baselines)
    if gpu is None:
        samples = _repeat_on_cpu(usable, costs, failed)
        return [*failures, *failed.items(), *_summaries(samples, {}, "stream", None, baselines)]
    timer = {"burst": _burst, "sustained": _sustained}[regime]
    results = []
    for launch, group in _by_launch(usable, costs, set(baselines)).items():
        runs = []
        for variant in group:
            try:
                runs.append(_replays(variant) if launch == "graph" else _launches(variant))
            except Exception as error:
                failed[variant.key] = error
        samples, telemetry = timer(runs, costs, gpu, failed)
        for key, timing in _summaries(samples, telemetry, launch, regime, baselines):
            results.append((key, replace(timing, host_us=costs[key].host_us)))
        del runs
    return [*failures, *failed.items(), *results]


@dataclass(frozen=True, slots=True)
class _Cost:
    time_us: float
    host_us: float | None = None


@dataclass(slots=True)
class _Runs:
    """How a variant is launched: calls, one for each set of buffers or one for all; each is `count` launches."""

    variant: Variant
    calls: list[Callable[[], object]]
    count: int
    graph: object = None

    def call(self, turn: int) -> None:
        self.calls[turn % len(self.calls)]()


def _launches(variant: Variant) -> _Runs:
    return _Runs(variant, [bound.run for bound in variant.bounds], 1)


def _estimate(variant: Variant, gpu: Gpu) -> _Cost:
    """Warms up and takes a first look at a launch's time on the device and on the host."""
    for bound in variant.bounds:
        bound.run()
    run = variant.bounds[-1].run
    device_us, host_us = [], []
    for _ in range(HOST_LOOKS):
        start, end = gpu.event(), gpu.event()
        gpu.synchronize()
        start.record()
        begin = gpu.now()
        for _ in range(HOST_CALLS):
            run()
        host_us.append((gpu.now() - begin) * 1e6 / HOST_CALLS)
        end.record()
        gpu.synchronize()
        device_us.append(start.elapsed_time(end) * 1e3 / HOST_CALLS)
        if sum(device_us) * HOST_CALLS > 50_000:
            break
    return _Cost(float(np.median(device_us)), float(np.median(host_us)))


def _estimate_on_cpu(variant: Variant) -> _Cost:
    begin = time.perf_counter()
    variant.bounds[-1].run()
    return _Cost((time.perf_counter() - begin) * 1e6)


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
    return _Runs(variant, [graph.replay], repeats * len(variant.bounds), graph)


_Samples = dict[str, list[float]]
_Telemetry = dict[str, list[Telemetry]]
"""Of each variant, a window for each of its rounds."""


def _burst(
    runs: list[_Runs], costs: dict[str, _Cost], gpu: Gpu, failed: dict[str, Exception]
) -> tuple[_Samples, _Telemetry]:
    """Rounds of one call each, interleaved, in bursts of `BURST_MS` after idle; microseconds a launch."""
    shuffle = random.Random(0)
    samples, telemetry = defaultdict(list), defaultdict(list)
    calls = [r for _ in range(ROUNDS) for r in shuffle.sample(runs, len(runs))]
    turn = 0
    clock = gpu.clock()
    while calls:
        burst, calls = _first_burst(calls, costs)
        gpu.idle(IDLE_S)
        # The GPU waits until the burst is queued, so that no event pair times the host; its clock rises meanwhile.
        gpu.busy(500 + 2 * sum(20 + (costs[r.variant.key].host_us or 0) for r in burst))
        pending = []
        if clock:
            clock.stamp()
        for r in burst:
            # The sets of buffers take turns over all launches: none finds what the launch before it left in the cache.
            turn += 1
            start, end = gpu.event(), gpu.event()
            start.record()
            if _called(r, turn, failed):
                end.record()
                pending.append((r, start, end))
        if clock:
            clock.stamp()
        gpu.synchronize()
        mhz = clock.mhz() if clock else None
        for r, start, end in pending:
            samples[r.variant.key].append(start.elapsed_time(end) * 1e3 / r.count)
            telemetry[r.variant.key].append(Telemetry() if mhz is None else Telemetry(sm_mhz=[mhz]))
    return {key: times for key, times in samples.items() if key not in failed}, telemetry


def _called(r: _Runs, turn: int, failed: dict[str, Exception]) -> bool:
    """Makes a call, unless the variant has failed before; what it raises is noted."""
    if r.variant.key in failed:
        return False
    try:
        r.call(turn)
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
    runs: list[_Runs], costs: dict[str, _Cost], gpu: Gpu, failed: dict[str, Exception]
) -> tuple[_Samples, _Telemetry]:
    """Blocks of `BLOCK_S` a variant in the order A B B A; one sample a block: its last two thirds."""
    samples, telemetry = defaultdict(list), defaultdict(list)
    for _ in range(PASSES):
        for order in (runs, runs[::-1]):
            for r in (r for r in order if r.variant.key not in failed):
                key = r.variant.key
                try:
                    _block(r, costs, gpu, BLOCK_S / 3)
                    with gpu.sampler() as seen:
                        samples[key].append(_block(r, costs, gpu, BLOCK_S * 2 / 3))
                    telemetry[key].append(seen)
                except Exception as error:
                    failed[key] = error
                    samples.pop(key, None)
    return samples, telemetry


def _block(r: _Runs, costs: dict[str, _Cost], gpu: Gpu, seconds: float) -> float:
    """Keeps the GPU busy with one variant for that long; microseconds a launch."""
    call_us = costs[r.variant.key].time_us * r.count
    batch = max(1, round(10_000 / call_us))
    marks = [gpu.event()]
    marks[0].record()
    until, turn = gpu.now() + seconds, 0
    while gpu.now() < until:
        for _ in range(batch):
            r.call(turn)
            turn += 1
        marks.append(gpu.event())
        marks[-1].record()
        # Two batches are queued ahead: the GPU never starves, and the block ends when it should.
        if len(marks) > 2:
            marks[-3].synchronize()
    gpu.synchronize()
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
                samples[variant.key].append(_estimate_on_cpu(variant).time_us)
            except Exception as error:
                failed[variant.key] = error
                samples.pop(variant.key, None)
    return samples


def _summaries(
    samples: _Samples, telemetry: _Telemetry, launch: str, regime: str | None, baselines: Sequence[str]
) -> Iterable[tuple[str, Timing]]:
    references: dict[str, str] = {}
    for key in samples:
        name = key.partition("|")[0]
        if name in baselines:
            references.setdefault(name, key)
    first = next((references[name] for name in baselines if name in references), None)
    for key, times in samples.items():
        q1, mid, q3 = (float(q) for q in np.quantile(times, (0.25, 0.5, 0.75)))
        windows = telemetry.get(key, [])
        seen = Telemetry.joined(windows)
        yield key, Timing(
            mid, q1, q3, len(times), launch, regime,
            rounds=tuple(round(t, 4) for t in times),
            ratios={name: paired_ratio(times, samples[reference]) for name, reference in references.items()},
            sm_mhz=seen.mean_sm_mhz, power_w=seen.mean_power_w, temperature_c=seen.mean_temperature_c,
            throttled=seen.throttled,
            uneven=_uneven(windows, telemetry.get(first, [])) if first else None,
        )  # fmt: skip


def _uneven(windows: list[Telemetry], reference: list[Telemetry]) -> int | None:
    """In how many rounds the two were throttled for different reasons; None where that was not read."""
    pairs = [(a.throttled, b.throttled) for a, b in zip(windows, reference, strict=False)]
    known = [a != b for a, b in pairs if a is not None and b is not None]
    return sum(known) if known else None


@cache
def ceilings(device: torch.device) -> Ceilings | None:
    """Measures, once a process, a burst of 8192 x 8192 x 8192 bf16 products and of reading 4 GiB. None on a CPU."""
    if device.type == "cpu":
        return None
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(8192, 8192, device=device, generator=generator).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    data = torch.randn(2**30, device=device, generator=generator)
    best = {}
    for key, call in (("mm|", lambda: torch.mm(a, b, out=product)), ("read|", _read(data))):
        variant = Variant(key, [_Callable(call)])
        gpu = Gpu(device)
        samples, _ = _burst([_launches(variant)], {key: _estimate(variant, gpu)}, gpu, {})
        best[key] = float(np.median(samples[key]))
    return Ceilings(2 * 8192**3 / best["mm|"] / 1e6, data.nbytes / best["read|"] / 1e3)


def _read(data: torch.Tensor) -> Callable[[], object]:
    """A launch that reads all of it: by a kernel of our own, or where that cannot be built by torch.sum."""
    try:
        call = reader(data)
        call()
    except Exception:
        total = torch.empty((), device=data.device)
        return lambda: torch.sum(data, dim=0, out=total)
    return call


@dataclass(slots=True)
class _Callable(Bound):
    call: Callable[[], Any]

    def run(self) -> Any:
        return self.call()
