"""The model on all cores: `sm90.execute` in processes, each for some columns of the output."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import torch

from .arithmetic import Arithmetic
from .operands import Weights
from .sm90 import execute as execute_on_one

_LEAST = 2**28  # products that are worth a process's start


def execute(
    arithmetic: Arithmetic,
    x: torch.Tensor,
    weights: Weights,
    activation: str = "silu",
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `sm90.execute`, in as many processes as there are cores: [m, n] on the CPU."""
    (m, k), n = x.shape, weights.gate.shape[0]
    cores = min(torch.get_num_threads(), n)
    if cores < 2 or 2 * m * n * k < _LEAST:
        return execute_on_one(arithmetic, x, weights, activation, out_dtype=out_dtype)
    x, parts = x.cpu(), [of_columns(weights, part, "cpu") for part in torch.arange(n).chunk(cores)]
    futures = [
        _pool(cores).submit(execute_on_one, arithmetic, x, part, activation, out_dtype=out_dtype) for part in parts
    ]
    return torch.cat([future.result() for future in futures], 1)


def of_columns(weights: Weights, columns: torch.Tensor, device: str | None = None) -> Weights:
    """A copy of the weights and biases of those columns of the output, there or on another device."""

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[columns.to(tensor.device)].to(device or tensor.device)

    biases = (None if bias is None else taken(bias) for bias in (weights.bias_gate, weights.bias_up))
    return Weights(taken(weights.gate), taken(weights.up), *biases)


@cache
def _pool(processes: int) -> ProcessPoolExecutor:
    # Spawned: a fork of a process that has used a GPU, or has threads, may hang.
    return ProcessPoolExecutor(processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
