"""The timers on a simulated GPU whose clock drifts and whose launches jitter: 1% is found, a null difference is not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from fused_swiglu import Bound, Problem, timing
from fused_swiglu.intervals import FASTER, RESOLUTION, SAME, SLOWER, paired_ratio, verdict
from fused_swiglu.telemetry import Telemetry
from fused_swiglu.timing import BURST_MS, IDLE_S, PASSES, ROUNDS, Gpu, Timing, Variant, measure

POWER = 4  # NVML's bit for the software power cap


@dataclass
class Mark:
    gpu: Simulated
    us: float = math.nan

    def record(self) -> None:
        self.us = self.gpu.us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Mark) -> float:
        return (end.us - self.us) / 1e3


class Simulated(Gpu):
    """Time passes only by launches and by idling. A launch takes `us`, times what a clock that drifts, and swings by
    0.5%, makes of it, give or take 0.3%: blocks then differ by about what they differ on a GPU."""

    def __init__(self, seed: int, drift: float = 0.0, throttled: dict[str, int] | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.us, self.random, self.drift, self.reasons = 0.0, random.Random(seed), drift, throttled or {}
        self.launched: list[tuple[str, int]] = []

    def launch(self, name: str, us: float, index: int) -> None:
        self.launched.append((name, index))
        seconds = self.us / 1e6
        clock = 1 + self.drift * seconds + 0.005 * math.sin(7 * seconds)
        self.us += us * clock * math.exp(self.random.gauss(0, 0.003))

    def event(self) -> Mark:
        return Mark(self)

    def synchronize(self) -> None:
        pass

    def busy(self, us: float) -> None:
        self.us += us

    def idle(self, seconds: float) -> None:
        self.us += 1e6 * seconds

    def now(self) -> float:
        return self.us / 1e6

    def clock(self) -> None:
        return None

    @contextmanager
    def sampler(self) -> Iterator[Telemetry]:
        seen = Telemetry()
        yield seen
        seen.sm_mhz, seen.power_w, seen.temperature_c = [1500.0], [690.0], [55.0]
        seen.reasons = {self.reasons.get(self.launched[-1][0], 0)}


@dataclass
class Launch(Bound):
    gpu: Simulated
    name: str
    us: float
    index: int

    def run(self) -> torch.Tensor:
        self.gpu.launch(self.name, self.us, self.index)
        return torch.empty(0)


def variant(gpu: Simulated, name: str, us: float, sets: int = 3) -> Variant:
    return Variant(f"{name}|", [Launch(gpu, name, us, i) for i in range(sets)])


def timed(gpu: Simulated, regime: str, **us: float) -> dict[str, Timing]:
    variants = [variant(gpu, name, value) for name, value in us.items()]
    results = measure(variants, torch.device("cuda"), regime, ["reference"], gpu)
    found = {key.rstrip("|"): result for key, result in results if isinstance(result, Timing)}
    assert found.keys() == us.keys()
    return found


@pytest.mark.parametrize("regime", ["burst", "sustained"])
@pytest.mark.parametrize("seed", range(8))
def test_one_per_cent_is_found_and_none_is_not(regime: str, seed: int) -> None:
    gpu = Simulated(seed, drift=5e-4)
    found = timed(gpu, regime, reference=2000, same=2000, slower=2020, faster=1980)
    verdicts = {name: verdict(timing.ratios["reference"]) for name, timing in found.items()}
    assert verdicts == {"reference": SAME, "same": SAME, "slower": SLOWER, "faster": FASTER}
    assert found["slower"].ratios["reference"][0] == pytest.approx(1.01, abs=0.004)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_blocks_cancels_a_drift(seed: int) -> None:
    """Here each block is 2% slower than the one before: in the order A B, A B, B would seem slower."""
    found = timed(Simulated(seed, drift=0.02 / timing.BLOCK_S), "sustained", reference=2000, other=2000)
    assert max(found["other"].rounds) / min(found["other"].rounds) > 1.05
    assert verdict(found["other"].ratios["reference"]) == SAME


def test_a_burst_is_short_idles_before_and_rotates_the_buffers_over_all_launches() -> None:
    gpu = Simulated(0)
    found = timed(gpu, "burst", reference=3000, other=5000)
    assert [len(t.rounds) for t in found.values()] == [ROUNDS, ROUNDS]
    bursts = ROUNDS * 8000 / (BURST_MS * 1e3)
    assert gpu.now() >= bursts * IDLE_S
    last = [index for _, index in gpu.launched[-2 * ROUNDS :]]
    assert all((b - a) % 3 == 1 for a, b in itertools.pairwise(last))


def test_a_round_is_the_same_place_in_every_variant() -> None:
    found = timed(Simulated(1, drift=0.05), "burst", reference=2000, other=3000)
    ours, theirs = found["other"].rounds, found["reference"].rounds
    assert found["other"].ratios["reference"] == pytest.approx(paired_ratio(ours, theirs), abs=1e-6)


def test_blocks_say_what_held_the_clock_down_and_where_that_differs() -> None:
    found = timed(Simulated(0, throttled={"reference": POWER, "same": POWER}), "sustained",
                  reference=2000, same=2000, cool=2000)  # fmt: skip
    assert (found["same"].throttled, found["same"].uneven) == ("power", 0)
    assert (found["cool"].throttled, found["cool"].uneven) == ("no", 2 * PASSES)
    assert (found["cool"].sm_mhz, found["cool"].power_w, found["cool"].temperature_c) == (1500, 690, 55)


def test_a_variant_that_raises_while_it_is_timed_leaves_the_others_alone() -> None:
    gpu = Simulated(0)

    class Breaks(Launch):
        def run(self) -> torch.Tensor:
            if sum(name == self.name for name, _ in gpu.launched) > 40:
                raise RuntimeError("no more")
            return super().run()

    broken = Variant("broken|", [Breaks(gpu, "broken", 2000, 0)])
    results = dict(
        measure([broken, variant(gpu, "reference", 2000)], torch.device("cuda"), "burst", ["reference"], gpu)
    )
    assert isinstance(results["broken|"], RuntimeError)
    assert isinstance(results["reference|"], Timing)


def test_a_difference_below_the_resolution_is_no_finding() -> None:
    small = RESOLUTION / 2
    assert verdict((1 - small, 1 - 1.5 * small, 1 - small / 2)) == SAME
    assert verdict((1 + small, 1 + small / 2, 1 + 1.5 * small)) == SAME
    assert verdict((0.98, 0.97, 1.0)) == SAME
    assert verdict((0.98, 0.97, 0.99)) == FASTER
    assert verdict((1.02, 1.01, 1.03)) == SLOWER


def test_throttling_is_said_in_words() -> None:
    pytest.importorskip("pynvml")
    assert Telemetry().throttled is None
    assert Telemetry(reasons={0, 1}).throttled == "no"  # 1: idle
    assert Telemetry(reasons={1, POWER}).throttled == "power"
    assert Telemetry(reasons={POWER | 0x20, 0x8}).throttled == "power+thermal+hardware"


def test_buffer_sets_and_what_they_leave_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size, total_memory = 50 * 2**20, 140 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    gpu, small, large = torch.device("cuda"), Problem(64, 1536, 576), Problem(8192, 18944, 3584)
    assert timing.buffer_sets(large, gpu) == 2
    assert (timing.buffer_sets(small, gpu) - 1) * small.bytes >= 3 * Properties.L2_cache_size
    assert timing.cache_state(small, timing.buffer_sets(small, gpu), gpu) == "cold"
    assert timing.cache_state(large, 2, gpu) == "cold"
    assert timing.cache_state(small, 2, gpu) == "warm"
    assert timing.buffer_sets(small, torch.device("cpu")) == 1
    assert timing.cache_state(small, 1, torch.device("cpu")) is None
