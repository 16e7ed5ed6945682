"""The `ablate` subcommand: its options, and what becomes of its rows."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from . import study_command
from .cli import EXITS, PROGRAM, integers, one_of, progress_bar
from .errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from .ablate import Space
    from .results import Row

VARY = [("band", ["1", "2", "4", "16"])]  # a launch argument: nothing is built for it


def _vary(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    given = [value for value in values.split(",") if value]
    if not name or not given:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}; give FIELD=VALUE,..., such as band=1,4,16")
    return name, given


def _group(text: str) -> int:
    values = integers(1)(text)
    if len(values) > 1:
        raise argparse.ArgumentTypeError(f"cannot take {text!r}; give one integer, such as 32")
    return values[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ablate`."""
    from .ablate import GROUP
    from .timing import REGIMES

    parser.description = (
        "What each choice in a kernel's design is worth: times every config of kernels and controls, and compares\n"
        "pairs that differ in one factor alone: fusion, where Swish happens, cluster, schedule, recipe, activation,\n"
        "band, tile, stages, and whatever else a config has. The headline is Pingpong overlap (cutlass.pingpong,\n"
        "swish=overlap) against EVT (cutlass.evt), at equal output tiles and at each one's best.\n"
        "\n"
        "Every config runs under the default arithmetic; the best guess also under other recipes and with --vary.\n"
        "Variants are timed in groups, each with cublas.gemm, torch.eager and quack.gated. With --out FILE, a group\n"
        "that FILE has whole, of the same problem, operands and environment, is not timed again: a killed run that is\n"
        "started once more has lost one group at most. `build` makes ahead what is to be timed.\n"
        "Times on a CPU are labelled so, and are no results; where a kernel runs as its model, it is not timed."
    )
    parser.epilog = (
        "example:\n"
        f"  {PROGRAM} ablate --model qwen2.5-7b --tokens 4096 --out ablate.jsonl --plot figures\n"
        f"  {PROGRAM} ablate --tokens 8192 --arithmetic '*:ieee:*' '*:ex2:*' --vary band=1,4 stages=3,4\n"
        f"  {PROGRAM} ablate --from ablate.jsonl --markdown --factor headline swish cluster\n\n{EXITS}"
    )
    study_command.add_arguments(parser)
    parser.set_defaults(kernels=[["cutlass.*"]])
    study = parser.add_argument_group("study")
    study.add_argument(
        "--vary",
        type=_vary,
        nargs="+",
        metavar="FIELD=V,...",
        help="of each kernel's best guess, configs with these values too; default band=1,2,4,16",
    )
    study.add_argument(
        "--group", type=_group, default=GROUP, metavar="N", help=f"variants timed together, at most; default {GROUP}"
    )
    study.add_argument(
        "--regime",
        type=one_of(REGIMES),
        default="burst",
        metavar="NAME",
        help="on a GPU: burst (short, at boost clock; default) or sustained (the power-limited steady state)",
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--from",
        dest="stored",
        nargs="+",
        metavar="FILE",
        help="rows of earlier runs; nothing is run, no GPU is needed",
    )
    shown.add_argument(
        "--factor", nargs="+", default=[], metavar="NAME", help="only these: headline, fusion, swish, cluster, ..."
    )
    shown.add_argument("--all", action="store_true", help="each level over each other, not just over the commonest")
    shown.add_argument("--markdown", action="store_true", help="markdown tables alone")
    shown.add_argument("--plot", metavar="DIR", help="save a figure for the headline and for each factor there: .png")


def run(args: argparse.Namespace) -> int:
    """`ablate`: rows to tables, and where asked to a file and to figures. Raises ArgumentError before any work."""
    if args.stored is not None:
        from .results import load

        if args.out is not None:
            raise ArgumentError("out", "given with --from, which runs nothing", "leave one of them out")
        rows, _ = load(*args.stored)
        _report(args, rows)
        return 0
    spaces, where = _designed(args)
    rows, new = _collect(args, spaces, where)
    _report(args, rows)
    return int(any(row.status == "failed" for row in new))


def _designed(args: argparse.Namespace) -> tuple[list[Space], torch.device]:
    from . import ablate
    from .ablate_tables import HEADLINE
    from .plots import folder

    if args.plot == "":
        raise ArgumentError("plot", "is empty", "give it a value, or leave it out")
    recipes = not args.arithmetic
    args.config = args.config or ["*"]
    work, where = study_command.planned(args)
    vary = args.vary or [(name, values) for name, values in VARY if _has(work, name)]
    spaces = ablate.design(work, device=where, recipes=recipes, vary=vary, group=args.group)
    _check_factors(args, [HEADLINE, *{name for space in spaces for v in space.variants for name in v.levels}])
    if args.plot:
        folder(args.plot)
    return spaces, where


def _has(work: list, name: str) -> bool:
    return any(hasattr(candidate.config, name) for _, candidates in work for candidate in candidates)


def _check_factors(args: argparse.Namespace, known: list[str]) -> None:
    for name in args.factor:
        if name not in known:
            raise ArgumentError("factor", f"unknown {name!r}", f"choose from {', '.join(sorted(known))}")


def _collect(args: argparse.Namespace, spaces: list[Space], where: torch.device) -> tuple[list[Row], list[Row]]:
    """All rows of the study, those that --out already has included, and those that are new. KeyboardInterrupt ends it:
    whole groups are kept."""
    from . import ablate
    from .results import Environment, Row, RowFile, load

    new: list[Row] = []
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(args.out)) if args.out is not None else None
        environment = Environment.collect(where, args.command)
        known = load(args.out) if args.out is not None and Path(args.out).is_file() else ([], [])
        stored = ablate.same_environment(*known, environment)
        progress = stack.enter_context(progress_bar(args.quiet))
        try:
            for record in ablate.run(
                spaces,
                device=where,
                environment=environment,
                stored=stored,
                seed=args.seed,
                regime=args.regime,
                tolerances=study_command.tolerances(args),
                progress=progress,
            ):
                if isinstance(record, Row):
                    new.append(record)
                if file:
                    file.write(record)
        except KeyboardInterrupt:
            kept = f" in {args.out}; start it again to go on" if args.out else ""
            raise KeyboardInterrupt(f"{len(new)} rows kept{kept}") from None
    return [*stored, *new], new


def _report(args: argparse.Namespace, rows: list[Row]) -> None:
    from . import ablate_plots, ablate_tables
    from .tables import reasons

    if args.stored is not None:
        _check_factors(args, [ablate_tables.HEADLINE, *ablate_tables.factors_of(rows)])
    made = ablate_tables.tables(rows, args.factor, args.all)
    if args.stored is not None and not made:
        raise ArgumentError("from", "no two of its rows can be compared", "give rows that `ablate --out` wrote")
    if args.markdown:
        sys.stdout.write("\n".join(table.markdown() for table in made))
    else:
        ablate_tables.show(made, rows)
        for line in reasons(rows):
            print(f"  {line}")
    if args.plot:
        for path in ablate_plots.plot(rows, args.plot, args.factor):
            print(f"saved {path}")
