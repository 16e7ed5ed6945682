"""The operators, GatedMLP and patched models on a GPU: gradients, bits in any batch, graphs, compile, errors.

The models are tiny ones of transformers with random weights; without transformers their tests are skipped.
"""

import pytest
import torch
from torch.nn.functional import linear, silu

from fused_swiglu import DTYPES, ArgumentError, Weights
from fused_swiglu.activations import get_activation
from fused_swiglu.nn import GatedMLP
from fused_swiglu.problem import ACTIVATIONS
from fused_swiglu.sm90 import accumulate
from fused_swiglu.torch_ops import product, swiglu
from triton_baselines import product as product_kernel

BATCHES = (2, 3, 8, 16, 31, 64)


def draw(device, *shape, sigma=1.0, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * sigma).to(dtype)


def operands(device, m, n, k, *, bias=False, dtype=torch.bfloat16):
    """x, w_gate, w_up, bias_gate, bias_up, each with a gradient to come."""
    given = [
        draw(device, m, k, dtype=dtype),
        draw(device, n, k, sigma=k**-0.5, seed=1, dtype=dtype),
        draw(device, n, k, sigma=k**-0.5, seed=2, dtype=dtype),
        *((draw(device, n, seed=3, dtype=dtype), draw(device, n, seed=4, dtype=dtype)) if bias else (None, None)),
    ]
    return [None if t is None else t.requires_grad_() for t in given]


def call(given, **more):
    x, w_gate, w_up, bias_gate, bias_up = given
    return swiglu(x, w_gate, w_up, bias_gate=bias_gate, bias_up=bias_up, **more)


def skip_unless_stored(device, bias=False, dtype=torch.bfloat16):
    """Pre-activations are written by CUTLASS kernels alone, which nvcc or a folder of builds has to provide."""
    try:
        call(operands(device, 512, 1024, 896, bias=bias, dtype=dtype))
    except ArgumentError as error:
        pytest.skip(f"no kernel here writes pre-activations: {error}")


def eager(given):
    x, w_gate, w_up, bias_gate, bias_up = given
    return silu(linear(x, w_gate, bias_gate)) * linear(x, w_up, bias_up)


# Gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 8), (100, 1032), (4096, 4864)])
def test_the_fused_backward_is_right_to_a_rounding(device, activation, shape):
    m, n = shape
    grad, both = draw(device, m, n), draw(device, m, 2 * n, sigma=3.0, seed=1)
    act, (gate, up) = get_activation(activation), both.double().chunk(2, dim=1)
    wanted = torch.cat((grad.double() * up * act.derivative(gate), grad.double() * act.torch(gate)), dim=1)
    found = torch.ops.fused_swiglu.swiglu_backward(grad, both, activation)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8 * 1.01, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_as_good_as_torchs(device, bias, recompute, dtype):
    """Against fp64: output and every gradient are off by at most twice what torch's own are, in its dtype."""
    if not recompute:
        skip_unless_stored(device, bias, DTYPES[dtype])
    given = operands(device, 512, 1024, 896, bias=bias, dtype=DTYPES[dtype])
    grad = draw(device, 512, 1024, seed=5, dtype=DTYPES[dtype])
    truth = [None if t is None else t.detach().double().requires_grad_() for t in given]
    results = {}
    for name, function, tensors in (
        ("truth", eager, truth), ("torch", eager, given), ("ours", lambda g: call(g, recompute=recompute), given)
    ):  # fmt: skip
        out = function(tensors)
        wanted = [t for t in tensors if t is not None]
        grads = torch.autograd.grad(out, wanted, grad.to(out.dtype))
        results[name] = [t.double() for t in (out.detach(), *grads)]
    for truth_, theirs, ours in zip(*(results[name] for name in ("truth", "torch", "ours")), strict=True):
        assert (ours - truth_).norm() <= 2 * (theirs - truth_).norm()


# The product of a fixed arithmetic


@pytest.mark.parametrize("config", product_kernel.CONFIGS, ids=str)
def test_every_tile_of_the_product_has_the_bits_of_the_model(device, config):
    for m, n, k in ((1, 96, 200), (70, 136, 896), (5, 33, 130)):  # the last by pointers
        x, w = draw(device, m, k), draw(device, n, k, seed=1)
        out = torch.full((m, n), torch.nan, dtype=x.dtype, device=device)
        product_kernel.launch_of(x, w, out, config, sms=132)()
        wanted = torch.from_numpy(accumulate(x.cpu(), w.cpu())).to(x.dtype)
        assert torch.equal(out.cpu(), wanted)


def test_product_goes_to_the_current_stream_and_into_graphs(device):
    x, w = draw(device, 16, 896), draw(device, 896, 896, seed=1)
    wanted = product(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x, w)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


# The same bits in any batch


@pytest.mark.parametrize(("hidden", "intermediate"), [(896, 4864), (3584, 18944)])
def test_a_row_has_the_same_bits_in_any_batch(device, hidden, intermediate):
    torch.manual_seed(0)
    mlp = GatedMLP(hidden, intermediate, down="fixed", device=device, dtype=torch.bfloat16)
    rows = draw(device, 64, hidden)
    with torch.no_grad():
        gated = torch.cat([mlp.gate_up_proj(row[None]) for row in rows])
        whole = torch.cat([mlp(row[None]) for row in rows])
        for m in BATCHES:
            assert torch.equal(mlp.gate_up_proj(rows[:m]), gated[:m])
            assert torch.equal(mlp(rows[:m]), whole[:m])
            assert torch.equal(mlp(rows[64 - m :].reshape(1, m, hidden))[0], whole[64 - m :])


def test_the_shared_arithmetic_is_the_models(device):
    from fused_swiglu import Arithmetic
    from fused_swiglu.sm90 import execute

    x, w_gate, w_up, *_ = operands(device, 3, 64, 896)
    wanted = execute(Arithmetic(), x.detach().cpu(), Weights(w_gate.detach().cpu(), w_up.detach().cpu()))
    assert torch.equal(swiglu(x, w_gate, w_up).detach().cpu(), wanted.to(torch.bfloat16))


# torch's machinery


def test_opcheck(device):
    given = operands(device, 16, 64, 64)
    torch.library.opcheck(torch.ops.fused_swiglu.swiglu, (*given, "silu", "sm90:ieee:out", False))
    torch.library.opcheck(torch.ops.fused_swiglu.product, (given[0], given[1]))
    grad, both = draw(device, 16, 64), draw(device, 16, 128)
    torch.library.opcheck(torch.ops.fused_swiglu.swiglu_backward, (grad, both, "silu"))
    skip_unless_stored(device)
    torch.library.opcheck(torch.ops.fused_swiglu.swiglu, (*given, "silu", "sm90:ieee:out", True))


def test_compiled_whole_with_inductor(device):
    torch._dynamo.reset()
    given = operands(device, 16, 256, 128)
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda g: call(g, recompute=True) * 2, fullgraph=True, dynamic=True, backend=counter)
    for m in (16, 40, 128):
        given[0] = draw(device, m, 128, seed=m).requires_grad_()
        assert torch.equal(compiled(given), call(given, recompute=True) * 2)
    assert counter.frame_count == 1
    compiled(given).sum().backward()
    assert all(t.grad is not None for t in given[:3])


def test_on_the_current_stream(device):
    x, w_gate, w_up, *_ = (None if t is None else t.detach() for t in operands(device, 64, 1024, 896))
    assert swiglu(x, w_gate, w_up).abs().sum() > 0
    assert product(x, w_gate).abs().sum() > 0
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.zero_()
        late = swiglu(x, w_gate, w_up), product(x, w_gate)
    stream.synchronize()
    assert all(out.abs().sum() == 0 for out in late)


def test_bad_input_is_named_and_the_process_goes_on(device):
    x, w_gate, w_up, *_ = (None if t is None else t.detach() for t in operands(device, 16, 64, 64))
    wanted = swiglu(x, w_gate, w_up)
    for given, words in (
        ((x.float(), w_gate, w_up), "w_gate: has dtype torch.bfloat16"),
        ((x, w_gate.cpu(), w_up), "w_gate: is on cpu"),
        ((x, w_gate, w_up[:, :32]), "w_up: has shape"),
        ((x, w_gate.t().contiguous().t(), w_up), "w_gate: has column stride"),
        ((x[:, :32], w_gate, w_up), "x: has 32 columns"),
    ):
        with pytest.raises(ArgumentError, match=words):
            swiglu(*given)
        assert torch.equal(swiglu(x, w_gate, w_up), wanted)
    assert torch.equal(swiglu(x.t().contiguous().t(), w_gate, w_up), wanted)  # x may be anything
    if torch.cuda.device_count() > 1:
        with pytest.raises(ArgumentError, match="w_up: is on cuda:1"):
            swiglu(x, w_gate, w_up.to("cuda:1"))


# Whole models


@pytest.fixture
def model(device):
    """Three layers of Qwen2."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).to(device, torch.bfloat16).eval()


@pytest.mark.parametrize("down", ["torch", "fixed"])
def test_a_patched_model_says_the_same(device, model, down):
    from fused_swiglu.patching import patch, unpatch

    ids = torch.randint(0, 1000, (2, 33), device=device)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert len(patch(model, down=down).swapped) == 3
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0.1, atol=0.05)
        unpatch(model)
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("down", ["torch", "fixed"])
def test_a_thousand_decoding_steps_in_a_graph_allocate_nothing(device, model, down):
    from fused_swiglu.model_run import Decoding
    from fused_swiglu.patching import patch

    patch(model, down=down)
    with torch.no_grad():
        decoding = Decoding(model, batch=4, context=16, length=1100)
        replay = decoding.capture(model, advance=True)
        replay()
        torch.cuda.synchronize()
        used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        first = replay().clone()
        for _ in range(999):
            last = replay()
        torch.cuda.synchronize()
        del first
        assert torch.cuda.memory_allocated() <= used
        assert torch.cuda.memory_reserved() == reserved
        assert last.isfinite().all()
        wanted = decoding.step(model)  # at the first place again: eager, the cache's later places masked
        again = decoding.capture(model)()
        assert torch.equal(again, wanted)
