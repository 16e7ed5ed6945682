"""Hidden states of a real text: what enters each chosen layer's MLP, captured through transformers on the CPU."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .checkpoints import (
    HIDDEN_KEY,
    SMOLLM2,
    check_layer,
    check_output,
    load_projections,
    resolve_weights,
    save_projections,
    write_safetensors,
)
from .errors import ArgumentError

# What a bf16 model computes between the layers: the captured states are then exact, not rounded afterwards.
DTYPE = torch.bfloat16
EXAMPLE = """example:
  fused-swiglu capture --weights smollm2-135m --layer 15 --text notebooks/data/paragraph.txt --out hidden.safetensors
  fused-swiglu compare --weights smollm2-135m --layer 15 --hidden hidden.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fused-swiglu capture`."""
    parser.description = __doc__
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--weights", required=True, help=f"a model's .gguf file or Hugging Face directory, or {SMOLLM2}"
    )
    parser.add_argument("--layer", required=True, nargs="+", metavar="L", help="layers to capture, such as 0 15 29")
    parser.add_argument("--text", required=True, help="UTF-8 text that the model reads once")
    parser.add_argument("--out", required=True, help="safetensors file for the hidden states, one per layer, in bf16")
    parser.add_argument(
        "--save-projections", help="safetensors file for those layers' gate and up projections, in bf16"
    )


def run(args: argparse.Namespace) -> int:
    """Capture, save and print one line per layer. Raises ArgumentError, naming the option, for bad input."""
    layers = _parse_layers(args.layer)
    text = read_text(args.text)
    check_output(args.out, "out")
    if args.save_projections:
        check_output(args.save_projections, "save-projections")
    path = resolve_weights(args.weights)

    model, tokenizer = load_model(path)
    input_ids = tokenizer(text, return_tensors="pt")["input_ids"]
    tokens, longest = input_ids.shape[1], getattr(model.config, "max_position_embeddings", None)
    if tokens == 0:
        raise ArgumentError("text", "the model's tokenizer makes no tokens of it", "check the model's tokenizer files")
    if longest is not None and tokens > longest:
        raise ArgumentError("text", f"{tokens} tokens, the model reads at most {longest}", "shorten it")
    hidden = capture(model, input_ids, layers)

    described = {
        "model": path.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": str(tokens),
        "dtype": str(DTYPE).removeprefix("torch."),
    }
    write_safetensors(
        args.out, {HIDDEN_KEY.format(layer=layer): x for layer, x in hidden.items()}, described, argument="out"
    )
    if args.save_projections:
        save_projections(args.save_projections, {layer: load_projections(path, layer, DTYPE) for layer in layers})
    for layer, x in hidden.items():
        x = x.float()
        print(
            f"layer {layer}: {x.shape[0]} tokens x {x.shape[1]}, RMS {x.square().mean().sqrt():.4g}, "
            f"max |x| {x.abs().max():.4g}"
        )
    return 0


def capture(model: Any, input_ids: torch.Tensor, layers: Iterable[int]) -> dict[int, torch.Tensor]:
    """What enters each layer's MLP when `model` reads input_ids[batch, tokens]: [batch * tokens, k], in its dtype.

    model: a transformers decoder in eval mode, whose MLPs are modules `layers.{L}.mlp`.
    Raises ArgumentError naming `layer` for a layer that the model has not, `weights` for a model without such modules.
    """
    found = {
        int(match[1]): module
        for name, module in model.named_modules()
        if (match := re.fullmatch(r"(?:.+\.)?layers\.(\d+)\.mlp", name))
    }
    if not found:
        raise ArgumentError("weights", f"{type(model).__name__} has no layers.N.mlp", "give a dense SwiGLU model")
    layers = list(layers)
    for layer in layers:
        check_layer(layer, found, type(model).__name__, "layer")
    hidden: dict[int, torch.Tensor] = {}

    def keep(layer: int, x: torch.Tensor) -> None:
        hidden[layer] = x.detach().flatten(0, -2).clone()

    hooks = [
        found[layer].register_forward_pre_hook(lambda _, inputs, layer=layer: keep(layer, inputs[0]))
        for layer in layers
    ]
    try:
        with torch.no_grad():
            model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return hidden


def load_model(path: str | Path, *, head: bool = False) -> tuple[Any, Any]:
    """The model, by default without its head, in bf16 on the CPU, and its tokenizer; nothing is fetched.

    path: a .gguf file, or a directory as transformers saves one. Raises ArgumentError naming `weights` where
    transformers cannot load the model, or is not installed (or accelerate, through which it loads GGUF).
    """
    path = Path(path)
    if not os.path.exists(path):
        raise ArgumentError("weights", f"{path} does not exist", "give a .gguf file or a model's directory")
    if os.path.isfile(path) and path.suffix != ".gguf":
        raise ArgumentError(
            "weights", f"{path} lacks the configuration and tokenizer", "give the model's directory, or a .gguf file"
        )
    gguf = os.path.isfile(path)
    for package in ("transformers", "accelerate") if gguf else ("transformers",):
        if find_spec(package) is None:
            raise ArgumentError(
                "weights",
                f"reading a model needs {package}, which is not installed",
                f"pip install '.[notebooks]' {package}",
            )
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory, options, more = path, {"local_files_only": True}, {}
    if gguf:
        directory, options = path.parent, options | {"gguf_file": path.name}
        if hasattr(transformers, "GgufConfig"):  # else it may fetch a kernel that computes on packed blocks
            more = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
        loader = transformers.AutoModelForCausalLM if head else transformers.AutoModel
        model = loader.from_pretrained(directory, dtype=DTYPE, **options, **more)
    except Exception as error:  # a foreign loader: whatever it raises is about these files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentError(
            "weights", f"transformers cannot load {path}: {reason}", "give a model that it can"
        ) from error
    return model.eval(), tokenizer


def _parse_layers(texts: list[str]) -> list[int]:
    try:
        return sorted({int(number) for text in texts for number in text.split(",")})
    except ValueError as error:
        raise ArgumentError("layer", f"cannot read {' '.join(texts)!r}", "give numbers such as 0 15 29") from error


def read_text(path: str) -> str:
    """A file's text. Raises ArgumentError, naming `text`, for one that cannot be read or is empty."""
    try:
        text = Path(path).read_bytes().decode()  # bytes: the text's hash is then the file's
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ArgumentError("text", f"cannot read {path} ({reason})", "give a UTF-8 text file") from error
    if not text.strip():
        raise ArgumentError("text", f"{path} is empty", "give at least a sentence")
    return text
