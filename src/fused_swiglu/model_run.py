"""A whole model with its MLPs patched, against the model as it was: what it says, and how fast it is.

Needs transformers 5. All variants of a model share its weights; what is timed is timed together (`timing`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import timing
from .errors import ArgumentError
from .kernel import Bound
from .nn import DOWN
from .patching import FusedMLP, Report, patch
from .problem import MODELS
from .results import SCHEMA, STATUSES, _Record

# layers, heads, key and value heads, vocabulary: of each model's published configuration, beside `MODELS`.
SHAPES = {
    "qwen2.5-0.5b": (24, 14, 2, 151936),
    "qwen2.5-1.5b": (28, 12, 2, 151936),
    "qwen2.5-3b": (36, 16, 2, 151936),
    "qwen2.5-7b": (28, 28, 4, 152064),
    "qwen2.5-14b": (48, 40, 8, 152064),
}
REPEATED = 4  # prompts that are continued alone and in one batch
LARGEST_IN_FP32 = 10**9  # parameters of a model that is also run in fp32, to say whose logits are nearer


@dataclass(frozen=True, kw_only=True)
class ModelRow(_Record):
    """What one variant of a model did in one phase. A field that is not known is None.

    variant: `original`, `patched`, `patched fixed` (down="fixed"), each also ` compiled`. phase: `text`, `prefill`,
    `decode`. status, reason, ran_on, run, schema, time_us*, sm_mhz: as in a `Row`. layers, k, n: of the model.
    batch, tokens: rows of input, and new tokens in each; context: tokens that were there before.
    ratio: time over the original's, paired, with the ends of its 95% interval. tokens_per_s: batch * tokens / time.
    mlp_us, mlp_share: time of all MLPs run one after the other on their own, and its share of the whole.
    Of text: perplexity; logits_max, logits_rms: distance from the original's logits, the second relative to their RMS;
    fp32_rms: the same from the logits of the model in fp32; top1: share of positions with the original's likeliest
    token; greedy: the greedy continuation, and how many of its tokens are the original's before the first that is not;
    batch_equal: share of prompts whose continuation is the same alone and in a batch.
    """

    model: str
    variant: str
    phase: str
    status: str
    schema: int = SCHEMA
    run: str | None = None
    ran_on: str | None = None
    reason: str | None = None
    layers: int | None = None
    k: int | None = None
    n: int | None = None
    batch: int | None = None
    tokens: int | None = None
    context: int | None = None
    time_us: float | None = None
    time_us_q1: float | None = None
    time_us_q3: float | None = None
    launch: str | None = None
    sm_mhz: float | None = None
    ratio: tuple[float, float, float] | None = None
    tokens_per_s: float | None = None
    mlp_us: float | None = None
    mlp_share: float | None = None
    perplexity: float | None = None
    logits_max: float | None = None
    logits_rms: float | None = None
    fp32_rms: float | None = None
    top1: float | None = None
    greedy: str | None = None
    greedy_equal: int | None = None
    greedy_tokens: int | None = None
    batch_equal: float | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ArgumentError("status", f"unknown {self.status!r}", f"choose from {', '.join(STATUSES)}")

    def to_json(self) -> str:
        """One line of JSON, without the fields that are None."""
        return json.dumps(self.to_dict())


def random_model(name: str, layers: int | None, device: torch.device, seed: int = 0) -> Any:
    """A Qwen2 model of that shape with random weights, in bf16, made on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    depth, heads, kv_heads, vocabulary = SHAPES[name]
    k, n = MODELS[name]
    config = Qwen2Config(
        hidden_size=k, intermediate_size=n, num_hidden_layers=layers or depth, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=32768,
        tie_word_embeddings=k < 3584,
    )  # fmt: skip
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def variants_of(model: Any, downs: tuple[str, ...] = ("torch",), compiled: bool = False) -> dict[str, Any]:
    """The model as it is and patched, each also compiled; all with the same parameters.

    Raises ArgumentError where nothing can be patched.
    """
    made = {"original": model}
    for down in (d for d in DOWN if d in downs):
        twin = sharing_copy(model)
        report = patch(twin, down=down)
        if not report.swapped:
            raise ArgumentError("weights", f"no MLP can be patched: {_reason(report)}", "give a dense SwiGLU model")
        made["patched" if down == "torch" else f"patched {down}"] = twin
    if compiled:
        made |= {f"{name} compiled": torch.compile(sharing_copy(one), dynamic=False) for name, one in made.items()}
    return made


def _reason(report: Report) -> str:
    return next(iter(report.left.values()), "there is none with gate_proj, up_proj and down_proj")


def sharing_copy(model: Any) -> Any:
    """The model's modules once more, with the same parameters and buffers."""
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)


# What it says


@dataclass(slots=True)
class Text:
    """What the variants read: token ids of a text [1, tokens], and what turns ids into text, if anything does."""

    ids: Tensor
    decode: Callable[[Tensor], str] | None = None
    prompt: int = 32
    """So many tokens are continued greedily, and half of them of several places of the text, in one batch."""


@torch.no_grad()
def say(variants: dict[str, Any], text: Text, new_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(variant, the fields of its row) for each: logits, perplexity, greedy continuations. `original` is first."""
    ids = text.ids
    wanted = logits_of(variants["original"], ids)
    truth = _fp32_logits(variants["original"], ids)
    said = None
    for name, model in variants.items():
        logits = logits_of(model, ids)
        told = greedy(model, ids[:, : text.prompt], new_tokens)[0]
        said = told if said is None else said
        differs = (told != said).nonzero()
        found: dict[str, Any] = {
            "batch": 1, "tokens": ids.shape[1],
            "perplexity": perplexity(logits, ids),
            "logits_max": (logits - wanted).abs().max().item(),
            "logits_rms": _relative_rms(logits, wanted),
            "fp32_rms": None if truth is None else _relative_rms(logits, truth),
            "top1": (logits.argmax(-1) == wanted.argmax(-1)).double().mean().item(),
            "greedy": None if text.decode is None else text.decode(told),
            "greedy_equal": int(differs[0]) if len(differs) else len(told),
            "greedy_tokens": len(told),
            "batch_equal": _batch_equal(model, text, new_tokens),
        }  # fmt: skip
        yield name, found


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """fp32 [1, tokens, vocabulary]."""
    return model(input_ids=ids, use_cache=False).logits.float()


def _fp32_logits(model: Any, ids: Tensor) -> Tensor | None:
    """Of the same weights with everything in fp32: what both variants round from; None for a large model."""
    if sum(p.numel() for p in model.parameters()) > LARGEST_IN_FP32:
        return None
    return logits_of(copy.deepcopy(model).float(), ids)


def _relative_rms(logits: Tensor, wanted: Tensor) -> float:
    return ((logits - wanted).double().square().mean() / wanted.double().square().mean()).sqrt().item()


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """exp of the mean negative log-likelihood of each token after the first; logits [1, tokens, vocabulary]."""
    loss = nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
    return loss.exp().item()


@torch.no_grad()
def greedy(model: Any, ids: Tensor, new_tokens: int) -> Tensor:
    """The likeliest token, so many times: [batch, new_tokens]. An end of text ends nothing."""
    from transformers import DynamicCache

    cache, told = DynamicCache(), []
    step = ids
    for _ in range(new_tokens):
        logits = model(input_ids=step, use_cache=True, **_with(cache)).logits
        step = logits[:, -1].argmax(-1, keepdim=True)
        told.append(step)
    return torch.cat(told, dim=1) if told else ids[:, :0]


@functools.cache
def _cache_argument() -> str:
    """What a model's forward calls its cache: the name changes within transformers 5."""
    from transformers import Qwen2ForCausalLM

    return "cache" if "cache" in inspect.signature(Qwen2ForCausalLM.forward).parameters else "past_key_values"


def _with(cache: Any) -> dict[str, Any]:
    return {_cache_argument(): cache}


def _batch_equal(model: Any, text: Text, new_tokens: int) -> float | None:
    """Of prompts from several places of the text."""
    length = max(1, text.prompt // 2)
    starts = range(0, text.ids.shape[1] - length + 1, max(1, (text.ids.shape[1] - length) // REPEATED))
    prompts = torch.cat([text.ids[:, start : start + length] for start in starts][:REPEATED])
    if len(prompts) < 2:
        return None
    together = greedy(model, prompts, new_tokens)
    equal = [torch.equal(greedy(model, prompts[i : i + 1], new_tokens)[0], together[i]) for i in range(len(prompts))]
    return sum(equal) / len(equal)


# How fast it is


@dataclass(slots=True)
class _Call(Bound):
    call: Callable[[], Tensor]

    def run(self) -> Tensor:
        return self.call()


class Decoding:
    """One decoding step of a model at a fixed place, or, with advance=True, at the next place each time.

    A static cache of `length` places, of which `context` are filled. On a GPU `capture` gives a CUDA graph of the step.
    """

    def __init__(self, model: Any, batch: int, context: int, length: int | None = None) -> None:
        from transformers import StaticCache

        weight = next(model.parameters())
        self.device, self.context, self.length = weight.device, context, length or context + 1
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (batch, context), generator=generator).to(self.device)
        self.token = ids[:, :1].clone()
        self.cache: Any = StaticCache(config=model.config, max_cache_len=self.length)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **_with(self.cache))
        # One tensor holds the place of all layers, so that one launch sets them.
        self.place = torch.full((len(self.cache.layers),), context, device=self.device)
        for layer, place in zip(self.cache.layers, self.place, strict=True):
            layer.cumulative_length = place
        self.places = torch.arange(self.length, device=self.device)

    @torch.no_grad()
    def step(self, model: Any, advance: bool = False) -> Tensor:
        """Logits [batch, 1, vocabulary] of the token that comes next."""
        if not advance:
            self.place.fill_(self.context)
        at = self.place[:1].clone()
        return model(
            input_ids=self.token,
            position_ids=at[None],
            attention_mask=(self.places <= at)[None, None, None].expand(len(self.token), 1, 1, -1),
            use_cache=True,
            **_with(self.cache),
        ).logits

    def capture(self, model: Any, advance: bool = False) -> Callable[[], Any]:
        """What runs one step: a CUDA graph's replay, or, on a CPU, the step."""
        run = lambda: self.step(model, advance)  # noqa: E731
        return captured(run) if self.device.type == "cuda" else run


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of what `run` launches, after it has run on a stream of its own as often as capture wants."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    replay = graph.replay

    def call(kept=(graph, out)) -> Any:
        replay()
        return kept[1]

    return call


@dataclass(frozen=True, slots=True)
class Phase:
    """What is timed: prefill of `tokens` new tokens, or, with a context, decoding of one after it; in each of `batch`
    rows."""

    name: str
    batch: int
    tokens: int = 1
    context: int = 0


def time_phase(variants: dict[str, Any], phase: Phase) -> Iterator[tuple[str, dict[str, Any]]]:
    """(variant, the fields of its row) for each variant, all timed together, and their MLPs beside them.

    A variant that fails comes with status `failed` and a reason.
    """
    device = next(variants["original"].parameters()).device
    calls: list[timing.Variant] = []
    failed: dict[str, str] = {}
    with torch.no_grad():
        decoding = Decoding(variants["original"], phase.batch, phase.context) if phase.name == "decode" else None
        rows = phase.batch * phase.tokens
        for name, model in variants.items():
            try:
                run = decoding.capture(model) if decoding else _prefill(model, phase, device)
                calls.append(timing.Variant(f"{name}|", [_Call(run)], capturable=False))
                if "compiled" not in name:
                    mlps = _mlps(model, rows, device)
                    alone = captured(mlps) if decoding and device.type == "cuda" else mlps
                    calls.append(timing.Variant(f"{name} mlps|", [_Call(alone)], capturable=False))
            except Exception as error:  # of a compiler, or out of memory: the other variants are worth their time
                failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        times = {
            key.partition("|")[0]: found
            for key, found in timing.measure(calls, device, "burst", baselines=("original", "original mlps"))
        }
    launch = "graph" if decoding and device.type == "cuda" else "stream"
    for name in variants:
        found = times.get(name)
        fields: dict[str, Any] = {"batch": phase.batch, "tokens": phase.tokens}
        if decoding:
            fields["context"] = phase.context
        if not isinstance(found, timing.Timing):
            yield name, fields | {"status": "failed", "reason": failed.get(name, f"{type(found).__name__}: {found}")}
            continue
        fields |= {
            "time_us": found.time_us, "time_us_q1": found.time_us_q1, "time_us_q3": found.time_us_q3,
            "launch": launch, "sm_mhz": found.sm_mhz,
            "ratio": None if name == "original" else found.ratios.get("original"),
            "tokens_per_s": rows / found.time_us * 1e6,
        }  # fmt: skip
        mlps = times.get(f"{name} mlps")
        if isinstance(mlps, timing.Timing):
            fields |= {"mlp_us": mlps.time_us, "mlp_share": mlps.time_us / found.time_us}
        yield name, fields


def _prefill(model: Any, phase: Phase, device: torch.device) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (phase.batch, phase.tokens), generator=generator).to(device)

    @torch.no_grad()
    def run() -> Tensor:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    run()  # compiles what is to be compiled
    return run


def _mlps(model: Any, rows: int, device: torch.device) -> Callable[[], Tensor]:
    """Runs all gated MLPs one after the other, each on the same rows."""
    modules: list[Any] = [m for m in model.modules() if isinstance(m, FusedMLP) or hasattr(m, "gate_proj")]
    weight = modules[0].down_proj.weight
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, weight.shape[0], generator=generator).to(device, weight.dtype)

    @torch.no_grad()
    def run() -> Tensor:
        out = x
        for module in modules:
            out = module(x)
        return out

    return run
