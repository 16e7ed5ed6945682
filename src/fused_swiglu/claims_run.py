"""What the claims are read from, measured here: for each model and number of tokens one group of kernels, timed
together and resumable as `ablate`'s groups are, and the GEMM of the down projection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from .ablate import Space, design
from .claims import COMPILE, FUSED, GEMM, MODEL_PREFIX
from .errors import ArgumentError
from .plan import Candidate, Case, plan
from .problem import MODELS, Problem
from .tables import EAGER

KERNELS = (EAGER, "torch.concat", COMPILE, "triton.unfused", *FUSED, "cutlass.evt.product")
TOKENS = (1, 16, 128, 1024, 4096, 8192, 16384)
AUTOTUNED = (16, 4096)  # tokens at which torch.compile's autotuned modes run too: each takes minutes to tune
QWEN = tuple(name for name in MODELS if name.startswith(MODEL_PREFIX))


def spaces(
    models: Iterable[str] = QWEN,
    tokens: Iterable[int] = TOKENS,
    *,
    device: torch.device,
    kernels: Sequence[str] = KERNELS,
    autotuned: Iterable[int] = AUTOTUNED,
) -> Iterator[Space]:
    """For each model and number of tokens, for `ablate.run`: the kernels by their default configs under each recipe,
    Kernel-1 also with Swish overlapped, held and in the epilogue, torch.compile also autotuned where asked, and the
    references; then the GEMM of the down projection, beside torch.eager.

    Raises KeyError for a model that is not in `MODELS`, ArgumentError for a glob that matches no kernel.
    """
    autotuned = set(autotuned)
    for model in models:
        k, n = MODELS[model]
        for m in tokens:
            case = Case(Problem(m, n, k))
            ((_, candidates),) = plan(case, kernels, device=device)
            more = [twin for candidate in candidates for twin in _swish(candidate, case)]
            if m in autotuned and any(candidate.name == COMPILE for candidate in candidates):
                more += plan(case, [COMPILE], ["mode=max-autotune*"], device=device)[0][1]
            yield from design([(case, [*candidates, *more])], device=device, group=1000)
            ((down, pair),) = plan(Problem(m, k // 2, n), [GEMM, EAGER], device=device)
            yield Space(down, (tuple(pair),), (), ())


def _swish(candidate: Candidate, case: Case) -> Iterator[Candidate]:
    """The kernel's best guess of those that overlap Swish, and its twins that do not; nothing for other kernels."""
    if candidate.kernel is None or not hasattr(candidate.config, "swish"):
        return
    configs: Iterable[Any] = candidate.kernel.configs(case.problem)
    overlapped = next((config for config in configs if config.swish == "overlap"), None)
    if overlapped is None:
        return
    for place in ("overlap", "held", "epilogue"):
        with suppress(ArgumentError):  # not every geometry has every place
            yield replace(candidate, config=replace(overlapped, swish=place))
