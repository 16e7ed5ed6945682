"""The plugin in a pytest of its own: rows of measured rates, and a failing problem saved and replayed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import properties
import pytest

from fused_swiglu import pytest_plugin
from fused_swiglu.cli import main
from fused_swiglu.results import load
from fused_swiglu.testing.subjects import Case

ROOT = Path(__file__).parent.parent
PROPERTIES = "tests/test_properties.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the project's configuration and tests."""
    made = tmp_path_factory.mktemp("project")
    (made / "tests").symlink_to(ROOT / "tests")
    (made / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return made


def run(folder: Path, *options: str) -> tuple[int, str]:
    """A pytest with a kernel that drops the tail of k."""
    paths = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "planted", *options]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


CHOSEN = "(w_up and model) or (near and (model or eager)) or (ones and planted)"


@pytest.fixture(scope="module")
def first(folder) -> tuple[int, str]:
    return run(folder, PROPERTIES, "-k", CHOSEN, "--mismatch-rows", "rows.jsonl")


def test_rows_of_measured_rates(folder, first, capsys):
    """M1 and M2 where the exact result was at hand; for every relation the share of outputs that contradict it."""
    rows, (environment,) = load(folder / "rows.jsonl")
    options = f"-p no:cacheprovider -p planted {PROPERTIES} -k '{CHOSEN}' --mismatch-rows rows.jsonl"
    assert environment.command == f"pytest {options}"
    assert {(row.relation, row.kernel, row.ran_on, row.status) for row in rows} == {
        ("w_up scaled", "model", "model", "ok"),
        ("near exact", "model", "model", "ok"),
        ("near exact", "torch.eager", "cpu", "ok"),
        ("all ones", "planted.tail", "cpu", "ok"),
        ("all ones", "planted.tail", "cpu", "failed"),
    }
    assert all(row.outputs == row.m * row.n and row.run == environment.run for row in rows)
    assert all(bool(row.contradicted) == (row.status == "failed") for row in rows)
    near = [row for row in rows if row.relation == "near exact"]
    assert all(row.m2 and row.m1_gt0 is not None and row.m0 is None for row in near)
    assert max(row.m1_gt0 for row in near if row.kernel == "torch.eager") > 0.1
    assert main(["table", str(folder / "rows.jsonl"), "--relations"]) == 0
    ones, *_ = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| all ones")]
    cells = ones.split(" | ")
    assert cells[1:4] == ["planted.tail", "sm90:ieee:out", "cpu"]
    assert int(cells[4]) == sum(row.relation == "all ones" for row in rows)
    assert 0 < float(cells[6].rstrip("%")) < 100


def test_a_failing_problem_is_saved_and_replayed_by_one_command(folder, first):
    code, out = first
    assert code == 1, out
    (command,) = set(re.findall(r"^python -m pytest (--replay .*)$", out, re.MULTILINE))
    saved = folder / command.split()[1]
    assert [*saved.parent.iterdir()] == [saved]
    before = saved.read_bytes()
    problem = json.loads(before)["problem"]
    assert (problem["relation"], problem["kernel"]) == ("all ones", "planted.tail")
    assert problem["problem"]["k"] % 64  # the fault is a dropped tail

    code, out = run(folder, *command.split())
    assert code == 1, out
    assert "1 failed" in out
    assert "contradict 'all ones', which sm90:ieee:out implies" in out
    assert saved.read_bytes() == before

    properties.check(Case.from_dict({**problem, "kernel": "model"}))  # which has no fault


@pytest.mark.parametrize("text", [None, "[]", '{"test": "x"}', "nonsense"])
def test_a_file_that_holds_no_problem(tmp_path, text):
    file = tmp_path / "file.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(pytest.UsageError, match=r"--replay: cannot read .*file\.json.*give a file of \.fused"):
        pytest_plugin._read(str(file))
