"""What every kernel of ours does when it is launched on a GPU: graphs, allocations, streams."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fused_swiglu import Bound
from fused_swiglu.inputs import Inputs, make_inputs
from fused_swiglu.problem import Problem
from fused_swiglu.testing import assert_bits_equal


def captured_and_replayed(problem: Problem, bind: Callable[[Inputs], Bound], device: torch.device, times: int) -> None:
    """Built and bound outside, a launch can be captured; the replay reads what x holds then, and allocates nothing."""
    inputs = make_inputs(problem, "normal", 1, device)
    bound = bind(inputs)
    bound.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bound.run()
    inputs.x.copy_(make_inputs(problem, "normal", 2, device).x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    replayed = captured.clone()
    assert_bits_equal(replayed, bind(inputs).run())


def goes_to_the_current_stream(problem: Problem, bind: Callable[[Inputs], Bound], device: torch.device) -> None:
    inputs = make_inputs(problem, "normal", 1, device)
    bound = bind(inputs)
    wanted = bound.run().clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        inputs.x.zero_()
        out = bound.run()
    stream.synchronize()
    assert not bool(torch.equal(out, wanted))
    assert float(out.abs().max()) == 0
