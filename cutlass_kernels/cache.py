"""The folder of finished builds: where it is, what is in it, what of it can be used.

A build is a folder `<source>-<key of the unit>-<key of the tools>` with

    kernel.so    the shared library
    unit.json    the unit, the tools' versions, the command, seconds, and the library's size and hash
    log          what nvcc said: registers and spills

and it appears there at once, by a rename: what is seen is whole. A build that was killed leaves a folder whose name
starts with a dot, which a later one clears away. The unit's key needs no compiler, so that a copy of the folder
serves a machine without one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_swiglu.errors import ArgumentError

from .unit import Unit, digest

VARIABLE = "FUSED_SWIGLU_CACHE"
LIBRARY = "kernel.so"
RECORD = "unit.json"
LOG = "log"
UNFINISHED = ".building-"
FAILED = ".failed.log"
STALE_S = 3600  # no unit takes as long


def root(folder: str | Path | None = None) -> Path:
    """The cache: `folder`, or FUSED_SWIGLU_CACHE, or fused-swiglu in the user's cache folder. It need not exist."""
    named = folder or os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "fused-swiglu").absolute()


def writable(folder: Path) -> bool:
    """Whether a build can be added."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def unwritable(folder: Path, error: OSError | None = None) -> ArgumentError:
    why = error.strerror if error else "not a folder, or one that is read-only"
    return ArgumentError(VARIABLE, f"cannot write in {folder}: {why}", "set it to a folder that can be written")


@dataclass(frozen=True, slots=True)
class Entry:
    """A build. `record` is what unit.json says, empty where that cannot be read."""

    folder: Path
    record: dict[str, Any]

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY

    @property
    def built(self) -> float:
        """When, in seconds since 1970."""
        return self.record.get("built", 0.0)

    @property
    def intact(self) -> bool:
        """Whether the library is what was built: not cut short, say, by a copy that was broken off."""
        try:
            return digest(self.library) == self.record.get("sha256")
        except OSError:
            return False

    @property
    def unit(self) -> Unit | None:
        """What it was built from; None if the source is gone."""
        told = self.record
        try:
            defines = tuple((name, value) for name, value in told["defines"])
            return Unit(told["source"], defines, tuple(told["flags"]), told["ctypes"])
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def state(self) -> str:
        """`ok`, `broken`, or `outdated`: the sources are others now."""
        if not self.intact:
            return "broken"
        return "ok" if self.unit and self.folder.name.startswith(f"{self.unit.name}-") else "outdated"


def entry(folder: Path) -> Entry:
    """The build in a folder."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    return Entry(folder, record if isinstance(record, dict) else {})


def entries(folder: Path, name: str = "*") -> list[Entry]:
    """The builds whose folders match a glob, the newest first."""
    found = (entry(path) for path in folder.glob(name) if path.is_dir() and not path.name.startswith("."))
    return sorted((build for build in found if (build.folder / RECORD).is_file()), key=lambda b: b.built, reverse=True)


def newest(folder: Path, name: str) -> Path | None:
    """The library of the newest build that is intact."""
    return next((build.library for build in entries(folder, name) if build.intact), None)


def leftovers(folder: Path) -> Iterator[Path]:
    """What killed builds left."""
    for path in folder.glob(f"{UNFINISHED}*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_S:
                yield path
        except FileNotFoundError:  # somebody else cleared it away
            continue


def prune(folder: Path, older_than_s: float | None = None) -> list[tuple[Path, str]]:
    """Deletes leftovers, logs of failures, builds that are broken or outdated, and those older than asked: each with
    the reason. Raises OSError for what cannot be deleted."""
    gone = [(path, "unfinished") for path in leftovers(folder)]
    gone += [(path, "failed") for path in folder.glob(f"*{FAILED}")]
    for build in entries(folder):
        old = older_than_s is not None and time.time() - build.built > older_than_s
        state = "old" if old else build.state
        if state != "ok":
            gone.append((build.folder, state))
    for path, _ in gone:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return gone
