"""What tests run or read is compiled before them, once for all of pytest-xdist's workers."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from cutlass_kernels import cache, toolchain
from cutlass_kernels.unit import Unit


def prebuild(units: Iterable[Unit], folder: Path | None = None) -> dict[Unit, Path]:
    """The libraries of the units that can be built, by as many processes as there are cores; a worker that comes later
    waits for these. folder: by default the cache."""
    able = [unit for unit in units if toolchain.why_not(unit, folder) is None]
    where = cache.root(folder)
    if not able or not cache.writable(where):
        return {}
    where.mkdir(parents=True, exist_ok=True)
    lock = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return toolchain.build(able, folder=folder)
    finally:
        os.close(lock)


def shared(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that all workers of this session share."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
