"""The `table` subcommand: stored rows as a table."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase

from .cli import PROGRAM
from .errors import ArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `table`."""
    parser.description = "Shows rows that `compare --out` and `check --out` wrote."
    parser.epilog = f"example:\n  {PROGRAM} table notebooks/data/h200-qwen2.5-7b.jsonl --summary"
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSONL files of rows")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="GLOB", help="only these kernels")
    parser.add_argument(
        "--over", default="torch.eager", metavar="NAME", help="of --summary: ratios to this kernel; default torch.eager"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="every row, as a markdown table")
    form.add_argument("--summary", action="store_true", help="a markdown table: a line a problem, a column a kernel")
    form.add_argument("--conformance", action="store_true", help="a markdown table of rows that `check` wrote")
    form.add_argument("--relations", action="store_true", help="a markdown table of rows of pytest --mismatch-rows")
    form.add_argument("--ladder", action="store_true", help="a markdown table of rows that `explain` wrote")
    form.add_argument("--mismatch", action="store_true", help="a markdown table: M1 and M2 of each kernel")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises ArgumentError for a file that cannot be read, or where no row is left."""
    from . import tables
    from .results import load

    rows, _ = load(*args.files)
    rows = [row for row in rows if any(fnmatchcase(row.kernel, glob) for glob in args.kernels)]
    if not rows:
        raise ArgumentError("kernels", "no row matches", "see the kernels in a table without --kernels")
    if args.summary:
        if not any(args.over in (row.ratios or {}) for row in rows):
            known = dict.fromkeys(name for row in rows for name in row.ratios or {})
            raise ArgumentError("over", f"no row has a ratio to {args.over!r}", f"choose from {', '.join(known)}")
        sys.stdout.write(tables.summary(rows, args.over))
    elif args.mismatch:
        sys.stdout.write(tables.mismatches(rows))
    elif args.conformance:
        sys.stdout.write(tables.conformance(rows))
    elif args.ladder:
        from .explain_tables import markdown

        sys.stdout.write(markdown(rows))
    elif args.relations:
        sys.stdout.write(tables.relations(rows))
    elif args.markdown:
        sys.stdout.write(tables.markdown_table(rows))
    else:
        tables.show(rows)
    return 0
