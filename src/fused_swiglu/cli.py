"""The command line: finds a subcommand's module, and turns bad input into one line and exit code 2."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, NoReturn

from .errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from .bench import Progress

PROGRAM = "fused-swiglu"
# Each module has `add_arguments(parser)` and `run(args) -> exit code`; it is imported when its name is given.
COMMANDS = {
    "compare": (
        "fused_swiglu.compare_command",
        "run kernels side by side, check each against the exact result, time all together",
    ),
    "ablate": (
        "fused_swiglu.ablate_command",
        "what each choice in a kernel's design is worth: Pingpong overlap against EVT, tile, cluster, recipe and more",
    ),
    "tune": ("fused_swiglu.tune_command", "find the quickest kernel and config for problems, for `swiglu` to pick"),
    "check": ("fused_swiglu.check_command", "check kernels against the bits that they declare"),
    "explain": (
        "fused_swiglu.explain_command",
        "which step of its arithmetic flips which share of a kernel's outputs, and what none explains",
    ),
    "claims": ("fused_swiglu.claims_command", "read each claim of the paper again from measured rows"),
    "roofline": (
        "fused_swiglu.roofline_command",
        "rates against the measured ceilings, the turn from memory-bound to compute-bound, the fastest kernel where",
    ),
    "determinism": (
        "fused_swiglu.determinism_command",
        "what share of a row's bits changes with the rows around it or from run to run, and what keeping them costs",
    ),
    "table": ("fused_swiglu.table_command", "show stored rows"),
    "diff": ("fused_swiglu.diff_command", "show what changed between two runs: environment, times, statuses, M0"),
    "resources": (
        "fused_swiglu.resources_command",
        "show registers, shared memory, spills and instructions of compiled kernels",
    ),
    "model": (
        "fused_swiglu.model_command",
        "run a whole model patched and as it was: logits, text, prefill and decode times",
    ),
    "capture": ("fused_swiglu.capture", "save the hidden states that enter a model's MLPs when it reads a text"),
}
# Other packages add commands: an entry point `name = "module:SUMMARY"`, of a module like those above, and its summary.
GROUP = "fused_swiglu.commands"
EXITS = "exit code: 0; 1 if a kernel failed; 2 for bad input, before any work; 130 when interrupted, rows kept."


class _Parser(argparse.ArgumentParser):
    """Errors take one line."""

    def __init__(self, name: str) -> None:
        super().__init__(name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, line(message if ";" in message else f"{message}; see {self.prog} --help"))


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code. Bad input is one line on stderr and code 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        name = argv[0] if argv else ""
        if name in COMMANDS:
            module = importlib.import_module(COMMANDS[name][0])
        elif name in (added := _added()):
            module = importlib.import_module(added[name].module)
        else:
            return _no_command(argv)
        parser = _Parser(f"{PROGRAM} {name}")
        module.add_arguments(parser)
        return module.run(parser.parse_args(argv[1:], argparse.Namespace(command=shlex.join([PROGRAM, *argv]))))
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 2
    except ArgumentError as error:
        positional = error.argument.isupper()
        argument = error.argument if positional else f"--{error.argument.replace('_', '-')}"
        sys.stderr.write(line(f"argument {argument}: {error.wrong}; {error.remedy}"))
        return 2
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(line("; ".join(["interrupted", *map(str, interrupt.args)])))
        return 130
    except BrokenPipeError:
        # The reader of stdout has left; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _added() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in COMMANDS}


def _no_command(argv: list[str]) -> int:
    from . import __doc__ as purpose
    from . import __version__

    commands = {name: summary for name, (_, summary) in COMMANDS.items()}
    commands |= {name: point.load() for name, point in sorted(_added().items())}
    width = max(map(len, commands)) + 2
    listed = "\n".join(f"  {name:{width}}{summary}" for name, summary in commands.items())
    parser = _Parser(PROGRAM)
    parser.description = (purpose or "").splitlines()[0]
    parser.epilog = f"commands:\n{listed}\n\nexample:\n  {PROGRAM} compare --model qwen2.5-0.5b --tokens 1 16"
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("command", type=one_of(commands), help=f"one of: {', '.join(commands)}")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see COMMAND --help")
    parser.parse_args(argv)
    parser.error("argument command: comes first; move the other options behind it")


def line(message: str) -> str:
    return f"{PROGRAM}: {' '.join(message.split())}\n"


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """An argument type: one of these names."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown {text!r}; choose from {', '.join(names)}")
        return text

    return read


def integers(at_least: int) -> Callable[[str], list[int]]:
    """An argument type: integers joined by commas."""

    def read(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"cannot read {text!r}; give integers, such as 1,16,128") from None
        if min(values) < at_least:
            raise argparse.ArgumentTypeError(f"{min(values)} is too small; give {at_least} or more")
        return values

    return read


def device(name: str) -> torch.device:
    import torch

    from .bench import default_device

    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", "torch finds no GPU", "use cpu, or install a torch with CUDA and its driver")
    return default_device() if name == "auto" else torch.device(name)


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
