"""The operators as torch's machinery sees them: opcheck, compile, export, autocast, checkpoint, gradients, errors."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from fused_swiglu import ArgumentError, Weights
from fused_swiglu.problem import ACTIVATIONS
from fused_swiglu.reference import exact, twin
from fused_swiglu.torch_ops import product, swiglu
from triton_baselines.interpreter import interpreted

pytestmark = pytest.mark.filterwarnings("ignore:swiglu runs by torch:UserWarning")  # said once, on a CPU
M, N, K = 6, 24, 16
ops = torch.ops.fused_swiglu
EAGER = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


def operands(dtype=torch.bfloat16, *, stacked=False, bias=False, grad=False, m=M, n=N, k=K, seed=0):
    """x, w_gate, w_up, bias_gate, bias_up."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, sigma=1.0):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * sigma).to(dtype).requires_grad_(grad)

    w_gate, w_up = draw(2 * n if stacked else n, k, sigma=k**-0.5), None if stacked else draw(n, k, sigma=k**-0.5)
    return [draw(m, k), w_gate, w_up, *((draw(n), draw(n)) if bias else (None, None))]


def halves(w_gate, w_up):
    return w_gate.chunk(2) if w_up is None else (w_gate, w_up)


def eager(x, w_gate, w_up, bias_gate, bias_up, activation="silu"):
    gate, up = halves(w_gate, w_up)
    return EAGER[activation](linear(x, gate, bias_gate)) * linear(x, up, bias_up)


def call(given, **more):
    x, w_gate, w_up, bias_gate, bias_up = given
    return swiglu(x, w_gate, w_up, bias_gate=bias_gate, bias_up=bias_up, **more)


@contextmanager
def refused(argument: str, *words: str):
    """Errors of tracing wrap the one that was raised: its text is what counts."""
    with pytest.raises(Exception, match=rf"{argument}: ") as caught:
        yield
    for word in words:
        assert word in str(caught.value)


# Forward


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_rounding(activation, stacked):
    given = operands(stacked=stacked, bias=True)
    gate, up = halves(*given[1:3])
    wanted = twin(given[0], Weights(gate, up, *given[3:]), activation, rounds=())
    found = call(given, activation=activation)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_torchs_own(dtype):
    given = operands(dtype, bias=True)
    torch.testing.assert_close(call(given), eager(*given))


def test_leading_dimensions_strides_and_no_rows():
    x, w_gate, w_up, *_ = operands()
    flat = swiglu(x, w_gate, w_up)
    assert torch.equal(swiglu(x.reshape(2, 3, K), w_gate, w_up), flat.reshape(2, 3, N))
    assert torch.equal(swiglu(x[0], w_gate, w_up), flat[0])
    transposed = x.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert torch.equal(swiglu(transposed, w_gate, w_up), flat)
    wide = torch.zeros(M, 2 * K, dtype=x.dtype)
    wide[:, :K] = x
    assert torch.equal(swiglu(wide[:, :K], w_gate, w_up), flat)
    assert swiglu(x[:0], w_gate, w_up).shape == (0, N)
    assert swiglu(x.reshape(2, 3, K)[:, :0], w_gate, w_up).shape == (2, 0, N)


@pytest.mark.parametrize(
    ("position", "change", "argument", "words"),
    [
        (0, lambda t: t[:, :-1], "x", ["15 columns", "16"]),
        (1, lambda t: t[:, :-1], "x", ["16 columns", "15"]),
        (2, lambda t: t[:-1], "w_up", ["(23, 16)", "(24, 16)"]),
        (1, lambda t: t[0], "w_gate", ["give a matrix"]),
        (1, lambda t: t.float(), "w_gate", ["torch.float32", "x's torch.bfloat16"]),
        (2, lambda t: t.half(), "w_up", ["torch.float16"]),
        (2, lambda t: t.to("meta"), "w_up", ["meta", "cpu"]),
        (3, lambda t: t[:-1], "bias_gate", ["(23,)", "(24,)"]),
        (4, lambda t: t.float(), "bias_up", ["torch.float32"]),
    ],
)
def test_misfits_are_named_before_anything_runs(position, change, argument, words):
    given = operands(bias=True)
    given[position] = change(given[position])
    with refused(argument, *words):
        call(given)
    with refused("bias_up", "is missing"):
        call([*operands(bias=True)[:4], None])
    assert call(operands(bias=True)).shape == (M, N)  # and the process goes on


def test_other_bad_input():
    x, w_gate, w_up, *_ = operands()
    with refused("activation", "unknown 'swish'", "silu"):
        swiglu(x, w_gate, w_up, activation="swish")
    with refused("weights", "(23, 16)"):
        swiglu(x, w_gate[:-1])
    with refused("x", "not for vmap"):
        torch.vmap(lambda row: swiglu(row, w_gate, w_up))(x.reshape(2, 3, K))
    with refused("x", "not for vmap"):
        torch.vmap(lambda row: product(row, w_gate))(x.reshape(2, 3, K))


# Tracing


@pytest.mark.parametrize(
    ("dtype", "stacked", "bias", "store"),
    [(torch.bfloat16, False, True, True), (torch.bfloat16, True, False, False), (torch.float64, True, True, True)],
)
def test_opcheck_swiglu(dtype, stacked, bias, store):
    given = operands(dtype, stacked=stacked, bias=bias, grad=True)
    torch.library.opcheck(ops.swiglu, (*given, "silu", "sm90:ieee:out", store))


def test_opcheck_of_the_others():
    x, w_gate, *_ = operands(grad=True)
    torch.library.opcheck(ops.product, (x, w_gate))
    torch.library.opcheck(ops.swiglu_backward, (torch.ones(M, N), torch.ones(M, 2 * N), "silu"))


def test_compiled_whole_once_for_every_m():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda given: call(given) + 1, fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 3, 17, 64):
        given = operands(m=m, seed=m)
        assert torch.equal(compiled(given), call(given) + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_through_compile(recompute):
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: call(given, recompute=recompute), fullgraph=True, backend="aot_eager")
    grads = []
    for function in (compiled, lambda given: call(given, recompute=recompute)):
        given = operands(torch.float32, bias=True, grad=True)
        function(given).square().sum().backward()
        grads.append([t.grad for t in given])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_misfits_are_named_under_compile():
    torch._dynamo.reset()
    x, w_gate, w_up, *_ = operands()
    with refused("w_up", "torch.float32"):
        torch.compile(swiglu, fullgraph=True, backend="eager")(x, w_gate, w_up.float())


def test_export_keeps_the_operator_and_m_free():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            _, self.w_gate, self.w_up, *_ = (t if t is None else torch.nn.Parameter(t) for t in operands())

        def forward(self, x):
            return swiglu(x, self.w_gate, self.w_up)

    module = Gated()
    for train in (False, True):
        with torch.set_grad_enabled(train):
            program = torch.export.export(module, (operands()[0],), dynamic_shapes=({0: torch.export.Dim("m")},))
        assert "fused_swiglu.swiglu" in program.graph_module.code
        x = operands(m=11, seed=2)[0]
        assert torch.equal(program.module()(x), module(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    given = operands(torch.float32, bias=True, grad=True)
    with torch.autocast("cpu", dtype):
        out, wanted = call(given), eager(*given)
    assert out.dtype == wanted.dtype == dtype
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.abs().sum() > 0 for t in given)
    torch._dynamo.reset()

    def under_autocast(given):
        with torch.autocast("cpu", dtype):
            return call(given)

    compiled = torch.compile(under_autocast, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given), out, rtol=2**-7, atol=1e-6)


# Gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, stacked, recompute):
    given = operands(torch.float64, stacked=stacked, bias=True, grad=True, m=2, n=3, k=4)

    def function(*tensors):
        x, w_gate, *rest = tensors
        w_up = None if stacked else rest.pop(0)
        return call([x, w_gate, w_up, *rest], activation=activation, recompute=recompute)

    assert torch.autograd.gradcheck(function, [t for t in given if t is not None])


def test_only_what_is_wanted_has_a_gradient():
    for wanted in range(5):
        given = operands(torch.float64, bias=True)
        given[wanted].requires_grad_()
        call(given).sum().backward()
        whole = operands(torch.float64, bias=True, grad=True)
        eager(*whole).sum().backward()
        torch.testing.assert_close(given[wanted].grad, whole[wanted].grad)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_bf16_gradients_are_as_good_as_torchs(stacked, recompute):
    """Against fp64: at most twice the error of torch's own bf16."""
    errors = {}
    truth = operands(torch.bfloat16, stacked=stacked, bias=True, m=64)
    truth = [None if t is None else t.double().requires_grad_() for t in truth]
    up_grad = torch.randn(64, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    eager(*truth).backward(up_grad.double())
    for name, function in (("ours", lambda given: call(given, recompute=recompute)), ("torch", lambda g: eager(*g))):
        given = operands(torch.bfloat16, stacked=stacked, bias=True, grad=True, m=64)
        function(given).backward(up_grad)
        errors[name] = [
            (t.grad.double() - w.grad).norm().item() for t, w in zip(given, truth, strict=True) if t is not None
        ]
    for ours, theirs in zip(errors["ours"], errors["torch"], strict=True):
        assert ours <= 2 * theirs


def test_checkpoint_and_stored_bytes():
    """checkpoint gives the same gradients; recompute=True saves the pre-activations' memory."""

    def run(wrap, recompute):
        given = operands(torch.bfloat16, grad=True)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            out = wrap(lambda x: call([x, *given[1:]], recompute=recompute), given[0])
        out.float().square().sum().backward()
        return [t.grad for t in given[:3]], saved

    plain, saved = run(lambda f, x: f(x), False)
    again, _ = run(lambda f, x: checkpoint(f, x, use_reentrant=False), False)
    lean, fewer = run(lambda f, x: f(x), True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    for a, b in zip(plain, lean, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    assert 2 * M * N in saved
    assert 2 * M * N not in fewer


def test_nothing_is_stored_without_a_gradient(monkeypatch):
    stored = []
    real = ops.swiglu

    class Spy:
        def __call__(self, *arguments):
            stored.append(arguments[-1])
            return real(*arguments)

    monkeypatch.setattr(torch.ops.fused_swiglu, "swiglu", Spy())
    given = operands(grad=True)
    call(given)
    with torch.no_grad():
        call(given)
    call(operands())
    assert stored == [True, False, False]


def test_no_second_derivative():
    given = operands(torch.float64, grad=True)
    (first,) = torch.autograd.grad(call(given).square().sum(), given[0], create_graph=True)
    with refused("create_graph", "no second derivative"):
        first.sum().backward()


# One product


def test_product_is_rounded_once_and_independent_of_other_rows():
    x, w, *_ = operands(m=64)
    wanted = exact(x, Weights(w, w), out_dtype=x.dtype, computes="gate_up").value[:, :N]
    found = product(x, w)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-6)
    for m in (1, 2, 7, 33):
        assert torch.equal(product(x[:m], w), found[:m])
    bias = torch.randn(N).bfloat16()
    assert torch.equal(product(x.reshape(8, 8, K), w, bias), (found + bias).reshape(8, 8, N))


def test_product_gradients():
    x, w, *_ = operands(grad=True)
    product(x, w).float().square().sum().backward()
    grads = x.grad, w.grad
    x.grad = w.grad = None
    linear(x, w).float().square().sum().backward()
    for a, b in zip(grads, (x.grad, w.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_product_refuses():
    x, w, *_ = operands()
    with pytest.raises(ArgumentError, match=r"x: has dtype torch.float32"):
        product(x.float(), w.float())
    with pytest.raises(ArgumentError, match=r"w: has 15 columns"):
        product(x, w[:, :-1])


# What a GPU runs, in Triton's interpreter


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 24), (33, 300)])
def test_the_fused_backward_is_torchs(activation, shape):
    fused = interpreted("gated_backward").gated_backward
    generator = torch.Generator().manual_seed(3)
    m, n = shape
    grad = torch.randn(m, n, generator=generator)
    both = torch.randn(m, 2 * n, generator=generator) * 4
    both[0, 0], both[-1, n - 1] = 1e30, -1e30  # tails
    wanted = ops.swiglu_backward(grad.double(), both.double(), activation)
    torch.testing.assert_close(fused(grad, both, activation).double(), wanted, rtol=1e-5, atol=1e-5)
    spread = grad.t().contiguous().t()
    assert torch.equal(fused(spread, both, activation), fused(grad, both, activation))


@pytest.mark.parametrize("shape", [(1, 8, 16), (5, 24, 40), (70, 33, 130)])
def test_the_fixed_product_is_a_product(shape):
    """Small integers, which every order sums exactly; all configs."""
    module = interpreted("product")
    m, n, k = shape
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randint(-4, 5, size, generator=generator).float() for size in ((m, k), (n, k)))
    for config in module.CONFIGS:
        out = torch.full((m, n), torch.nan)
        module.launch_of(x, w, out, config, sms=3)()
        assert torch.equal(out, x @ w.T), config


def test_the_tile_follows_the_size():
    choose = interpreted("product").config_for
    assert (choose(4096, 3584, 132).bm, choose(4096, 3584, 132).bn) == (128, 256)
    assert (choose(1, 896, 132).bm, choose(1, 896, 132).bn) == (64, 32)
    assert choose(64, 18944, 132).bn == 128
