"""The `compare` subcommand: its options, and what becomes of its rows."""

from __future__ import annotations

import argparse

from . import study_command
from .cli import EXITS, PROGRAM, one_of
from .errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    from .timing import REGIMES

    parser.description = (
        "Runs SwiGLU kernels on the same operands, checks each against the exact result and times all together.\n"
        "Times on a CPU or in Triton's interpreter are labelled so, and are no results; a model is not timed.\n"
        "The interpreter is slow: without a GPU, keep to few tokens of a small model."
    )
    parser.epilog = (
        "example:\n"
        f"  {PROGRAM} compare --model qwen2.5-0.5b --tokens 1 16 --kernels torch.eager 'triton.*' --out rows.jsonl\n"
        f"  {PROGRAM} compare --weights model.safetensors --layer 15 --hidden hidden.safetensors\n\n{EXITS}"
    )
    study_command.add_arguments(parser)
    timed = parser.add_argument_group("timing")
    timed.add_argument(
        "--regime",
        type=one_of(REGIMES),
        default="burst",
        metavar="NAME",
        help="on a GPU: burst (short, at boost clock; default) or sustained (the power-limited steady state)",
    )
    timed.add_argument("--once", action="store_true", help="one launch a kernel in an NVTX range, for a profiler")
    timed.add_argument("--plot", metavar="FILE", help="draw the times: .png, .pdf or .svg")


def run(args: argparse.Namespace) -> int:
    """`compare`: rows to a table, and where asked to a file and a figure. Raises ArgumentError before any work."""
    from . import compare, plots, tables

    work, where = study_command.planned(args)
    if args.plot and args.once:
        raise ArgumentError("plot", "--once takes no times", "leave one of them out")
    if args.plot:
        plots.check_plot(args.plot)
    study = compare.once if args.once else compare.run
    options = {} if args.once else {"regime": args.regime, "tolerances": study_command.tolerances(args)}
    rows = study_command.collect(
        args,
        work,
        where,
        lambda work, where, environment, progress: study(
            work, device=where, seed=args.seed, environment=environment, progress=progress, **options
        ),
    )
    tables.show(rows)
    if args.plot:
        plots.plot_compare(rows, args.plot)
    return int(any(row.status == "failed" for row in rows))
