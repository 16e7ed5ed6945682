"""swiglu on the GPU: the bits of the model for any number of rows, whatever the pick; graphs, threads, tuning, cost."""

import threading
import time
from functools import cache

import pytest
import torch

from fused_swiglu import ArgumentError, Arithmetic, Operands, Problem, Weights, choice, select, swiglu, tuned
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.testing import assert_bits_equal

pytest.importorskip("tvm_ffi")
from prebuilt import prebuild

from cutlass_kernels.launching import CutlassKernel
from triton_baselines.model import accumulate, execute

DEVICE = torch.device("cuda", 0)
IEEE = Arithmetic()
SIZES = (*range(1, 71), *range(127, 131), 300, 5000)
SHAPES = [(328, 136), (4864, 896)]
ODD = [(327, 136), (328, 133), (1, 1)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuning.json"))
    monkeypatch.setattr(tuned, "_session", {})
    select.forget()


@pytest.fixture(scope="module", autouse=True)
def _built():
    """What the tests pick is compiled first, at once."""
    posed = [Problem(m, n, k) for n, k in SHAPES for m in SIZES]
    posed += [Problem(m, 120, 136, bias=True, outputs=("out", "preactivations")) for m in (3, 150)]
    found = ((*choice.choose(problem, IEEE, DEVICE), problem) for problem in posed)
    prebuild(k.unit(problem, config, IEEE) for k, config, problem in found if isinstance(k, CutlassKernel))


@cache
def case(n, k, m=5000):
    inputs = make_inputs(Problem(m, n, k), "normal", 1, DEVICE)
    return inputs.x, inputs.weights.gate, inputs.weights.up


@cache
def wanted(n, k):
    x, gate, up = case(n, k)
    return execute(IEEE, x, Weights(gate, up))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_any_number_of_rows_gives_the_bits_of_the_model(n, k):
    x, gate, up = case(n, k)
    picked = set()
    for m in SIZES:
        picked.add(choice.choose(Problem(m, n, k), IEEE, DEVICE)[0].name)
        out = swiglu(x[:m], gate, up)
        assert_bits_equal(out, wanted(n, k)[:m])
        assert_bits_equal(swiglu(x[:m], gate, up, out=torch.full_like(out, torch.nan)), out)
    assert "triton.fused" not in picked
    assert "cutlass.decode" in picked


@pytest.mark.parametrize(("n", "k"), ODD)
def test_odd_sizes_go_to_triton_with_the_same_bits(n, k):
    x, gate, up = case(n, k, 300)
    for m in (1, 64, 65, 300):
        assert choice.choose(Problem(m, n, k), IEEE, DEVICE)[0].name == "triton.fused"
        assert_bits_equal(swiglu(x[:m], gate, up), execute(IEEE, x[:m], Weights(gate, up)))


def test_all_candidates_give_the_same_bits():
    n, k = SHAPES[0]
    x, gate, up = case(n, k)
    for m in (1, 33, 130):
        problem = Problem(m, n, k, layout="separate")
        for kernel, config in choice.candidates(problem, IEEE, DEVICE):
            if kernel.is_built(problem, config, IEEE):
                out = make_out(problem, device=DEVICE)
                kernel.compile(problem, config, IEEE, DEVICE).bind(Operands(x[:m], Weights(gate, up), out)).run()
                assert_bits_equal(out, wanted(n, k)[:m])


def test_leading_dimensions_stacked_weights_and_strides():
    n, k = SHAPES[0]
    x, gate, up = case(n, k)
    stacked = torch.cat((gate, up))
    for shape in ((2, 3, 5), (4, 50)):
        m = torch.Size(shape).numel()
        assert_bits_equal(swiglu(x[:m].view(*shape, k), stacked), wanted(n, k)[:m].view(*shape, n))
    wide = torch.full((70, k + 8), torch.nan, device=DEVICE, dtype=x.dtype)
    wide[:, :k] = x[:70]
    out = torch.full((70, n + 16), torch.nan, device=DEVICE, dtype=x.dtype)
    swiglu(wide[:, :k], gate, up, out=out[:, :n])
    assert_bits_equal(out[:, :n].contiguous(), wanted(n, k)[:70])
    assert out[:, n:].isnan().all()


@pytest.mark.parametrize("m", [3, 150])
def test_biases_and_preactivations(m):
    problem = Problem(m, 120, 136, bias=True, outputs=("out", "preactivations"))
    inputs = make_inputs(problem, "normal", 2, DEVICE)
    w, kept = inputs.weights, torch.full((m, 240), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    out = swiglu(inputs.x, w.gate, w.up, bias_gate=w.bias_gate, bias_up=w.bias_up, preactivations=kept)
    assert_bits_equal(out, execute(IEEE, inputs.x, w))
    halves = [
        accumulate(inputs.x, weight) + bias.float() for weight, bias in ((w.gate, w.bias_gate), (w.up, w.bias_up))
    ]
    assert_bits_equal(kept, torch.cat(halves, 1).bfloat16())


@pytest.mark.parametrize(("m", "n", "k"), [(7, 328, 136), (130, 328, 136), (7, 327, 136)])
def test_a_graph_captures_a_call_and_outlives_its_handles(m, n, k):
    x, gate, up = (t.clone() for t in case(n, k, 300))
    x = x[:m].clone()
    out = torch.empty(m, n, device=DEVICE, dtype=x.dtype)
    swiglu(x, gate, up, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = swiglu(x, gate, up)  # allocates in the graph's pool: bound within the capture
        swiglu(x, gate, up, out=out)
        tuned_too = swiglu(x, gate, up, tune=True)
    select.forget()
    x.copy_(case(n, k, 300)[0][100 : 100 + m])
    out.fill_(torch.nan)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    expected = execute(IEEE, x, Weights(gate, up))
    for result in (first, out, tuned_too):
        assert_bits_equal(result, expected)


def test_a_capture_of_a_new_shape_is_refused_and_the_process_goes_on():
    x, gate, up = case(328, 136, 300)
    with pytest.raises(ArgumentError, match="call swiglu once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        swiglu(x[:11], gate, up)
    assert_bits_equal(swiglu(x[:11], gate, up), execute(IEEE, x[:11], Weights(gate, up)))


def test_a_call_goes_to_the_current_stream_and_allocates_out_alone():
    x, gate, up = (t.clone() for t in case(328, 136, 300))
    swiglu(x[:9], gate, up)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()["allocation.all.allocated"]
    out = swiglu(x[:9], gate, up)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == stats + 1
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.zero_()
        swiglu(x[:9], gate, up, out=out)
    stream.synchronize()
    assert float(out.abs().max()) == 0


def test_two_threads():
    x, gate, up = case(328, 136)
    faults = []
    start = threading.Barrier(2)

    def work(first):
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for m in SIZES[first:74:2]:
                    out = swiglu(x[:m], gate, up)
                    torch.cuda.current_stream().synchronize()
                    assert_bits_equal(out, wanted(328, 136)[:m])
        except BaseException as error:
            faults.append(error)

    wanted(328, 136)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_tuning_keeps_a_pick_and_the_bits(monkeypatch):
    n, k, m = 4864, 896, 16
    x, gate, up = case(n, k)
    before = swiglu(x[:m], gate, up)
    assert_bits_equal(swiglu(x[:m], gate, up, tune=True), before)
    pick = tuned.find(Problem(m, n, k), IEEE, DEVICE)
    assert pick is not None
    assert pick.time_us <= pick.heuristic_us
    kernel, config = choice.choose(Problem(m, n, k), IEEE, DEVICE)
    assert (kernel.name, str(config)) == (pick.kernel, pick.config)
    monkeypatch.setattr(tuned, "_session", {})
    select.forget()
    monkeypatch.setattr("fused_swiglu.tune.search", lambda *_, **__: pytest.fail("tuned again"))
    assert_bits_equal(swiglu(x[:m], gate, up, tune=True), before)
    print(f"tuned: {pick}")


def test_cost_on_the_host_is_that_of_a_launch():
    """Small, so that the GPU keeps up. Prints the times; what it asserts is only that nothing is made anew."""
    x, gate, up = case(64, 64, 8)
    stacked = torch.cat((gate, up))
    problem = Problem(8, 64, 64, layout="separate")
    kernel, config = choice.choose(problem, IEEE, DEVICE)
    out = torch.empty(8, 64, device=DEVICE, dtype=x.dtype)
    bound = kernel.compile(problem, config, IEEE, DEVICE).bind(Operands(x, Weights(gate, up), out))
    calls = {
        "Bound.run": bound.run,
        "swiglu(x, gate, up)": lambda: swiglu(x, gate, up),
        "swiglu(x, stacked)": lambda: swiglu(x, stacked),
        "swiglu(x, stacked, out=out)": lambda: swiglu(x, stacked, out=out),
    }
    for name, call in calls.items():
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(300):
                call()
            times.append((time.perf_counter() - begin) / 300 * 1e6)
        print(f"{name}: {sorted(times)[4]:.2f} us")
    torch.cuda.synchronize()
    assert len(select._launches) == 3
