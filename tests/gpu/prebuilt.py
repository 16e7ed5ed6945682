"""What GPU tests run is compiled before them, once for all of pytest-xdist's workers."""

import fcntl
import os
from collections.abc import Iterable

from cutlass_kernels import cache, toolchain
from cutlass_kernels.unit import Unit


def prebuild(units: Iterable[Unit]) -> None:
    """Builds what can be built, by as many processes as there are cores; a worker that comes later waits for these."""
    able = [unit for unit in units if toolchain.why_not(unit) is None]
    where = cache.root()
    if not able or not cache.writable(where):
        return
    where.mkdir(parents=True, exist_ok=True)
    folder = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        toolchain.build(able)
    finally:
        os.close(folder)
