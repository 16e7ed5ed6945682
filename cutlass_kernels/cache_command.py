"""The `cache` subcommand: lists and prunes the builds."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from fused_swiglu.cli import PROGRAM, integers
from fused_swiglu.errors import ArgumentError

SUMMARY = "list the compiled CUTLASS kernels, and delete those that are of no use any more"
DAY_S = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cache`."""
    parser.description = (
        "Lists the builds of CUTLASS kernels. --prune deletes what the present sources cannot use, what is broken,\n"
        "and what killed or failed builds left."
    )
    parser.epilog = f"example:\n  {PROGRAM} cache --prune --older-than 30"
    parser.add_argument("--prune", action="store_true", help="delete what is of no use, instead of listing")
    parser.add_argument("--older-than", type=integers(0), metavar="DAYS", help="prune also builds of that age")
    parser.add_argument("--cache", metavar="DIR", help="default FUSED_SWIGLU_CACHE, or ~/.cache/fused-swiglu")


def run(args: argparse.Namespace) -> int:
    """Prints a line a build, or a line each that was deleted."""
    from . import cache

    where = cache.root(args.cache)
    if args.older_than and not args.prune:
        raise ArgumentError("older_than", "goes with --prune", "add --prune")
    if args.prune:
        try:
            gone = cache.prune(where, args.older_than[0] * DAY_S if args.older_than else None)
        except OSError as error:
            raise cache.unwritable(where, error) from error
        for path, why in gone:
            print(f"{why}: {path}")
        print(f"{len(gone)} deleted, {len(cache.entries(where))} builds left in {where}")
        return 0
    _show(where)
    return 0


def _show(where: Path) -> None:
    import time

    from rich.console import Console
    from rich.table import Table

    from . import cache
    from .builds import catalogue
    from .unit import Unit

    names: dict[Unit, list[tuple[str, str]]] = {}
    with suppress(ArgumentError):  # where no such kernel is registered, builds are named by their sources
        for name, unit in catalogue().items():
            names.setdefault(unit, []).append(name)
    table = Table("kernel", "config", "KB", "nvcc", "CUTLASS", "days", "state", box=None)
    builds = cache.entries(where)
    for build in builds:
        unit = build.unit
        # One build may serve several configs, those that differ in what is decided at a launch.
        (kernel, config), *more = (
            names.get(unit) or [(unit.path.stem, str(unit))] if unit else [(build.folder.name, "")]
        )
        config += f" (+{len(more)})" if more else ""
        tools = build.record.get("tools", {})
        size = build.record.get("size", 0) // 1024
        age = f"{(time.time() - build.built) / DAY_S:.1f}"
        table.add_row(kernel, config, str(size), tools.get("nvcc", ""), tools.get("cutlass", ""), age, build.state)
    Console(soft_wrap=True).print(table)
    print(f"{len(builds)} builds in {where}")
