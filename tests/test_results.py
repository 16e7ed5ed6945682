"""Rows, their file and their environment: nothing is lost, guessed or told about the machine."""

from __future__ import annotations

import json
import socket
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_swiglu import ArgumentError
from fused_swiglu.results import SCHEMA, STATUSES, Environment, Row, RowFile, load, to_frame

number = st.floats(0, allow_nan=False, allow_infinity=False)
share = st.floats(0, 1)
text = st.text(max_size=20)


def optional(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


def rows() -> st.SearchStrategy[Row]:
    """Any row: required fields, and any subset of the others."""
    special = {
        "ratios": st.dictionaries(text, st.tuples(number, number, number), max_size=3),
        "m2": st.lists(st.tuples(number, number, share), max_size=3).map(tuple),
        "rounds": st.lists(number, max_size=3).map(tuple),
        "throttled": st.booleans() | text,
        "schema": st.just(SCHEMA),
        "status": st.sampled_from(STATUSES),
    }
    by_type = {
        "str": text,
        "str | None": optional(text),
        "int": st.integers(0, 2**40),
        "int | None": optional(st.integers(0, 2**40)),
        "bool | None": optional(st.booleans()),
        "float | None": optional(number),
    }
    required = ("schema", "status")
    strategies = {
        f.name: by_type[str(f.type)]
        if f.name not in special
        else special[f.name]
        if f.name in required
        else optional(special[f.name])
        for f in fields(Row)
    }
    return st.builds(Row, **strategies)


def a_row(**more: object) -> Row:
    return Row(**{"kernel": "a", "config": "default", "arithmetic": "x", "m": 1, "n": 2, "k": 3, "status": "ok"} | more)


@given(rows())
def test_json_reads_back_what_was_written(row: Row) -> None:
    line = row.to_json()
    assert "\n" not in line
    assert Row.from_json(line) == row


@given(rows())
def test_json_has_no_field_that_is_not_known(row: Row) -> None:
    written = json.loads(row.to_json())
    assert None not in written.values()
    assert set(written) == {f.name for f in fields(Row) if getattr(row, f.name) is not None}


def test_a_row_has_a_known_status_and_schema() -> None:
    with pytest.raises(ArgumentError, match="status"):
        a_row(status="fine")
    with pytest.raises(ArgumentError, match="schema"):
        a_row(schema=SCHEMA + 1)


@pytest.mark.parametrize("line", ["[1]", "3", "{}", '{"kernel": "a"}', "{"])
def test_what_is_no_row_raises_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Row.from_json(line)


def test_a_time_on_a_cpu_is_no_result() -> None:
    assert a_row(ran_on="NVIDIA H200").is_result
    assert not any(a_row(ran_on=where).is_result for where in (None, "cpu", "interpreter", "model"))


def test_a_file_appends_and_loads_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written = [a_row(m=m, ratios={"b": (1.0, 0.5, 2.0)}, m2=((0.01, 1e-5, 0.25),)) for m in range(4)]
    environment = Environment(gpu="a GPU")
    with RowFile(path) as file:
        file.write(environment)
        for row in written[:2]:
            file.write(row)
    with RowFile(path) as file:
        for row in written[2:]:
            file.write(row)
    assert load(path) == (written, [environment])
    assert load(path, path) == (written * 2, [environment] * 2)


def test_each_row_is_in_the_file_once_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = RowFile(path)
    for m in range(3):
        file.write(a_row(m=m))
        assert [row.m for row in load(path)[0]] == list(range(m + 1))
    file.close()


@given(cut=st.integers(1, 60))
def test_a_torn_last_line_costs_that_line_only(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "rows.jsonl"
    first, lost, last = (a_row(m=m) for m in range(3))
    whole = first.to_json() + "\n" + lost.to_json()
    path.write_text(whole[:-cut])
    with RowFile(path) as file:
        file.write(last)
    with pytest.warns(UserWarning, match="rows.jsonl:2 skipped"):
        assert load(path)[0] == [first, last]


def test_records_of_another_kind_are_passed_over_and_broken_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(a_row().to_json() + '\n{"timeline": {"kernel": "x"}}\n')
    assert [row.m for row in load(path)[0]] == [1]
    path.write_text(a_row().to_json() + '\n{"kernel": "x"}\n')
    with pytest.warns(UserWarning, match=r"rows.jsonl:2 skipped"):
        load(path)


def test_a_line_without_its_newline_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(a_row().to_json())
    with RowFile(path) as file:
        file.write(a_row(m=2))
    assert [row.m for row in load(path)[0]] == [1, 2]


def test_a_file_that_cannot_be_written_says_so_at_once(tmp_path: Path) -> None:
    other = tmp_path / "README.md"
    other.write_text("# mine\n")
    for path in (tmp_path, tmp_path / "missing" / "rows.jsonl", other):
        with pytest.raises(ArgumentError) as caught:
            RowFile(path)
        assert caught.value.argument == "out"
    assert other.read_text() == "# mine\n"


def test_a_full_disk_says_so() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    file = RowFile("/dev/full")
    with pytest.raises(ArgumentError, match="No space left"):
        file.write(a_row())


def test_load_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read"):
        load(tmp_path / "rows.jsonl")


def test_a_frame_has_a_line_for_each_row_and_a_column_for_each_number() -> None:
    frame = to_frame([a_row(time_us=2.0, ratios={"b": (1.0, 0.5, 2.0)}), a_row(m2=((0.01, 1e-5, 0.25),))])
    assert frame["kernel"].tolist() == ["a", "a"]
    assert frame["time_us"].isna().tolist() == [False, True]
    assert frame.loc[0, ["ratio b", "ratio b low", "ratio b high"]].tolist() == [1.0, 0.5, 2.0]
    assert frame.loc[1, "m2 rtol=0.01 atol=1e-05"] == 0.25
    assert list(to_frame([]).columns)[:2] == ["kernel", "config"]


def test_the_environment_describes_the_run_and_not_whose_machine_it_is() -> None:
    environment = Environment.collect(torch.device("cpu"))
    written = environment.to_json()
    described = json.loads(written)["environment"]
    assert described["torch"] == torch.__version__
    assert {"run", "date", "python", "numpy", "cpu", "cutlass", "version", "command"} <= set(described)
    assert not {"gpu", "driver", "peak_tflops", "peak_gbs"} & set(described)
    assert len(socket.gethostname()) < 4 or socket.gethostname() not in written
    assert not any(isinstance(value, str) and value.startswith("/") for value in described.values())
    assert str(Path.home()) not in written
    assert str(Path.cwd()) not in written
    assert Environment.collect(torch.device("cpu")).run != environment.run
