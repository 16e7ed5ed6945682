"""A pytest plugin, `-p fused_swiglu.pytest_plugin`: measured rates as rows, failing problems saved and replayed.

    pytest --mismatch-rows FILE    appends to FILE the rows that tests hand to `record`
    pytest --replay FILE           runs again the one problem that a failing test had handed to `save`

A test module whose problems can be replayed has a test `test_replay` that takes the fixture `replayed`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .results import Environment, Row, RowFile

FOLDER = ".fused-swiglu-failures"
_saved: dict[str, Path] = {}  # by the id of the test that failed
_file: RowFile | None = None
_run: str | None = None
_replaying = False


def record(row: Row) -> None:
    """Appends the row, with the id of this run, to the file of --mismatch-rows, where that is given."""
    if _file:
        _file.write(replace(row, run=_run))


def save(problem: dict[str, Any]) -> None:
    """Keeps the problem, JSON values by name, that fails in the running test; the last one of each test stays.

    Hypothesis ends with the smallest that it found. A problem that is being replayed is not saved again.
    """
    if _replaying:
        return
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    name = re.sub(r"\W+", "-", test.rpartition("::")[2]).strip("-")
    path = Path(FOLDER) / f"{name}-{hashlib.sha256(test.encode()).hexdigest()[:8]}.json"
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps({"test": test.partition("::")[0] + "::test_replay", "problem": problem}, indent=1))
    aside.replace(path)
    _saved[test] = path


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fused-swiglu")
    group.addoption("--mismatch-rows", metavar="FILE", help="append measured mismatch rates to this JSONL file")
    group.addoption("--replay", metavar="FILE", help="run only the problem that a failing test saved in this file")


def pytest_configure(config: pytest.Config) -> None:
    global _file, _run, _replaying
    if path := config.getoption("--replay"):
        _replaying = True
        config.args[:] = [str(config.rootpath / _read(path)["test"])]
    if path := config.getoption("--mismatch-rows"):
        from .bench import default_device

        try:
            _file = RowFile(path)
            command = shlex.join(["pytest", *config.invocation_params.args])
            environment = Environment.collect(default_device(), command)
            _file.write(environment)
            _run = environment.run
        except ValueError as error:
            raise pytest.UsageError(f"--mismatch-rows: {error}") from None


def pytest_unconfigure() -> None:
    global _file
    if _file:
        _file.close()
    _file = None


@pytest.fixture
def replayed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The problem of --replay."""
    path = request.config.getoption("--replay")
    if not path:
        pytest.skip("nothing to replay: --replay FILE")
    return _read(path)["problem"]


def _read(path: str) -> dict[str, Any]:
    try:
        saved = json.loads(Path(path).read_text())
        return {"test": saved["test"], "problem": saved["problem"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise pytest.UsageError(f"--replay: cannot read {path!r}: {error!r}; give a file of {FOLDER}") from None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Under a failure whose problem was saved, the command that replays it."""
    report = (yield).get_result()
    if report.failed and item.nodeid in _saved:
        report.sections.append(("saved problem", f"python -m pytest --replay {_saved[item.nodeid]}"))
