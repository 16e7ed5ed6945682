"""The README's tables are what its commands make of the stored rows."""

import re
import shlex
from pathlib import Path

import pytest

from fused_swiglu import registry
from fused_swiglu.cli import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TABLE = re.compile(r"<!-- fused-swiglu ((?:table|ablate) .*?) -->\n(.*?)<!-- end -->", re.DOTALL)


def regenerate(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    def made(match: re.Match[str]) -> str:
        assert main(shlex.split(match[1])) == 0
        return f"<!-- fused-swiglu {match[1]} -->\n{capsys.readouterr().out}<!-- end -->"

    return TABLE.sub(made, text)


def test_every_table_in_the_readme_comes_from_its_rows(monkeypatch, capsys):
    """To mend: run the commands in the comments, and put their output below them."""
    monkeypatch.chdir(ROOT)
    text = README.read_text()
    assert len(TABLE.findall(text)) == text.count("<!-- fused-swiglu") >= 2
    assert regenerate(text, capsys) == text


@pytest.mark.filterwarnings("ignore:swiglu runs by torch")
@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_the_examples_run(example, capsys):
    names = registry.kernel_names()
    try:
        exec(compile(example, "README.md", "exec"), {})
    finally:
        registry._registered.clear()
    assert registry.kernel_names() == names
    out = capsys.readouterr().out
    assert "ok" in out or "compare(" not in example
    assert "failed" not in out


def test_the_readme_has_two_setup_commands():
    commands = re.findall(r"^python3 -m venv .*$", README.read_text(), re.MULTILINE)
    assert ["pytest" in command for command in commands] == [False, True]
    assert "fused-swiglu compare" in commands[0]
