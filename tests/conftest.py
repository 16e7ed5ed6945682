"""Profiles of hypothesis, fixtures, and what every failure's report ends with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import KERNELS
from hypothesis import HealthCheck, settings

from fused_swiglu import registry

# `ci` draws the same examples every time, so that the command that failed replays the failure. `dev` is random.
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("ci", derandomize=True, max_examples=25, deadline=None, suppress_health_check=SLOW)
settings.register_profile("dev", max_examples=100, deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.register_profile("deep", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.load_profile("ci")


@pytest.fixture
def kernels() -> Iterator[None]:
    """Registers the kernels `fake.*`; those that tests before or beside it registered stay."""
    before = dict(registry._registered)
    for kernel in KERNELS:
        registry.register(kernel)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Under every failure, the command that replays it."""
    report = (yield).get_result()
    if report.failed:
        profile = item.config.getoption("--hypothesis-profile") or "ci"
        report.sections.append(("replay", f"python -m pytest '{item.nodeid}' --hypothesis-profile={profile}"))
