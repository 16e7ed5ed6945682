"""The `compare` subcommand: its options, the cases they ask for, and where the rows go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import EXITS, PROGRAM, device, integers, line, one_of, progress_bar
from .errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from .plan import Case
    from .results import Row


def _shape(text: str) -> tuple[int, int, int]:
    values = integers(1)(text)
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(values)} sizes; give three, M,K,N, such as 64,896,4864")
    return values[0], values[1], values[2]


def _seed(text: str) -> int:
    values = integers(0)(text)
    if len(values) > 1 or values[0] >= 2**32:
        raise argparse.ArgumentTypeError(f"cannot take {text!r}; give one integer, less than 2^32")
    return values[0]


def _globs(text: str) -> list[str]:
    return [glob for glob in text.split(",") if glob]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    from .inputs import FAMILIES
    from .problem import LAYOUTS, MODELS
    from .timing import REGIMES

    parser.description = (
        "Runs SwiGLU kernels on the same operands, checks each against the exact result and times all together.\n"
        "Times on a CPU, in Triton's interpreter or in a model are labelled so, and are no results."
    )
    parser.epilog = (
        "example:\n"
        f"  {PROGRAM} compare --model qwen2.5-7b --tokens 1,16,4096 --kernels torch.eager,'triton.*' --out rows.jsonl\n"
        f"  {PROGRAM} compare --weights model.safetensors --layer 15 --hidden hidden.safetensors\n\n{EXITS}"
    )
    problem = parser.add_argument_group("problem: out[M, N] = silu(x[M, K] @ w_gate[N, K].T) * (x @ w_up[N, K].T)")
    problem.add_argument("--model", type=one_of(MODELS), metavar="NAME", help=f"{', '.join(MODELS)}; default the first")
    problem.add_argument("--shape", type=_shape, metavar="M,K,N", help="sizes, instead of a model")
    problem.add_argument("--tokens", type=integers(1), nargs="+", metavar="M", help="rows of x, several; default 64")
    problem.add_argument("--dtype", type=one_of(("bf16", "fp16")), default="bf16", metavar="NAME", help="bf16 or fp16")
    problem.add_argument(
        "--layout", type=one_of(LAYOUTS), default=LAYOUTS[0], metavar="NAME", help=f"of weights: {' or '.join(LAYOUTS)}"
    )
    operands = parser.add_argument_group("operands")
    operands.add_argument(
        "--inputs", type=one_of(FAMILIES), metavar="FAMILY", help=f"{', '.join(FAMILIES)}; default normal"
    )
    operands.add_argument(
        "--weights", metavar="FILE", help="real weights: a safetensors or GGUF checkpoint; gives K, N"
    )
    operands.add_argument("--hidden", metavar="FILE", help=f"real x, from `{PROGRAM} capture`; all its tokens, or M")
    operands.add_argument("--layer", type=integers(0), nargs="+", metavar="L", help="of FILE, several; default 0")
    operands.add_argument("--seed", type=_seed, default=0, metavar="S", help="of drawn operands; default 0")
    kernels = parser.add_argument_group("kernels")
    kernels.add_argument("--kernels", type=_globs, nargs="+", default=[["*"]], metavar="GLOB", help="names, with globs")
    kernels.add_argument(
        "--config", nargs="+", default=[], metavar="TEXT", help="configs as rows print them, with globs, or written out"
    )
    kernels.add_argument("--arithmetic", nargs="+", default=[], metavar="TEXT", help="as rows print them, with globs")
    running = parser.add_argument_group("run")
    running.add_argument(
        "--regime", type=one_of(REGIMES), default="burst", metavar="NAME", help=f"on a GPU: {' or '.join(REGIMES)}"
    )
    running.add_argument("--once", action="store_true", help="one launch a kernel in an NVTX range, for a profiler")
    running.add_argument("--device", type=one_of(("auto", "cpu", "cuda")), default="auto", metavar="NAME")
    running.add_argument("--out", metavar="FILE", help="append rows to this JSONL file as they are made")
    running.add_argument("--plot", metavar="FILE", help="draw the times: .png, .pdf or .svg")
    running.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """`compare`: rows to a table, and where asked to a file and a figure. Raises ArgumentError before any work."""
    from . import compare, plots, tables
    from .plan import plan
    from .results import Environment, RowFile

    rows: list[Row] = []
    where = device(args.device)
    kernels = [glob for globs in args.kernels for glob in globs]
    work = plan(list(_cases(args)), kernels, args.config, args.arithmetic, device=where)
    if args.plot and args.once:
        raise ArgumentError("plot", "--once takes no times", "leave one of them out")
    if args.plot:
        plots.check_plot(args.plot)
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(args.out)) if args.out else None
        environment = Environment.collect(where, args.command)
        if file:
            file.write(environment)
        study = compare.once if args.once else compare.run
        options = {} if args.once else {"regime": args.regime}
        progress = stack.enter_context(progress_bar(args.quiet))
        try:
            for row in study(work, device=where, seed=args.seed, environment=environment, progress=progress, **options):
                rows.append(row)
                if file:
                    file.write(row)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
    tables.show(rows)
    if interrupted:
        sys.stderr.write(line(f"interrupted; {len(rows)} rows kept" + (f" in {args.out}" if args.out else "")))
        return 130
    if args.plot:
        plots.plot_compare(rows, args.plot)
    return int(any(row.status == "failed" for row in rows))


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    """A case for each layer and number of tokens. Raises ArgumentError for options that do not go together."""
    _check_combinations(args)
    for layer in _flat(args.layer or [[0]]):
        yield from _layer_cases(args, layer)


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


def _layer_cases(args: argparse.Namespace, layer: int) -> Iterator[Case]:
    from .checkpoints import load_hidden, load_projections
    from .plan import Case
    from .problem import DTYPES, MODELS, Problem

    dtype, family = DTYPES[args.dtype], args.inputs or "normal"
    weights = load_projections(args.weights, layer, dtype=dtype) if args.weights else None
    hidden = load_hidden(args.hidden, layer, dtype=dtype) if args.hidden else None
    if weights is not None:
        n, k = weights.gate.shape
    else:
        k, n = args.shape[1:] if args.shape else MODELS[args.model or next(iter(MODELS))]
    if hidden is not None and hidden.shape[1] != k:
        wrong = f"{args.hidden} has k = {hidden.shape[1]}, the weights have {k}"
        raise ArgumentError("hidden", wrong, "capture it from the model that the weights are of")
    bias = weights is not None and weights.bias_gate is not None
    for m in _tokens(args, hidden):
        problem = Problem(m, n, k, dtype=args.dtype, layout=args.layout, bias=bias)
        x = None if hidden is None else hidden[:m]
        yield Case(problem, family, x, weights, _source(args, layer, family))


def _tokens(args: argparse.Namespace, hidden: torch.Tensor | None) -> list[int]:
    asked = [args.shape[0]] if args.shape else _flat(args.tokens or [])
    if hidden is None:
        return asked or [64]
    if asked and max(asked) > len(hidden):
        wrong = f"{max(asked)} asked for, {args.hidden} holds {len(hidden)}"
        raise ArgumentError("shape" if args.shape else "tokens", wrong, "take fewer, or capture a longer text")
    return asked or [len(hidden)]


def _source(args: argparse.Namespace, layer: int, family: str) -> str:
    """What a row calls its operands: the weights, then x where it comes from elsewhere."""
    weights = f"weights:{Path(args.weights).name}:layer{layer}" if args.weights else family
    x = f"hidden:{Path(args.hidden).name}" + ("" if args.weights else f":layer{layer}") if args.hidden else family
    return weights if x == weights else f"{weights}+{x}"


def _flat(lists: list[list[int]]) -> list[int]:
    return list(dict.fromkeys(value for values in lists for value in values))
