"""The `claims` subcommand: its options, what it measures, and its report."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import EXITS, PROGRAM, device, integers, one_of, progress_bar
from .errors import ArgumentError

if TYPE_CHECKING:
    from .claims import Evidence
    from .results import Environment, Row


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"cannot take {text!r}; give GB/s, such as 3200")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `claims`."""
    from .claims import CLAIMS
    from .claims_run import AUTOTUNED, KERNELS, QWEN, TOKENS
    from .timing import REGIMES

    parser.description = (
        "Reads each claim of the paper again from measured rows: the figure, in which cells (model, tokens, regime)\n"
        "it holds, by GPU time or by calls from Python, and the rows behind it. Prints a summary in Markdown.\n"
        "\n"
        "With --from it reads rows that `claims`, `compare`, `ablate` or `check` wrote, here or elsewhere, without a\n"
        "GPU. Otherwise it measures the Qwen-2.5 models first: eager, torch.compile, the fused kernels and controls\n"
        "together for each model and number of tokens, and the down projection. With --out FILE, what FILE has whole\n"
        "from the same environment is not measured again: start a killed run once more.\n"
        "Figures that other kinds of rows give (M0, of `check`; where Swish is best, of `ablate`) come from those."
    )
    parser.epilog = (
        "example:\n"
        f"  {PROGRAM} claims --from notebooks/data/h200-*.jsonl --report claims\n"
        f"  {PROGRAM} claims --models qwen2.5-7b --tokens 16,4096 --out claims.jsonl\n\n{EXITS}"
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--from", dest="stored", nargs="+", metavar="FILE", help="rows of earlier runs; nothing is run")
    shown.add_argument("--claims", type=one_of([c.name for c in CLAIMS]), nargs="+", metavar="NAME",
                       help=f"only these: {', '.join(claim.name for claim in CLAIMS)}")  # fmt: skip
    shown.add_argument("--report", metavar="DIR", help="write claims.md and a figure for each claim there")
    shown.add_argument(
        "--bandwidth",
        type=_bandwidth,
        metavar="GBS",
        help="measured read bandwidth (GB/s) of the GPU to compare with by model; default: an H100's, by datasheet",
    )
    measured = parser.add_argument_group("what is measured")
    measured.add_argument("--models", type=one_of(QWEN), nargs="+", metavar="NAME", help=f"default {', '.join(QWEN)}")
    measured.add_argument("--tokens", type=integers(1), nargs="+", metavar="M",
                          help=f"rows of x, several; default {' '.join(map(str, TOKENS))}")  # fmt: skip
    measured.add_argument("--autotuned", type=integers(1), nargs="*", metavar="M",
                          help="tokens at which torch.compile's autotuned modes run; default "
                          + " ".join(map(str, AUTOTUNED)))  # fmt: skip
    measured.add_argument(
        "--kernels", nargs="+", metavar="GLOB", default=list(KERNELS), help="names, with globs; default the claims' own"
    )
    measured.add_argument("--regime", type=one_of(REGIMES), default="burst", metavar="NAME",
                          help=f"{' or '.join(REGIMES)}; default burst")  # fmt: skip
    measured.add_argument("--out", metavar="FILE", help="append rows to this JSONL file as they are made")
    measured.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """`claims`: a summary, and where asked a report. Raises ArgumentError before any work."""
    from .bandwidth import Elsewhere
    from .claims import CLAIMS, evidence
    from .claims_tables import summary
    from .tables import print_markdown

    for name in ("out", "report"):
        if getattr(args, name) == "":
            raise ArgumentError(name, "is empty", "give it a value, or leave it out")
    if args.report is not None:
        from .plots import folder

        folder(args.report, "report")
    claims = [claim for claim in CLAIMS if not args.claims or claim.name in args.claims]
    rows, environments, sources, failed = _stored(args) if args.stored is not None else _measured(args)
    elsewhere = Elsewhere(f"{args.bandwidth:g} GB/s", args.bandwidth) if args.bandwidth else Elsewhere()
    found = evidence(rows, environments, elsewhere)
    if not found.standings:
        raise ArgumentError("from", "no row has a time that a GPU took", "give rows that ran on one")
    print_markdown(summary(claims, found))
    if args.report is not None:
        print(f"saved {_report(args.report, claims, found, sources)}", file=sys.stderr)
    return int(failed)


def _stored(args: argparse.Namespace) -> tuple[list[Row], list[Environment], dict[str, str], bool]:
    from .results import load

    if args.out is not None:
        raise ArgumentError("out", "given with --from, which measures nothing", "leave one of them out")
    rows, environments, sources = [], [], {}
    for path in args.stored:
        some, where = load(path)
        rows += some
        environments += where
        sources |= {row.run: Path(path).name for row in some if row.run}
    return rows, environments, sources, False


def _measured(args: argparse.Namespace) -> tuple[list[Row], list[Environment], dict[str, str], bool]:
    from . import ablate
    from .claims_run import AUTOTUNED, QWEN, TOKENS, spaces
    from .results import Environment, Row, RowFile, load

    where = device("auto")
    if where.type != "cuda":
        remedy = "show rows that were measured elsewhere: --from notebooks/data/h200-*.jsonl"
        raise ArgumentError("from", "missing, and torch finds no GPU to measure on", remedy)
    autotuned = AUTOTUNED if args.autotuned is None else [m for some in args.autotuned for m in some]
    tokens = [m for some in args.tokens or [TOKENS] for m in some]
    asked = list(
        spaces(
            dict.fromkeys(args.models or QWEN),
            dict.fromkeys(tokens),
            device=where,
            kernels=args.kernels,
            autotuned=autotuned,
        )
    )
    rows: list[Row] = []
    environments: list[Environment] = []
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(args.out)) if args.out is not None else None
        environment = Environment.collect(where, args.command)
        known = load(args.out) if args.out is not None else ([], [])
        rows = ablate.same_environment(*known, environment)
        environments = list(known[1])
        progress = stack.enter_context(progress_bar(args.quiet))
        new: list[Row] = []
        try:
            for record in ablate.run(
                asked, device=where, environment=environment, stored=rows, regime=args.regime, progress=progress
            ):
                (new if isinstance(record, Row) else environments).append(record)  # type: ignore[arg-type]
                if file:
                    file.write(record)
        except KeyboardInterrupt:
            kept = f" in {args.out}; start it again to go on" if args.out else ""
            raise KeyboardInterrupt(f"{len(new)} rows kept{kept}") from None
    return [*rows, *new], environments, {}, any(row.status == "failed" for row in new)


def _report(into: str, claims: list, found: Evidence, sources: dict[str, str]) -> Path:
    """claims.md beside a figure for each claim."""
    from .claims_plots import plot
    from .claims_tables import report

    figures = {name: Path(path.name) for name, path in plot(claims, found, into).items()}
    path = Path(into) / "claims.md"
    aside = path.with_name("claims.md.part")
    try:
        aside.write_text(report(claims, found, sources, figures), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ArgumentError(
            "report", f"cannot write {str(path)!r}: {error.strerror}", "give a folder that can be"
        ) from None
    return path
