"""The `determinism` subcommand: its options, its second process, and its verdict."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from . import study_command
from .cli import PROGRAM, integers, line, progress_bar
from .errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from .bench import Progress
    from .plan import Plan
    from .results import Environment, Row

CUBLAS, SMALL = "CUBLAS_WORKSPACE_CONFIG", ":16:8"  # a workspace that is too small to split k


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `determinism`."""
    parser.description = (
        "What determinism costs: for each kernel the share of a fixed row's output words that change as the number\n"
        "of rows goes from 1 to 8192, the share of words that change from run to run, and the time beside the\n"
        "fastest kernel's. At each number of rows a kernel runs by the config that it takes by default there.\n"
        "\n"
        "The first number of --tokens is what others are compared with. With --shape M,K,N, or with M tokens in\n"
        "--hidden, they are 1, 2, 4, ... M.\n"
        f"On a GPU, kernels that call cuBLAS run once more in a second process with {CUBLAS}={SMALL},\n"
        "which keeps cuBLAS from splitting k, beside the fastest kernels that kept their bits, which link the times\n"
        "of the two processes; not so where it is set already. Times on a CPU are labelled so, and no results."
    )
    parser.epilog = (
        "example:\n"
        f"  {PROGRAM} determinism --model qwen2.5-7b --out determinism.jsonl --plot determinism.svg\n"
        f"  {PROGRAM} determinism --from determinism.jsonl --markdown\n\n"
        "exit code: 0; 1 if a kernel or the second process failed, or bits changed under a complete declaration;\n"
        "2 for bad input; 130 when interrupted, rows kept."
    )
    study_command.add_arguments(parser)
    study = parser.add_argument_group("study", conflict_handler="resolve")  # --tokens has another default here
    study.add_argument(
        "--tokens", type=integers(1), nargs="+", metavar="M", help="rows of x, two or more; default 1, 2, 4, ... 8192"
    )
    study.add_argument("--repeats", type=integers(0), default=[3], metavar="R", help="runs after the first; default 3")
    parser.add_argument("--part", nargs="+", metavar="NAME", help=argparse.SUPPRESS)  # what a second process runs
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--from", dest="stored", nargs="+", metavar="FILE", help="rows of earlier runs; nothing is run")
    shown.add_argument("--markdown", action="store_true", help="markdown tables")
    shown.add_argument("--plot", metavar="FILE", help="save a figure there: .png, .pdf or .svg")


def run(args: argparse.Namespace) -> int:
    """`determinism`: rows to tables, and where asked to a file and a figure. Raises ArgumentError before any work."""
    from .plots import check_plot

    if args.part is not None:
        _first(args, *_planned(args))
        return 0
    if args.plot is not None:
        check_plot(args.plot)
    rows, environments, trouble = _run(args) if args.stored is None else (*_stored(args), None)
    _show(args, rows, environments)
    told = [*_contradictions(rows), *filter(None, [trouble])]
    for message in told:
        sys.stderr.write(line(message))
    return int(bool(told) or any(row.status == "failed" for row in rows))


def _run(args: argparse.Namespace) -> tuple[list[Row], list[Environment], str | None]:
    """The rows and environments of both processes, and what went wrong with the second."""
    work, where = _planned(args)
    rows, environments = _first(args, work, where)
    names = _again(rows, environments) if has_cublas(where) else []
    if not names:
        return rows, environments, None
    if CUBLAS in os.environ:
        sys.stderr.write(line(f"{CUBLAS} is set to {os.environ[CUBLAS]}: all rows are of that, in one process"))
        return rows, environments, None
    return rows, environments, _second(args, names, rows, environments)


def _planned(args: argparse.Namespace) -> tuple[Plan, torch.device]:
    from .determinism import TOKENS, families

    if args.shape:
        args.shape = [(m, k, n) for last, k, n in args.shape for m in _doubled(last)]
    elif not args.tokens:
        args.tokens = [list(TOKENS) if args.hidden is None else _doubled(_captured(args))]
    work, where = study_command.planned(args)
    families(work)
    if args.part is not None:
        work = [(case, [c for c in candidates if c.name in args.part]) for case, candidates in work]
    return work, where


def _captured(args: argparse.Namespace) -> int:
    """How many tokens --hidden holds."""
    from .checkpoints import load_hidden
    from .problem import DTYPES

    return len(load_hidden(args.hidden, args.layer[0][0] if args.layer else 0, dtype=DTYPES[args.dtype]))


def _doubled(last: int) -> list[int]:
    """1, 2, 4, ... and the last."""
    return [*(2**exponent for exponent in range((last - 1).bit_length())), last]


def _first(args: argparse.Namespace, work: Plan, where: torch.device) -> tuple[list[Row], list[Environment]]:
    """The rows of this process, and their environment."""
    from .determinism import determinism

    environments: list[Environment] = []

    def study(work: Plan, where: torch.device, environment: Environment, progress: Progress) -> Iterator[Row]:
        environments.append(environment)
        return determinism(
            work,
            device=where,
            seed=args.seed,
            repeats=args.repeats[0],
            tolerances=study_command.tolerances(args),
            environment=environment,
            progress=progress,
        )

    return study_command.collect(args, work, where, study), environments


def has_cublas(device: torch.device) -> bool:
    return device.type == "cuda"


def _again(rows: list[Row], environments: list[Environment]) -> list[str]:
    """What a second process runs: the kernels that leave the order of sums to a library, and those that link its times
    to the first one's. Empty without the former."""
    from .determinism_lines import ranges

    found = ranges(rows, environments)
    names = [line.kernel for shown in found for line in shown.lines if line.library]
    links = [line.kernel for shown in found for line in shown.links()]
    return list(dict.fromkeys([*names, *links])) if names else []


def _second(args: argparse.Namespace, names: list[str], rows: list[Row], environments: list[Environment]) -> str | None:
    """Runs the named kernels in a second process, and adds its rows and its environment to those given and to --out.
    Returns why it failed, if it did."""
    from . import tables
    from .results import Row, RowFile
    from .second_process import records

    before = len(rows)
    expected = sum(row.kernel in names for row in rows)
    arguments = [*shlex.split(args.command)[1:], "--part", *names]
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(args.out)) if args.out is not None else None
        progress = stack.enter_context(progress_bar(args.quiet))
        try:
            progress(0, expected, f"second process, {CUBLAS}={SMALL}")
            for record in records(arguments, {CUBLAS: SMALL}):
                if isinstance(record, Row):
                    rows.append(record)
                    progress(len(rows) - before, expected, f"second process: {record.kernel}, m={record.m}")
                else:
                    record = replace(record, command=args.command)  # as typed
                    environments.append(record)
                if file:
                    file.write(record)
        except KeyboardInterrupt:
            stack.close()
            tables.show(rows)
            raise KeyboardInterrupt(f"{len(rows)} rows kept" + (f" in {args.out}" if args.out else "")) from None
        except RuntimeError as error:
            return f"the second process, {CUBLAS}={SMALL}, failed: {error}; {len(rows) - before} of its rows are kept"
    return None


def _stored(args: argparse.Namespace) -> tuple[list[Row], list[Environment]]:
    from .results import load

    if args.out is not None:
        raise ArgumentError("out", "given with --from, which runs nothing", "leave one of them out")
    globs = [glob for globs in args.kernels for glob in globs]
    rows, environments = load(*args.stored)
    rows = [row for row in rows if row.first_m is not None and any(fnmatchcase(row.kernel, glob) for glob in globs)]
    if not rows:
        raise ArgumentError(
            "from",
            "holds no row of this study, of these kernels",
            f"give rows that `{PROGRAM} determinism --out` wrote",
        )
    return rows, environments


def _show(args: argparse.Namespace, rows: list[Row], environments: list[Environment]) -> None:
    from . import determinism_plots, determinism_tables

    if args.markdown:
        sys.stdout.write(determinism_tables.markdown(rows, environments))
    else:
        determinism_tables.show(rows, environments)
    if args.plot is not None and any(row.status == "ok" for row in rows):
        determinism_plots.plot_determinism(rows, environments, args.plot)


def _contradictions(rows: list[Row]) -> list[str]:
    """A line for each kernel and arithmetic that is complete and under which bits changed."""
    from .check import broken

    found: dict[tuple[str, str | None], set[int]] = {}
    for row in rows:
        if broken(row):
            found.setdefault((row.kernel, row.arithmetic), set()).add(row.m)
    return [
        f"{kernel} contradicts {arithmetic}: bits change at m = {', '.join(map(str, sorted(at)))}"
        for (kernel, arithmetic), at in found.items()
    ]
