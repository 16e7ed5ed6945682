"""The `tune` subcommand: finds the quickest kernel and config for problems, and keeps them for `swiglu`."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from . import study_command
from .cli import PROGRAM, device, integers, one_of, progress_bar
from .errors import ArgumentError

if TYPE_CHECKING:
    from .tune import Tuning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tune`."""
    from .choice import DEFAULT
    from .problem import ACTIVATIONS

    parser.description = (
        "Times the kernels and configs that `swiglu` may pick, all of one declared arithmetic, and keeps the quickest\n"
        "in FUSED_SWIGLU_TUNING, or fused-swiglu/tuning.json in the user's cache folder. A pick holds for this GPU,\n"
        "driver, versions and kernel sources, and for tokens up to the next of 8, 16, 32, 64, 80, 96, 112, 128, 160,\n"
        "192, ... (quarters of an octave). Needs an SM90 GPU."
    )
    parser.epilog = f"example:\n  {PROGRAM} tune --model qwen2.5-7b --tokens 1 16 64 512 4096 --compile 8"
    study_command.add_problem_arguments(parser)
    parser.add_argument(
        "--activation", type=one_of(ACTIVATIONS), default="silu", metavar="NAME", help=", ".join(ACTIVATIONS)
    )
    parser.add_argument("--arithmetic", default=DEFAULT, metavar="TEXT", help=f"as rows print it; default {DEFAULT}")
    parser.add_argument(
        "--compile",
        type=integers(1),
        metavar="JOBS",
        help="compile what is not built, JOBS at a time; else it is left out",
    )
    parser.add_argument("--seed", type=study_command.seed, default=0, metavar="S", help="of operands; default 0")
    parser.add_argument("--out", metavar="FILE", help="append a row for each candidate to this JSONL file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """`tune`: a table, and where asked rows. Raises ArgumentError before any work."""
    from dataclasses import replace

    from . import choice, tuned
    from .results import Environment, RowFile
    from .tune import search

    if args.out == "":
        raise ArgumentError("out", "is empty", "give it a value, or leave it out")
    arithmetic = choice.declared(args.arithmetic, args.activation)
    problems = [replace(case.problem, activation=args.activation) for case in study_command.cases(args)]
    where = device("auto")
    if not choice.has_kernels(where):
        raise ArgumentError("GPU", "there is no SM90 GPU here, and times elsewhere would tell nothing", "use one")
    for problem in problems:
        choice.choose(problem, arithmetic, where)
    found: list[Tuning] = []
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(args.out)) if args.out is not None else None
        environment = Environment.collect(where, args.command) if file else Environment()
        if file:
            file.write(environment)
        progress = stack.enter_context(progress_bar(args.quiet))
        try:
            for problem in problems:
                found.append(
                    search(
                        problem, arithmetic, where, compile_jobs=args.compile[0] if args.compile else 0,
                        seed=args.seed, environment=environment, progress=progress,
                    )
                )  # fmt: skip
                for row in found[-1].rows if file else ():
                    file.write(row)  # type: ignore[union-attr]
        finally:
            stack.close()
            show(found)
    print(f"kept in {tuned.path()}")
    return int(any(row.status == "failed" for tuning in found for row in tuning.rows))


def show(found: list[Tuning]) -> None:
    """A line a problem."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not found:
        return
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("m", "k", "n"):
        made.add_column(header, justify="right", no_wrap=True)
    made.add_column("heuristic's pick", overflow="fold")
    made.add_column("us", justify="right", no_wrap=True)
    made.add_column("tuned pick", overflow="fold")
    for header in ("us", "ratio", "timed", "not built"):
        made.add_column(header, justify="right", no_wrap=True)
    for tuning in found:
        problem, same = tuning.problem, tuning.quickest is tuning.heuristic
        failed = [row for row in tuning.rows if row.status != "ok"]
        cells = (
            *map(str, (problem.m, problem.k, problem.n)),
            f"{tuning.heuristic.name} {tuning.heuristic.config}", f"{tuning.heuristic_us:.4g}",
            "the same" if same else f"{tuning.quickest.name} {tuning.quickest.config}", f"{tuning.time_us:.4g}",
            f"{tuning.ratio[0]:.3f}", str(len(tuning.rows) - len(failed)), str(tuning.left_out),
        )  # fmt: skip
        made.add_row(*map(Text, cells))
    console = Console()
    console.print(made)
    for row in (row for tuning in found for row in tuning.rows if row.status != "ok"):
        console.print(Text(f"{row.kernel} {row.config}: {row.status}: {row.reason}"))
    if any(tuning.left_out for tuning in found):
        print(f"Configs that are not built were left out: --compile JOBS, or `{PROGRAM} build`, makes them.")
