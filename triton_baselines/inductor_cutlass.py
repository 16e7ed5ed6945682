"""Inductor's CUTLASS backend with the installed nvidia-cutlass: the options it needs, and why it cannot be had."""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Inductor wants the layout of CUTLASS's repository, of which the wheel has all parts in other places.
PYTHON = ("cutlass_library", "cutlass_cppgen", "pycute")
SOURCES = ("include", "tools")
# Of CUTLASS's kernels: the warp-specialised ones that store by TMA, with clusters along m. Each takes nvcc most of a
# minute; TORCHINDUCTOR_CUTLASS_ALLOWLIST chooses others.
ALLOWED = r"_2x1x1_.*align8_warpspecialized_(pingpong|cooperative)_epi_tma"


def why_not() -> str | None:
    """In one clause; None where Inductor can compile CUTLASS's templates."""
    if _nvcc() is None:
        return "mode=cutlass needs nvcc: put it on PATH, or set CUDACXX or CUDA_HOME"
    if missing := [name for name in PYTHON if find_spec(name) is None]:
        return f"mode=cutlass needs nvidia-cutlass, which has {', '.join(missing)}: install it"
    if missing := [name for name in SOURCES if not (_sources() / name).is_dir()]:
        return f"mode=cutlass needs nvidia-cutlass with its {' and '.join(missing)}: install 4.2.0.0"
    return None


def options() -> dict[str, Any]:
    """For torch.compile(options=...). Makes the folder that they name."""
    from torch._inductor import config

    found: dict[str, Any] = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "CUTLASS",
        "cuda.cuda_cxx": _nvcc(),
        "cutlass.cutlass_dir": str(_repository()),
        "cutlass.cutlass_epilogue_fusion_enabled": True,
    }
    if not os.environ.get("TORCHINDUCTOR_CUTLASS_ALLOWLIST"):
        found["cutlass.cutlass_op_allowlist_regex"] = ALLOWED
    known = config.get_config_copy()
    # Earlier versions keep these options among those for CUDA.
    return {name if name in known else name.replace("cutlass.", "cuda.", 1): value for name, value in found.items()}


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    places = (os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc")
    return next((found for place in places if place and (found := shutil.which(place))), None)


def _sources() -> Path:
    try:
        return Path(str(distribution("nvidia-cutlass").locate_file("cutlass_library/source")))
    except PackageNotFoundError:
        return Path("nowhere")


def _repository() -> Path:
    """A folder of links in Inductor's cache, laid out as CUTLASS's repository; made once for each installed copy."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    sources = _sources().resolve()
    folder = Path(cache_dir()) / f"cutlass-{hashlib.sha256(str(sources).encode()).hexdigest()[:12]}"
    links = {folder / name: sources / name for name in SOURCES}
    links |= {folder / "python" / name: sources.parent.parent / name for name in PYTHON}
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            aside = link.with_name(f"{link.name}.{os.getpid()}")  # another process may be at it
            aside.symlink_to(target)
            aside.replace(link)
    return folder
