"""The `generated` subcommand: what torch.compile fuses, mode by mode, as a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fused_swiglu.cli import PROGRAM, device, integers, one_of, progress_bar
from fused_swiglu.errors import ArgumentError

if TYPE_CHECKING:
    from .generated import Report

SUMMARY = "show what torch.compile fuses: the kernels in the code that Inductor generates"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `generated`."""
    from fused_swiglu.problem import MODELS

    from .compiled import MODES, NAMED_MODES

    parser.description = (
        "Compiles silu(x @ w_gate.T) * (x @ w_up.T) in each mode of torch.compile, and reads from the code that\n"
        "Inductor generates which kernels a call launches: which are GEMMs, by whom, and where silu and the product\n"
        "are. On a CPU only mode=default runs. mode=cutlass autotunes over CUTLASS templates: minutes of nvcc."
    )
    parser.epilog = (
        f"example:\n  {PROGRAM} generated --model qwen2.5-0.5b --tokens 16 4096 --out generated.jsonl\n\n"
        "exit code: 0; 1 if a mode failed; 2 for bad input."
    )
    parser.add_argument("--from", dest="source", metavar="FILE", help="show what --out stored, instead of compiling")
    parser.add_argument(
        "--modes", nargs="+", type=one_of((*MODES, *NAMED_MODES)), default=list(MODES), metavar="MODE",
        help=f"{', '.join(MODES)} (default: these); {', '.join(NAMED_MODES)}",
    )  # fmt: skip
    parser.add_argument("--model", type=one_of(MODELS), default=next(iter(MODELS)), metavar="NAME", help="gives K, N")
    parser.add_argument(
        "--tokens", type=integers(1), nargs="+", default=[[16]], metavar="M", help="rows of x, several; default 16"
    )
    parser.add_argument("--dtype", type=one_of(("bf16", "fp16")), default="bf16", metavar="NAME", help="bf16 or fp16")
    parser.add_argument(
        "--device", type=one_of(("auto", "cpu", "cuda")), default="auto", metavar="NAME", help="auto, cpu or cuda"
    )
    parser.add_argument("--out", metavar="FILE", help="append the environment and the reports to this JSONL file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises ArgumentError for a file that cannot be read or written."""
    from .generated import load

    reports = load(args.source) if args.source else _made(args)
    _show(reports)
    return int(any(report.status == "failed" for report in reports))


def _made(args: argparse.Namespace) -> list[Report]:
    from fused_swiglu.problem import MODELS, Problem
    from fused_swiglu.results import Environment

    from .compiled import CompileConfig
    from .generated import examine

    where = device(args.device)
    k, n = MODELS[args.model]
    environment = Environment.collect(where, args.command)
    _append(args.out, environment.to_json())
    work = [(m, mode) for tokens in args.tokens for m in tokens for mode in args.modes]
    reports = []
    with progress_bar(args.quiet) as progress:
        for i, (m, mode) in enumerate(work):
            progress(i, len(work), f"m={m} mode={mode}")
            report = examine(Problem(m, n, k, dtype=args.dtype), CompileConfig(mode), where, environment.run)
            _append(args.out, report.to_json())
            reports.append(report)
    return reports


def _append(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise ArgumentError("out", f"cannot write {path!r}: {error.strerror}", "give a file that can be") from None


def _show(reports: list[Report]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fused_swiglu.tables import WIDE

    table = Table("config", "m", "k", "n", "ran on", "status", "kernels", "GEMMs", "fused", "verdict", box=None)
    for r in reports:
        made = r.generated
        counts = (
            (str(len(made.launches)), str(len(made.gemms)), "both" if made.gemms_fused else "no") if made else ("",) * 3
        )
        cells = (
            r.config,
            str(r.m),
            str(r.k),
            str(r.n),
            r.ran_on,
            r.status,
            *counts,
            made.verdict if made else r.reason,
        )
        table.add_row(*(Text(cell or "") for cell in cells))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
