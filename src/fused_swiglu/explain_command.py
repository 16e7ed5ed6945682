"""The `explain` subcommand: its options, and its verdict."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from . import study_command
from .cli import PROGRAM, integers, line
from .errors import ArgumentError

if TYPE_CHECKING:
    from .results import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    from .explain import SAMPLES

    parser.description = (
        "Which step of a kernel's arithmetic makes its outputs other than the correctly rounded exact ones: the\n"
        "tensor cores' truncating chain, another order of k or a split, the activation's recipe, and each rounding of\n"
        "an intermediate (gate, up, act), one added after the other; and what share is left that none explains.\n"
        "\n"
        "What a kernel leaves undeclared is found by trial: up to 16 splits of k, torch's fp32 sums, and for the\n"
        "activation torch's own operator, on a GPU that of torch.compile, and the recipes. What leaves least counts.\n"
        "On a CPU kernels that run as their model are explained to the bit; of torch's GEMM there, and of Triton's\n"
        "interpreter, the order of sums is not known, and a small rest stays."
    )
    parser.epilog = (
        "example:\n"
        f"  {PROGRAM} explain --model qwen2.5-0.5b --tokens 256 --kernels torch.eager triton.fused\n"
        f"  {PROGRAM} explain --from rows.jsonl --markdown --plot ladder.svg\n\n"
        "exit code: 0; 1 if a kernel failed or a complete declaration leaves a rest; 2 for bad input; 130 when\n"
        "interrupted, rows kept."
    )
    study_command.add_arguments(parser)
    parser.add_argument(
        "--sample",
        type=integers(1),
        metavar="OUTPUTS",
        help=f"how many outputs of each case are explained; default {SAMPLES['cpu']}, on a GPU {SAMPLES['cuda']}",
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--from", dest="stored", nargs="+", metavar="FILE", help="rows of earlier runs; nothing is run")
    shown.add_argument("--markdown", action="store_true", help="a markdown table")
    shown.add_argument("--plot", metavar="FILE", help="save a figure there: .png, .pdf or .svg")


def run(args: argparse.Namespace) -> int:
    """`explain`: rows to a table, and where asked to a file and a figure. Raises ArgumentError before any work."""
    from .explain import unexplained
    from .plots import check_plot
    from .tables import describe

    if args.plot is not None:
        check_plot(args.plot)
    rows = _run(args) if args.stored is None else _stored(args)
    _show(args, rows)
    wrong = [row for row in rows if unexplained(row)]
    for row in wrong:
        sys.stderr.write(line(f"{row.kernel} {row.config} contradicts {row.arithmetic} at {describe(row)}"))
    return int(bool(wrong) or any(row.status == "failed" for row in rows))


def _run(args: argparse.Namespace) -> list[Row]:
    from .explain import explain

    work, where = study_command.planned(args)
    options = {"seed": args.seed, "tolerances": study_command.tolerances(args)}
    options["sample"] = args.sample[0] if args.sample else None
    return study_command.collect(
        args,
        work,
        where,
        lambda work, where, environment, progress: explain(
            work, device=where, environment=environment, progress=progress, **options
        ),
    )


def _stored(args: argparse.Namespace) -> list[Row]:
    from .results import load

    if args.out is not None:
        raise ArgumentError("out", "given with --from, which runs nothing", "leave one of them out")
    globs = [glob for globs in args.kernels for glob in globs]
    rows = [row for row in load(*args.stored)[0] if any(fnmatchcase(row.kernel, glob) for glob in globs)]
    if not any(row.rung for row in rows):
        raise ArgumentError(
            "from", "holds no ladder of these kernels", f"give rows that `{PROGRAM} explain --out` wrote"
        )
    return [row for row in rows if row.rung]


def _show(args: argparse.Namespace, rows: list[Row]) -> None:
    from . import explain_plots, explain_tables

    if args.markdown:
        sys.stdout.write(explain_tables.markdown(rows))
    else:
        explain_tables.show(rows)
    if args.plot is not None and explain_tables.ladders(rows):
        explain_plots.plot_explain(rows, args.plot)
