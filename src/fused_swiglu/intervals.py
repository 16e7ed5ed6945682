"""Paired ratios of times, their intervals, and the verdict that one allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

FASTER, SLOWER, SAME = "faster", "slower", "not distinguished"
RESOLUTION = 0.005  # a smaller difference is no finding, however often it repeats

Interval = tuple[float, float, float]
"""A middle, and what it may be at least and at most."""


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Interval:
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


def verdict(ratio: Interval) -> str:
    """`faster` or `slower` than the reference where the whole interval lies on one side of 1 and its middle at least
    `RESOLUTION` from it; otherwise `not distinguished`."""
    mid, low, high = ratio
    if high < 1 and mid <= 1 - RESOLUTION:
        return FASTER
    return SLOWER if low > 1 and mid >= 1 + RESOLUTION else SAME
