"""What the subcommands that run kernels share: options for problems, operands and kernels, and where rows go."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import PROGRAM, device, integers, one_of, progress_bar
from .errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from .bench import Progress
    from .numerics import Tolerances
    from .plan import Case, Plan
    from .results import Environment, Row

    Study = Callable[[Plan, torch.device, Environment, Progress], Iterator[Row]]


def _shape(text: str) -> tuple[int, int, int]:
    values = integers(1)(text)
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(values)} sizes; give three, M,K,N, such as 64,896,4864")
    return values[0], values[1], values[2]


def seed(text: str) -> int:
    values = integers(0)(text)
    if len(values) > 1 or values[0] >= 2**32:
        raise argparse.ArgumentTypeError(f"cannot take {text!r}; give one integer, less than 2^32")
    return values[0]


def _tolerance(text: str) -> tuple[float, float]:
    try:
        rtol, atol = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}; give RTOL,ATOL, such as 5e-3,1e-4") from None
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance; give two finite numbers, 0 or more")
    return rtol, atol


def tolerances(args: argparse.Namespace) -> Tolerances:
    """The pairs (rtol, atol) asked for, or the usual ones."""
    from .numerics import TOLERANCES

    return tuple(dict.fromkeys(args.tolerance or TOLERANCES))


def _globs(text: str) -> list[str]:
    return [glob for glob in text.split(",") if glob]


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say which problems."""
    from .problem import LAYOUTS, MODELS

    problem = parser.add_argument_group("problem: out[M, N] = silu(x[M, K] @ w_gate[N, K].T) * (x @ w_up[N, K].T)")
    problem.add_argument("--model", type=one_of(MODELS), metavar="NAME", help=f"{', '.join(MODELS)}; default the first")
    problem.add_argument("--shape", type=_shape, nargs="+", metavar="M,K,N", help="sizes, several, instead of a model")
    problem.add_argument("--tokens", type=integers(1), nargs="+", metavar="M", help="rows of x, several; default 64")
    problem.add_argument("--dtype", type=one_of(("bf16", "fp16")), default="bf16", metavar="NAME", help="bf16 or fp16")
    problem.add_argument(
        "--layout", type=one_of(LAYOUTS), default=LAYOUTS[0], metavar="NAME", help=f"of weights: {' or '.join(LAYOUTS)}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for problems, operands, kernels, the device and the rows."""
    from .inputs import FAMILIES

    add_problem_arguments(parser)
    operands = parser.add_argument_group("operands")
    operands.add_argument(
        "--inputs",
        type=one_of(FAMILIES),
        nargs="+",
        metavar="FAMILY",
        help=f"{', '.join(FAMILIES)}, several; default normal",
    )
    operands.add_argument(
        "--weights",
        metavar="FILE",
        help="real weights, which give K and N: a safetensors or GGUF checkpoint, or smollm2-135m",
    )
    operands.add_argument("--hidden", metavar="FILE", help=f"real x, from `{PROGRAM} capture`; all its tokens, or M")
    operands.add_argument("--layer", type=integers(0), nargs="+", metavar="L", help="of FILE, several; default 0")
    operands.add_argument("--seed", type=seed, default=0, metavar="S", help="of drawn operands; default 0")
    kernels = parser.add_argument_group("kernels")
    kernels.add_argument("--kernels", type=_globs, nargs="+", default=[["*"]], metavar="GLOB", help="names, with globs")
    kernels.add_argument(
        "--config", nargs="+", default=[], metavar="TEXT", help="configs as rows print them, with globs, or written out"
    )
    kernels.add_argument("--arithmetic", nargs="+", default=[], metavar="TEXT", help="as rows print them, with globs")
    running = parser.add_argument_group("run")
    running.add_argument(
        "--device",
        type=one_of(("auto", "cpu", "cuda")),
        default="auto",
        metavar="NAME",
        help="auto, cpu or cuda; auto takes a GPU if there is one",
    )
    running.add_argument(
        "--tolerance",
        type=_tolerance,
        nargs="+",
        metavar="RTOL,ATOL",
        help="of M2, |out - exact| > ATOL + RTOL |exact|, several; default 1.6e-2,1e-5 5e-3,1e-4",
    )
    running.add_argument("--out", metavar="FILE", help="append rows to this JSONL file as they are made")
    running.add_argument("--quiet", action="store_true", help="no progress bar")


def planned(args: argparse.Namespace) -> tuple[Plan, torch.device]:
    """What the options ask for, and where. Raises ArgumentError before any work."""
    from .plan import plan

    where = device(args.device)
    kernels = [glob for globs in args.kernels for glob in globs]
    texts = {name: [getattr(args, name, None)] for name in ("out", "plot", "weights", "hidden")}
    texts |= {"config": args.config, "arithmetic": args.arithmetic, "kernels": kernels or [""]}
    for name, given in texts.items():
        if "" in given:
            raise ArgumentError(name, "is empty", "give it a value, or leave it out")
    return plan(list(cases(args)), kernels, args.config, args.arithmetic, device=where), where


def collect(args: argparse.Namespace, work: Plan, where: torch.device, study: Study) -> list[Row]:
    """The study's rows, each also appended to --out as it comes. KeyboardInterrupt ends it: the rows so far are shown
    and kept, and it is raised again with their number."""
    from . import tables
    from .results import Environment, RowFile

    rows: list[Row] = []
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(args.out)) if args.out is not None else None
        environment = Environment.collect(where, args.command)
        if file:
            file.write(environment)
        progress = stack.enter_context(progress_bar(args.quiet))
        try:
            for row in study(work, where, environment, progress):
                rows.append(row)
                if file:
                    file.write(row)
        except ArgumentError:
            if rows:  # what cannot be stored can still be read
                tables.show(rows)
            raise
        except KeyboardInterrupt:
            stack.close()
            tables.show(rows)
            raise KeyboardInterrupt(f"{len(rows)} rows kept" + (f" in {args.out}" if args.out else "")) from None
    return rows


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """A case for each layer and number of tokens; options for operands may be missing.
    Raises ArgumentError for options that do not go together."""
    vars(args).update({name: None for name in ("weights", "hidden", "layer", "inputs") if not hasattr(args, name)})
    _check_combinations(args)
    for layer in _flat(args.layer or [[0]]):
        for family in dict.fromkeys(args.inputs or ["normal"]):
            yield from _layer_cases(args, layer, family)


def _check_combinations(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("model", "shape", "weights") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ArgumentError(given[1][2:], f"given with {given[0]}, and each sets K and N", "leave one of them out")
    if args.shape and args.tokens:
        raise ArgumentError("tokens", "given with --shape, which has its own M", "leave one of them out")
    if args.layer and not (args.weights or args.hidden):
        raise ArgumentError("layer", "given without a file", "add --weights FILE or --hidden FILE")
    if args.inputs and args.weights and args.hidden:
        raise ArgumentError("inputs", "nothing is drawn with both --weights and --hidden", "leave one of them out")


def _layer_cases(args: argparse.Namespace, layer: int, family: str) -> Iterator[Case]:
    from .checkpoints import load_hidden, load_projections
    from .plan import Case
    from .problem import DTYPES, MODELS, Problem

    dtype = DTYPES[args.dtype]
    weights = load_projections(args.weights, layer, dtype=dtype) if args.weights else None
    hidden = load_hidden(args.hidden, layer, dtype=dtype) if args.hidden else None
    bias = weights is not None and weights.bias_gate is not None
    if weights is not None:
        n, k = weights.gate.shape
        if not n or not k:
            raise ArgumentError(
                "weights", f"{args.weights} has projections of shape ({n}, {k})", "give a whole model's"
            )
        sizes = [(m, k, n) for m in _tokens(args, hidden)]
    elif args.shape:
        sizes = list(dict.fromkeys(args.shape))
    else:
        sizes = [(m, *MODELS[args.model or next(iter(MODELS))]) for m in _tokens(args, hidden)]
    for m, k, n in sizes:
        x = None if hidden is None else _first_tokens(args, hidden, m, k)
        problem = Problem(m, n, k, dtype=args.dtype, layout=args.layout, bias=bias)
        yield Case(problem, family, x, weights, _source(args, layer, family))


def _tokens(args: argparse.Namespace, hidden: torch.Tensor | None) -> list[int]:
    return _flat(args.tokens or []) or [64 if hidden is None else len(hidden)]


def _first_tokens(args: argparse.Namespace, hidden: torch.Tensor, m: int, k: int) -> torch.Tensor:
    from .checkpoints import check_hidden

    check_hidden(hidden, k)
    if m > len(hidden):
        wrong = f"{m} asked for, {args.hidden} holds {len(hidden)}"
        raise ArgumentError("shape" if args.shape else "tokens", wrong, "take fewer, or capture a longer text")
    return hidden[:m]


def _source(args: argparse.Namespace, layer: int, family: str) -> str:
    """What a row calls its operands: the weights, then x where it comes from elsewhere."""
    weights = f"weights:{Path(args.weights).name}:layer{layer}" if args.weights else family
    x = f"hidden:{Path(args.hidden).name}" + ("" if args.weights else f":layer{layer}") if args.hidden else family
    return weights if x == weights else f"{weights}+{x}"


def _flat(lists: list[list[int]]) -> list[int]:
    return list(dict.fromkeys(value for values in lists for value in values))
