"""The `roofline` subcommand: rates against ceilings, crossover, and the map of the fastest, from stored rows."""

from __future__ import annotations

import argparse

from .cli import PROGRAM, one_of
from .errors import ArgumentError

TABLES = ("rates", "crossover", "fastest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `roofline`."""
    parser.description = (
        "From rows that `compare`, `ablate` or `claims` wrote, of the models' sizes: how near the fastest fused\n"
        "kernel comes to the matrix rate and read bandwidth that its run measured; at how many tokens each model\n"
        "turns from memory-bound to compute-bound, fused and not; and which kernel is the fastest where. In Markdown."
    )
    parser.epilog = (
        f"example:\n  {PROGRAM} roofline notebooks/data/h200-*.jsonl --plot figures\n\n"
        "exit code: 0; 2 for bad input. --plot saves roofline.png and fastest.png."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSONL files of rows")
    parser.add_argument(
        "--show", nargs="+", type=one_of(TABLES), metavar="TABLE", default=TABLES, help="only " + " or ".join(TABLES)
    )
    parser.add_argument("--plot", metavar="DIR", help="save figures in this folder")


def run(args: argparse.Namespace) -> int:
    """Prints the tables. Raises ArgumentError for a file that cannot be read, or where no row is of use."""
    from . import roofline_plots, roofline_tables
    from .plots import folder, save
    from .results import load
    from .roofline import problems
    from .tables import print_markdown

    rows, environments = load(*args.files)
    found = problems(rows)
    by_run = {e.run: e for e in environments}
    if not any(e.peak_tflops and e.peak_gbs for e in environments) or not found:
        wrong = "no rows of a model's sizes that ran on a GPU beside torch.eager, with ceilings"
        raise ArgumentError("FILE", wrong, "give what `compare --out` wrote on a GPU")
    tables = {
        "rates": lambda: "\n\n".join((roofline_tables.rates(found, by_run), " ".join(roofline_tables.NOTES))),
        "crossover": lambda: roofline_tables.crossover(found, environments),
        "fastest": lambda: roofline_tables.fastest_map(found),
    }
    print_markdown("\n\n".join(tables[name]() for name in dict.fromkeys(args.show)) + "\n")
    if args.plot is not None:
        into = folder(args.plot)
        figures = {"roofline": roofline_plots.draw_roofline(found, by_run), "fastest": roofline_plots.draw_map(found)}
        for name, figure in figures.items():
            if figure is not None:
                save(figure, into / f"{name}.png")
                print(f"saved {into / name}.png")
    return 0
