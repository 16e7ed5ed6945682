"""These tests need an SM90 GPU: `python -m pytest tests/gpu` runs them all there, and skips them elsewhere."""

import faulthandler

import pytest
import torch

WATCHDOG_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"the GPU is SM{capability[0]}{capability[1]}, not SM90"


@pytest.fixture(autouse=True)
def _watchdog():
    """A hung kernel cannot be interrupted: the process ends with every thread's traceback."""
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
