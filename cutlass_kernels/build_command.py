"""The `build` subcommand: compiles kernels ahead of their use."""

from __future__ import annotations

import argparse
import sys

from fused_swiglu.cli import PROGRAM, integers, line, progress_bar
from fused_swiglu.errors import ArgumentError

SUMMARY = "compile CUTLASS kernels ahead, into a folder that can be copied to a machine without nvcc"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `build`."""
    parser.description = (
        "Compiles CUTLASS kernels for sm_90a. The folder serves a machine that has neither nvcc nor CUTLASS:\n"
        "copy it, and name it there in FUSED_SWIGLU_CACHE."
    )
    parser.epilog = (
        f"example:\n  {PROGRAM} build --kernels cutlass.pingpong --config 'bm=64,bn=192,*ieee*' --cache prepared\n\n"
        "exit code: 0; 1 if a unit does not compile; 2 for bad input, or where nothing can be compiled."
    )
    parser.add_argument("--kernels", nargs="+", default=["cutlass.*"], metavar="GLOB", help="default cutlass.*")
    parser.add_argument("--config", nargs="+", default=["*"], metavar="GLOB", help="configs as rows print them")
    parser.add_argument(
        "--jobs", type=integers(1), metavar="N", help="nvcc at a time; default what cores, memory allow"
    )
    parser.add_argument("--cache", metavar="DIR", help="default FUSED_SWIGLU_CACHE, or ~/.cache/fused-swiglu")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Builds, and says how many. The first errors of each failure go to stderr."""
    from fnmatch import fnmatchcase

    from . import cache, toolchain
    from .builds import catalogue
    from .compiler import find_tools

    known = catalogue(args.kernels)
    if not known:
        raise ArgumentError("kernels", f"not compiled by nvcc: {' '.join(args.kernels)}", "choose from cutlass.*")
    chosen = {names: unit for names, unit in known.items() if any(fnmatchcase(names[1], glob) for glob in args.config)}
    if not chosen:
        some = ", ".join(sorted({config for _, config in known})[:3])
        raise ArgumentError("config", f"nothing matches {' '.join(args.config)}", f"configs are, say, {some}")
    tools = find_tools()
    where = cache.root(args.cache)
    before = {unit for unit in chosen.values() if toolchain.find(unit, where)}
    failures: list[toolchain.BuildError] = []
    with progress_bar(args.quiet) as progress:
        try:
            toolchain.build(chosen.values(), args.jobs and args.jobs[0], progress, where)
        except* toolchain.BuildError as group:
            failures = [error for error in group.exceptions if isinstance(error, toolchain.BuildError)]
    for error in failures:
        kernel, config = next(names for names, unit in chosen.items() if unit == error.unit)
        sys.stderr.write(line(f"{kernel} {config}: {' | '.join(error.errors)}; see {error.log}"))
    units = set(chosen.values())
    print(
        f"{len(units) - len(before) - len(failures)} built by nvcc {tools.nvcc_version} with CUTLASS "
        f"{tools.cutlass_version}, {len(before)} were there, {len(failures)} failed, in {where}"
    )
    return int(bool(failures))
