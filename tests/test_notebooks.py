"""Notebooks are committed as they were executed, and show of stored rows what the rows say. (Whether all their cells
still run, nbmake tests: `python -m pytest --nbmake notebooks`.)

To mend, once the cells are right, execute a notebook anew:

    jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/NAME.ipynb

Cells have tags: `stored` for those that depend on stored rows alone, `setup` for what these need beside them.
"""

import copy
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|opt|var|mnt|work|private|Users)/|\b[A-Z]:\\")
# A decimal, or a number with a unit, outside of code: what prose says of results would be stale one day.
MEASURED = re.compile(
    r"(?<![\w.^-])(?:\d+\.\d+|\d[\d,]*\s*(?:%|per cent|percent|x|times|[num]?s|us|seconds?|minutes?"
    r"|TFLOP/s|[KMGT]i?B(?:/s)?|W|watts?|[MG]Hz|ulps?|cycles))(?!\w)",
    re.IGNORECASE,
)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, 4)


def tagged(notebook: NotebookNode, *tags: str) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if set(tags) & set(cell.metadata.get("tags", ()))]


def texts(output: NotebookNode) -> list[str]:
    """What an output says, in each of its formats that are text."""
    if output.output_type == "stream":
        return [output.text]
    return [str(value) for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]


def said(cell: NotebookNode) -> list[str]:
    """What a cell's outputs say: markdown, or else plain text; of a figure its size."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    shown = [output.data for output in cell.outputs if output.output_type != "stream"]
    return ["".join(streams), *(data.get("text/markdown", data.get("text/plain")) for data in shown)]


def faults(notebook: NotebookNode) -> list[str]:
    """What is wrong with a notebook as it is committed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    prose = [re.sub(r"`[^`]*`", "", cell.source) for cell in notebook.cells if cell.cell_type == "markdown"]
    everything = [cell.source for cell in notebook.cells] + [text for output in outputs for text in texts(output)]
    found = []
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("not executed from top to bottom")
    if any(output.output_type == "error" for output in outputs):
        found.append("a cell failed")
    if any(output.get("name") == "stderr" for output in outputs):
        found.append("something on stderr")
    if not any("image/png" in output.get("data", {}) for output in outputs):
        found.append("no figure")
    if any("execution" in cell.metadata for cell in notebook.cells):
        found.append("times of execution")
    found += [f"absolute path: {match[0]}" for text in everything for match in ABSOLUTE.finditer(text)]
    found += [f"a number in prose: {match[0]}" for text in prose for match in MEASURED.finditer(text)]
    return found


def regenerated(notebook: NotebookNode, folder: Path) -> list[list[str]]:
    """What the stored cells say when they are run now, in that folder. Figures are made, but not drawn."""
    part = new_notebook(metadata=notebook.metadata, cells=copy.deepcopy(tagged(notebook, "setup", "stored")))
    for cell in part.cells:
        cell.source = cell.source.replace("%matplotlib inline\n", "")
    NotebookClient(part, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return [said(cell) for cell in tagged(part, "stored")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_was_executed(path):
    assert faults(read(path)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_of_stored_rows_is_what_they_say(path):
    notebook = read(path)
    committed = [said(cell) for cell in tagged(notebook, "stored")]
    assert committed, "no cell has the tag `stored`"
    assert regenerated(notebook, path.parent) == committed


# That these tests can fail --------------------------------------------------------------------------------------------


def figure() -> NotebookNode:
    return new_output("display_data", {"image/png": "aGVsbG8gL3RtcC8=", "text/plain": "<Figure size 900x350>"})


def plain(text: str) -> NotebookNode:
    return new_output("execute_result", {"text/plain": text}, execution_count=1)


PROSE = "# On an H200\n\nOf m=4096 rows and 2^-8 of k=896 in bf16, `took 3.2 us` and 4 kernels; 03_every_bit."
PLANTED = {
    "not executed from top to bottom": new_code_cell("1", execution_count=5),
    "a cell failed": new_code_cell("1/0", outputs=[new_output("error", ename="E", evalue="", traceback=[])]),
    "something on stderr": new_code_cell("warn()", outputs=[new_output("stream", name="stderr", text="careful")]),
    "times of execution": new_code_cell("1", metadata={"execution": {"iopub.execute_input": "2026"}}),
    "absolute path: /home/": new_code_cell("where", outputs=[plain("PosixPath('/home/me/rows.jsonl')")]),
    "absolute path: /tmp/": new_code_cell("load('/tmp/rows.jsonl')"),
    "a number in prose: 4.5": new_markdown_cell("It takes 4.5 of the time."),
    "a number in prose: 79%": new_markdown_cell("That is 79% of the peak."),
    "a number in prose: 2x": new_markdown_cell("So it is 2x faster."),
    "a number in prose: 12 us": new_markdown_cell("In 12 us, no less."),
    "a number in prose: 7 times": new_markdown_cell("It is 7 times slower."),
    "a number in prose: 3 ulps": new_markdown_cell("Off by 3 ulps"),
}


def sound() -> NotebookNode:
    return new_notebook(
        cells=[new_markdown_cell(PROSE), new_code_cell("plot()", execution_count=1, outputs=[figure()])]
    )


def test_a_sound_notebook_has_no_faults():
    assert faults(sound()) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault):
    notebook, cell = sound(), copy.deepcopy(PLANTED[fault])
    if cell.cell_type == "code" and cell.execution_count is None:
        cell.execution_count = 2
    notebook.cells.append(cell)
    assert faults(notebook) == [fault]


def test_a_notebook_without_a_figure_is_found():
    notebook = sound()
    notebook.cells[1].outputs = [plain("4")]
    assert faults(notebook) == ["no figure"]


def test_rows_that_changed_are_found(tmp_path):
    notebook = new_notebook(
        cells=[
            new_code_cell("%matplotlib inline\nfrom pathlib import Path", metadata={"tags": ["setup"]}),
            new_code_cell("raise RuntimeError('live')"),
            new_code_cell("print(Path('rows').read_text())\n1 + 1", metadata={"tags": ["stored"]}),
        ]
    )
    for text in ("before", "after"):
        (tmp_path / "rows").write_text(text)
        assert regenerated(notebook, tmp_path) == [[f"{text}\n", "2"]]
