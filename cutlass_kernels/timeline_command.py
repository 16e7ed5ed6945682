"""The `timeline` subcommand: records what the warpgroups of a CUTLASS kernel do when, or shows what was recorded."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from statistics import median
from typing import TYPE_CHECKING, Any

from fused_swiglu.cli import PROGRAM, integers, line, one_of
from fused_swiglu.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from fused_swiglu.arithmetic import Arithmetic
    from fused_swiglu.plan import Candidate
    from fused_swiglu.problem import Problem

    from .launching import CutlassKernel
    from .timeline import Timeline

SUMMARY = "show when the warpgroups of a CUTLASS kernel load, multiply, activate and store"
BLOCKS, ROOM = 4, 64  # what --out keeps: thread blocks of a launch, and stamps of each role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `timeline`."""
    from fused_swiglu.problem import MODELS

    parser.description = (
        "Runs time-stamp builds of CUTLASS kernels on an SM90 GPU, or reads what such a run stored. Shows the median\n"
        "length of each part, in cycles of the SM clock, and how much of Swish lies under the other warpgroup's\n"
        "tensor work; at most so much, as a wait for a late load counts as tensor work. Where Swish has no stamps of\n"
        "its own (cutlass.interleaved, cutlass.evt, swish=epilogue), that of Swish and store together."
    )
    parser.epilog = (
        f"examples:\n  {PROGRAM} timeline --model qwen2.5-0.5b --tokens 4096 --out timeline.jsonl\n"
        f"  {PROGRAM} timeline --from timeline.jsonl --kernels cutlass.pingpong --plot pingpong.svg\n\n"
        "exit code: 0; 1 if a kernel could not be recorded; 2 for bad input."
    )
    parser.add_argument("--from", dest="source", metavar="FILE", help="show this file's timelines; needs no GPU")
    parser.add_argument(
        "--kernels", nargs="+", metavar="GLOB", help="default cutlass.pingpong, .evt and .interleaved; or all of FILE"
    )
    parser.add_argument("--config", nargs="+", default=[], metavar="TEXT", help="as rows print them, with globs")
    parser.add_argument("--arithmetic", nargs="+", default=[], metavar="TEXT", help="as rows print them, with globs")
    parser.add_argument("--model", type=one_of(MODELS), default=next(iter(MODELS)), metavar="NAME", help="gives K, N")
    parser.add_argument(
        "--tokens", type=integers(1), nargs="+", default=[[4096]], metavar="M", help="rows of x, several; default 4096"
    )
    parser.add_argument("--dtype", type=one_of(("bf16", "fp16")), default="bf16", metavar="NAME", help="bf16 or fp16")
    parser.add_argument("--out", metavar="FILE", help="append the environment and the timelines to this JSONL file")
    parser.add_argument("--plot", metavar="FILE", help="draw two tiles of each: .png, .pdf or .svg")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises ArgumentError where there is nothing to show, and no GPU to record on."""
    from fused_swiglu.plots import check_plot

    from .timeline_figure import save

    if args.plot:
        check_plot(args.plot)
    timelines, failed = (_stored(args), False) if args.source else _recorded(args)
    if timelines:
        _show(timelines)
        if args.plot:
            save(timelines, args.plot)
    return int(failed)


def _stored(args: argparse.Namespace) -> list[Timeline]:
    from .timeline import load

    globs = {"kernel": args.kernels, "config": args.config, "arithmetic": args.arithmetic}
    found = load(args.source)
    for field, wanted in globs.items():
        if wanted:
            found = [t for t in found if any(fnmatchcase(getattr(t, field), glob) for glob in wanted)]
    if not found:
        raise ArgumentError("kernels", "no timeline of FILE matches", "see them all without --kernels and --config")
    return found


def _recorded(args: argparse.Namespace) -> tuple[list[Timeline], bool]:
    """The timelines, and whether one is missing. What --out keeps is written as it comes."""
    import torch

    from fused_swiglu.plan import Case, first_line, plan
    from fused_swiglu.problem import MODELS, Problem
    from fused_swiglu.results import Environment

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ArgumentError("from", "is not given, and there is no SM90 GPU to record on", "give a stored FILE")
    where = torch.device("cuda", torch.cuda.current_device())
    k, n = MODELS[args.model]
    problems = [Problem(m, n, k, dtype=args.dtype) for tokens in args.tokens for m in tokens]
    kernels = args.kernels or ["cutlass.pingpong", "cutlass.evt", "cutlass.interleaved"]
    work = plan([Case(problem) for problem in problems], kernels, args.config, args.arithmetic, device=where)
    environment = Environment.collect(where, args.command)
    _append(args.out, environment.to_json())
    timelines, failed = [], False
    for case, candidates in work:
        for candidate in candidates:
            try:
                timelines.append(_record(candidate, case.problem, where, environment.run))
                _append(args.out, timelines[-1].first(BLOCKS, ROOM).to_json())
            except ArgumentError:
                raise
            except Exception as error:  # the others are still recorded
                sys.stderr.write(line(f"{candidate.name} {candidate.config}: {first_line(error)}"))
                failed = True
    return timelines, failed


def _record(candidate: Candidate, problem: Problem, where: torch.device, run: str) -> Timeline:
    from .launching import CutlassKernel

    kernel, config, arithmetic = candidate.kernel, candidate.config, candidate.arithmetic
    if candidate.error or candidate.missing:
        raise RuntimeError(candidate.error or f"needs {candidate.missing}")
    if not isinstance(kernel, CutlassKernel) or arithmetic is None:
        raise ArgumentError("kernels", f"{candidate.name} has no time stamps", "name kernels of cutlass.*")
    if reason := kernel.why_not(problem, config, arithmetic, where):
        raise RuntimeError(reason)
    return record(kernel, problem, config, arithmetic, where, run)


def record(
    kernel: CutlassKernel, problem: Problem, config: Any, arithmetic: Arithmetic, where: torch.device, run: str = ""
) -> Timeline:
    """One launch of this kernel's time-stamp build, on normal inputs. Needs an SM90 GPU, and nvcc or the build."""
    import torch

    from fused_swiglu.inputs import make_inputs, make_out
    from fused_swiglu.operands import Operands
    from fused_swiglu.telemetry import Sampler

    from .launching import STAMPS_OF_A_ROLE
    from .timeline import Stamps, Timeline, swish_hidden

    inputs = make_inputs(problem, "normal", 0, where)
    operands = Operands(inputs.x, inputs.weights, make_out(problem, kernel.output_shape(problem), device=where))
    kernel.timeline(problem, config, arithmetic, operands)  # builds
    with Sampler(where) as seen:
        found = kernel.timeline(problem, config, arithmetic, operands)
    stamps: Stamps = {}
    for block, role, cycles, event in found:
        stamps.setdefault(block, {}).setdefault(role, []).append((cycles, event))
    swish = getattr(config, "swish", "epilogue") if kernel.computes == "swiglu" else "none"
    room = STAMPS_OF_A_ROLE - 1
    return Timeline(
        kernel=kernel.name,
        config=str(config),
        arithmetic=str(arithmetic),
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype,
        ran_on=torch.cuda.get_device_name(where),
        swish=swish,
        room=room,
        stamps=stamps,
        hidden=swish_hidden(stamps, swish, room),
        sm_mhz=seen.mean_sm_mhz,
        run=run or None,
    )


def _append(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise ArgumentError("out", f"cannot write {path!r}: {error.strerror}", "give a file that can be") from None


def _show(timelines: list[Timeline]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fused_swiglu.tables import WIDE

    from .timeline import KINDS, lengths

    measured = [lengths([timeline]) for timeline in timelines]
    kinds = [kind for kind in KINDS if any(kind in found for found in measured)]
    table = Table("kernel", "config", "arithmetic", "m", "k", "n", box=None)
    for header in (*kinds, "Swish under tensor work"):
        table.add_column(header, justify="right")
    for t, found in zip(timelines, measured, strict=True):
        cells = [f"{median(found[kind]):.0f}" if kind in found else "" for kind in kinds]
        table.add_row(*map(Text, (t.kernel, t.config, t.arithmetic, *map(str, (t.m, t.k, t.n)), *cells, _hidden(t))))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def _hidden(timeline: Timeline) -> str:
    hidden = timeline.hidden
    if hidden is None or hidden.share is None:
        return "no stamps" if timeline.swish == "sliced" else ""
    with_store = ", with store" if timeline.swish == "epilogue" else ""
    return f"{hidden.share:.1%} of {hidden.cycles} cycles in {hidden.intervals}{with_store}"
