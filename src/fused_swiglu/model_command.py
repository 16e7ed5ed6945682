"""The `model` subcommand: a whole model, patched and as it was: the text it makes, and its time."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .cli import PROGRAM, device, integers, one_of
from .errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from .model_run import ModelRow, Text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `model`."""
    from .model_run import SHAPES

    parser.description = (
        "Runs a transformers model as it is and with its MLPs patched, all on the same weights. With --text: the\n"
        "difference of the logits, the perplexity, a greedy continuation, and whether it depends on what else is in a\n"
        "batch. With --prefill or --decode: times, all variants interleaved, and the share of the MLPs. Decoding is a\n"
        "CUDA graph of one step with a static cache."
    )
    parser.epilog = (
        f"examples:\n  {PROGRAM} model --weights smollm2-135m --text notebooks/data/paragraph.txt --new 64\n"
        f"  {PROGRAM} model --like qwen2.5-7b --layers 8 --prefill 2048 --decode 1 16 --compile --out rows.jsonl\n\n"
        "exit code: 0; 1 if a variant failed; 2 for bad input."
    )
    parser.add_argument("--weights", help="a model's .gguf file or Hugging Face directory, or smollm2-135m")
    parser.add_argument("--like", type=one_of(SHAPES), metavar="NAME", help=f"random weights: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=integers(1), metavar="N", help="of --like; default the model's own")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text that all variants read")
    parser.add_argument("--new", type=integers(0), default=[64], metavar="N", help="tokens to continue it; default 64")
    parser.add_argument("--prefill", type=integers(1), nargs="+", metavar="T", help="time prompts of T tokens")
    parser.add_argument("--decode", type=integers(1), nargs="+", metavar="B", help="time a token of each of B rows")
    parser.add_argument("--context", type=integers(1), default=[512], metavar="T", help="of --decode; default 512")
    parser.add_argument(
        "--down", nargs="+", default=["torch"], type=one_of(("torch", "fixed")), metavar="NAME",
        help="how patched models compute down_proj: torch, fixed or both",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="also time each variant under torch.compile")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is one"
    )
    parser.add_argument("--out", metavar="FILE", help="append rows to this JSONL file as they are made")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each row. Raises ArgumentError, naming the option, before any work."""
    from .results import Environment, RowFile

    _check(args)
    where = device(args.device)
    name, model, text = _load(args, where)
    failed = False
    with ExitStack() as stack:
        file = stack.enter_context(RowFile(args.out)) if args.out is not None else None
        environment = Environment.collect(where, args.command)
        if file:
            file.write(environment)
        for row in rows(args, name, model, text, where, environment.run):
            failed |= row.status == "failed"
            print(describe(row), flush=True)
            if file:
                file.write(row)  # type: ignore[arg-type]
    return int(failed)


def rows(
    args: argparse.Namespace, name: str, model: Any, text: Text | None, where: torch.device, run_id: str
) -> Iterator[ModelRow]:
    """What the options ask for: text first, then each phase."""
    import torch

    from .model_run import ModelRow, Phase, say, time_phase, variants_of

    config = model.config
    same = {
        "model": name, "run": run_id, "layers": config.num_hidden_layers, "k": config.hidden_size,
        "n": config.intermediate_size,
        "ran_on": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
    }  # fmt: skip
    downs = tuple(args.down)
    if text is not None:
        for variant, found in say(variants_of(model, downs), text, args.new[0]):
            yield ModelRow(variant=variant, phase="text", status="ok", **same, **found)
    phases = [Phase("prefill", 1, tokens) for tokens in _flat(args.prefill)]
    phases += [Phase("decode", batch, context=args.context[0]) for batch in _flat(args.decode)]
    variants = variants_of(model, downs, args.compile) if phases else {}
    for phase in phases:
        for variant, found in time_phase(variants, phase):
            yield ModelRow(**{"variant": variant, "phase": phase.name, "status": "ok"} | same | found)  # type: ignore[arg-type]


def describe(row: ModelRow) -> str:
    """A row in one line; a continuation in one more."""
    from .tables import duration, percent

    head = f"{row.model} {row.phase:7} {row.variant:24}"
    if row.status != "ok":
        return f"{head} {row.status}: {row.reason}"
    if row.phase == "text":
        parts = [
            f"perplexity {row.perplexity:.4f}",
            f"logits off by RMS {row.logits_rms:.2%}, at most {row.logits_max:.3g}",
        ]
        parts += [] if row.fp32_rms is None else [f"{row.fp32_rms:.2%} from fp32"]
        parts += [f"likeliest token as the original's {percent(row.top1)}"]
        parts += [f"greedy {row.greedy_equal} of {row.greedy_tokens} tokens as the original"]
        parts += [] if row.batch_equal is None else [f"{percent(row.batch_equal)} of prompts the same in a batch"]
        return f"{head} {', '.join(parts)}" + (f"\n  {row.greedy!r}" if row.greedy else "")
    what = f"{row.batch} x {row.tokens} tokens" + (f" after {row.context}" if row.context else "")
    parts = [duration(row.time_us or 0), f"{row.tokens_per_s:.0f} tokens/s"]
    if row.ratio:
        middle, low, high = row.ratio
        parts += [f"{middle:.3f} [{low:.3f}, {high:.3f}] of the original"]
    if row.mlp_us is not None:
        parts += [f"MLPs {duration(row.mlp_us)} ({percent(row.mlp_share)})"]
    return f"{head} {what}: {', '.join(parts)}"


def _check(args: argparse.Namespace) -> None:
    if (args.weights is None) == (args.like is None):
        both = "given with --like" if args.weights else "missing, and so is --like"
        raise ArgumentError("weights", both, "give one of them")
    for name, needed in (("layers", "like"), ("text", "weights")):
        if getattr(args, name) and getattr(args, needed) is None:
            raise ArgumentError(name, f"given without --{needed}", f"leave it out, or add --{needed}")
    if not (args.text or args.prefill or args.decode):
        raise ArgumentError("text", "missing, and so are --prefill and --decode", "say what to do")
    for name in ("weights", "text", "out"):
        if getattr(args, name) == "":
            raise ArgumentError(name, "is empty", "give it a value, or leave it out")


def _load(args: argparse.Namespace, where: torch.device) -> tuple[str, Any, Text | None]:
    from importlib.util import find_spec

    from .capture import load_model, read_text
    from .checkpoints import resolve_weights
    from .model_run import Text, random_model

    if find_spec("transformers") is None:
        name = "weights" if args.weights else "like"
        raise ArgumentError(name, "needs transformers, which is not installed", "pip install '.[notebooks]'")
    if args.like:
        return args.like, random_model(args.like, args.layers[0] if args.layers else None, where), None
    words = read_text(args.text) if args.text else None
    path = resolve_weights(args.weights)
    model, tokenizer = load_model(path, head=True)
    model = model.to(where)
    if words is None:
        return path.stem, model, None
    ids = tokenizer(words, return_tensors="pt")["input_ids"].to(where)
    if ids.shape[1] < 2:
        raise ArgumentError("text", f"{ids.shape[1]} tokens", "give at least a sentence")
    return path.stem, model, Text(ids, tokenizer.decode)


def _flat(lists: Iterable[list[int]] | None) -> list[int]:
    return [number for numbers in lists or () for number in numbers]
