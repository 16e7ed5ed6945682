"""The `resources` subcommand: what compiled kernels take and are made of, as a table; needs no GPU."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .cli import PROGRAM, integers, progress_bar
from .errors import ArgumentError

if TYPE_CHECKING:
    from .arithmetic import Arithmetic
    from .config import Config
    from .kernel import Kernel

    Choice = tuple[Kernel, Config, Arithmetic]

SIZES = 256, 512, 512  # any will do: a build serves all that are multiples of 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `resources`."""
    parser.description = (
        "Shows what kernels compiled for SM90 take: registers of a thread at launch, bytes of a thread block's shared\n"
        "memory (with the KiB that the system keeps) and of a thread's stack, loads and stores that spill, stages;\n"
        "and how many instructions of a kind their code holds. Of the Triton and CUTLASS kernels, by config; or of\n"
        "files, which do not say how much shared memory a launch adds."
    )
    parser.epilog = (
        f"examples:\n  {PROGRAM} resources --kernels triton.fused\n"
        f"  {PROGRAM} resources --kernels cutlass.evt --config 'bm=128,bn=96*' --build\n\n"
        "exit code: 0; 1 if a kernel does not compile; 2 for bad input."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="cubins or shared libraries, instead of kernels")
    parser.add_argument("--kernels", nargs="+", metavar="GLOB", help="default cutlass.* and triton.*, or those of FILE")
    parser.add_argument("--config", nargs="+", default=["*"], metavar="GLOB", help="configs as rows print them")
    parser.add_argument("--arithmetic", nargs="+", metavar="GLOB", help="as rows print them; default each kernel's own")
    parser.add_argument("--build", action="store_true", help="compile the CUTLASS kernels that are not built yet")
    parser.add_argument(
        "--jobs", type=integers(1), metavar="N", help="compilers, disassemblers at a time; default cores"
    )
    parser.add_argument("--out", metavar="FILE", help="append rows to this JSONL file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises ArgumentError for a glob without a match, and for a file that cannot be read."""
    from .resources import resources

    rows = [{"file": path} | asdict(used) for path in args.files for used in resources(path)]
    if args.kernels or not args.files:
        chosen = _choices(args)
        if not chosen:
            raise ArgumentError("config", "nothing matches", "see the configs in `resources` without --config")
        with progress_bar(args.quiet) as progress, ThreadPoolExecutor(args.jobs[0] if args.jobs else _cores()) as pool:
            for i, found in enumerate(pool.map(lambda choice: list(_rows(choice, args.build)), chosen), 1):
                rows += found
                progress(i, len(chosen), chosen[i - 1][0].name)
    if args.out:
        _append(args.out, rows)
    _show(rows)
    return int(any(row.get("status") == "failed" for row in rows))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choices(args: argparse.Namespace) -> list[Choice]:
    """The kernels, configs and arithmetics that the options name."""
    from .problem import Problem
    from .registry import get_kernel, match
    from .resources import Compilable

    problem = Problem(*SIZES)
    kernels = [get_kernel(name) for name in match(args.kernels or ["cutlass.*", "triton.*"])]
    able = [kernel for kernel in kernels if isinstance(kernel, Compilable)]
    if not able:
        named = ", ".join(kernel.name for kernel in kernels)
        raise ArgumentError("kernels", f"{named} call a library", "name kernels of this project, or give a FILE")
    return [
        (kernel, config, arithmetic)
        for kernel in able
        for config in kernel.configs(problem)
        if any(fnmatchcase(str(config), glob) for glob in args.config)
        for i, arithmetic in enumerate(kernel.arithmetics(problem))
        if (any(fnmatchcase(str(arithmetic), glob) for glob in args.arithmetic) if args.arithmetic else i == 0)
    ]


def _rows(choice: Choice, build: bool) -> Iterator[dict[str, Any]]:
    """A row for each kernel function; one with the reason where there is none."""
    from .plan import first_line
    from .problem import Problem
    from .resources import Compilable, resources

    kernel, config, arithmetic = choice
    assert isinstance(kernel, Compilable)
    names = {"kernel": kernel.name, "config": str(config), "arithmetic": str(arithmetic)}
    try:
        binaries = list(kernel.binaries(Problem(*SIZES), config, arithmetic, build=build))
        for binary in binaries:
            for used in resources(binary.code):
                yield names | {"status": "ok", "stages": binary.stages, "dynamic": binary.dynamic} | asdict(used)
    except Exception as error:  # one that does not compile is a row too, and the rest go on
        yield names | {"status": "failed", "reason": first_line(error)}
        return
    if not binaries:
        yield names | {"status": "not built"}


def _append(path: str, rows: list[dict[str, Any]]) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({name: value for name, value in row.items() if value is not None}) + "\n")
    except OSError as error:
        raise ArgumentError("out", f"cannot write {path!r}: {error.strerror}", "give a file that can be") from None


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from .resources import SPILLS, TELLING
    from .tables import WIDE

    counted = [name for name in TELLING if name not in SPILLS and any(row.get("counts", {}).get(name) for row in rows)]
    table = Table("kernel", "config", "arithmetic", "function", box=None)
    for header in ("registers", "shared", "stack", "spills", "stages", *counted, "instructions"):
        table.add_column(header, justify="right")
    missing = [row for row in rows if "counts" not in row]
    launches = Counter((row.get("kernel"), row.get("config"), row.get("arithmetic")) for row in rows)
    for row in rows:
        if "counts" in row:
            counts = row["counts"]
            numbers = [row["registers"], row["shared"] + row.get("dynamic", 0), row["stack"]]
            numbers += [sum(counts[name] for name in SPILLS), row.get("stages")]
            numbers += [*(counts[name] for name in counted), row["instructions"]]
            several = "file" in row or launches[row["kernel"], row["config"], row["arithmetic"]] > 1
            words = (row.get("kernel", row.get("file")), row.get("config"), row.get("arithmetic"))
            words += (row["function"] if several else None,)  # a C++ name is long, and one alone says nothing new
            table.add_row(*(Text("" if cell is None else str(cell), overflow="fold") for cell in (*words, *numbers)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    if len(missing) < len(rows):
        console.print(table)
    for row in missing:
        said = row["status"] + (f": {row['reason']}" if "reason" in row else "")
        console.print(Text(f"{row['kernel']} {row['config']} {row['arithmetic']}: {said}"), soft_wrap=True)
    if any(row["status"] == "not built" for row in missing):
        print(f"what is not built is compiled by --build, or ahead by `{PROGRAM} build`")
