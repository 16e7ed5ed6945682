"""A second process of the command line, whose rows are read as it writes them: for settings that a library reads when
it is first used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .results import Environment, Row, load

_POLL_S, _PATIENCE_S = 0.2, 20.0


def records(arguments: Sequence[str], settings: dict[str, str]) -> Iterator[Environment | Row]:
    """What `python -m fused_swiglu ARGUMENTS --out FILE --quiet` writes, with these environment variables, in order and
    as it comes.

    KeyboardInterrupt ends the process too; what it wrote until then comes first. Raises RuntimeError, after all that
    was written, where the process ends with an exit code other than 0, with the last line that it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows, said = Path(folder, "rows.jsonl"), Path(folder, "said")
        rows.touch()
        command = [sys.executable, "-m", "fused_swiglu", *arguments, "--out", str(rows), "--quiet"]
        with said.open("wb") as errors:
            child = subprocess.Popen(
                command,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                process_group=0,  # a terminal's interrupt reaches it through this process alone, once
            )
            seen = 0
            try:
                while True:
                    ended = child.poll() is not None
                    new = _records(rows)[seen:]
                    seen += len(new)
                    yield from new
                    if ended:
                        break
                    time.sleep(_POLL_S)
            except KeyboardInterrupt:
                _end(child)
                yield from _records(rows)[seen:]
                raise
            finally:
                _end(child)
        if child.returncode:
            last = said.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
            raise RuntimeError(*last)


def _records(path: Path) -> list[Environment | Row]:
    rows, environments = load(path)
    return [*environments, *rows]


def _end(child: subprocess.Popen) -> None:
    """As an interrupt does, so that it writes what it has; by force where that takes too long."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
