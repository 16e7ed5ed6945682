"""The `check` subcommand: its options, and its verdict."""

from __future__ import annotations

import argparse
import sys

from . import study_command
from .cli import PROGRAM, integers, line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `check`."""
    parser.description = (
        "Checks kernels against what they declare: bits against the model (M0), repeats, rows alone and in batches;\n"
        "and measures the distance from the exact result (M1, M2)."
    )
    parser.epilog = (
        f"example:\n  {PROGRAM} check --shape 64,896,512 --kernels 'triton.*' --config '*' --inputs normal wide\n\n"
        "exit code: 0; 1 if a kernel failed or contradicts its declaration; 2 for bad input; 130 when interrupted."
    )
    study_command.add_arguments(parser)
    parser.add_argument("--repeats", type=integers(0), default=[3], metavar="R", help="runs after the first; default 3")
    parser.add_argument(
        "--executor",
        choices=("device", "numpy"),
        default="device",
        help="what predicts the bits: the device's own model (default), or the NumPy model on all cores",
    )
    parser.add_argument(
        "--sample",
        type=integers(1),
        metavar="OUTPUTS",
        help="how many outputs of each case are predicted, drawn by the seed; default: all, by numpy 65536",
    )


def run(args: argparse.Namespace) -> int:
    """`check`: rows to a table and, where asked, a file; names the declarations that are broken."""
    from . import tables
    from .check import broken, check

    work, where = study_command.planned(args)
    options = {"seed": args.seed, "repeats": args.repeats[0], "executor": args.executor}
    options["sample"] = args.sample[0] if args.sample else None
    options["tolerances"] = study_command.tolerances(args)
    rows = study_command.collect(
        args,
        work,
        where,
        lambda work, where, environment, progress: check(
            work, device=where, environment=environment, progress=progress, **options
        ),
    )
    tables.show(rows)
    wrong = [row for row in rows if broken(row)]
    for row in wrong:
        sys.stderr.write(line(f"{row.kernel} {row.config} contradicts {row.arithmetic} at {tables.describe(row)}"))
    compared = sum(row.outputs or 0 for row in rows if row.m0 is not None)
    if compared:
        print(f"{compared} outputs compared with the model, {len(wrong)} declarations broken")
    return int(bool(wrong) or any(row.status == "failed" for row in rows))
