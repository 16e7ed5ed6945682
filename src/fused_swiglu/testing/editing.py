"""Sparse adversarial edits: a few NaN, infinities and huge values in operands, and which outputs they may reach."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..inputs import Inputs

VALUES = ("nan", "inf", "-inf", "huge")  # huge: the largest number of the dtype
Edit = tuple[str, int, int, str]
"""An operand (`x`, `gate` or `up`), a row and a column of it, and one of `VALUES`."""


def apply_edits(inputs: Inputs, edits: Iterable[Edit]) -> tuple[Tensor, Tensor]:
    """Writes the edits into the inputs. Returns two masks of the output, bool [m, n]: what the edits may change, which
    is a row of it for one of x and a column for one of a weight; and what they must make infinite or NaN."""
    operands = {"x": inputs.x, "gate": inputs.weights.gate, "up": inputs.weights.up}
    shape, device = (len(inputs.x), len(inputs.weights.gate)), inputs.x.device
    reached, spoilt = (torch.zeros(shape, dtype=torch.bool, device=device) for _ in range(2))
    for operand, row, column, text in edits:
        value = float(text) if text != "huge" else torch.finfo(inputs.x.dtype).max
        operands[operand][row, column] = value
        for mask in [reached] if math.isfinite(value) else [reached, spoilt]:
            (mask if operand == "x" else mask.T)[row] = True
    return reached, spoilt
