"""A GatedMLP split over two processes is the GatedMLP: outputs, gradients, parameters."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fused_swiglu import ArgumentError
from fused_swiglu.nn import ColwiseGateUp, GatedMLP

HIDDEN, INTERMEDIATE, RANKS = 32, 48, 2


def build(dtype: torch.dtype, bias: bool, intermediate: int = INTERMEDIATE) -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(HIDDEN, intermediate, bias=bias, dtype=dtype)


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, 3, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x.requires_grad_(), grad


def result(mlp: GatedMLP, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients, whole and as the unsplit module has them."""
    x, grad = data(dtype)
    out = mlp(x)
    out.backward(grad)
    found = {"out": out.detach(), "x": x.grad}
    for name, parameter in mlp.named_parameters():
        value, whole = parameter.grad, parameter.detach()
        if isinstance(value, DTensor):
            value, whole = value.full_tensor(), whole.full_tensor()
        if name.startswith("gate_up"):
            shape = (2 * INTERMEDIATE, *value.shape[value.dim() - 1 if "weight" in name else value.dim() :])
            value, whole = value.reshape(shape), whole.reshape(shape)
        found[name], found[f"{name} itself"] = value, whole
    return found


def work(rank: int, store: str, dtype: torch.dtype, bias: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        wanted = result(build(dtype, bias), dtype)
        mesh = dist.init_device_mesh("cpu", (RANKS,))
        mlp = build(dtype, bias)
        parallelize_module(mlp, mesh, mlp.tensor_parallel_plan())
        local = mlp.gate_up_proj.weight.to_local()
        assert local.shape == (2, INTERMEDIATE // RANKS, HIDDEN)
        assert local.is_contiguous()  # so that gate above up is a view
        assert not isinstance(mlp(data(dtype)[0]), DTensor)
        found = result(mlp, dtype)
        assert found.keys() == wanted.keys()
        tolerance = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.02}
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")
        for odd in (INTERMEDIATE + 1,):
            with pytest.raises(ArgumentError, match="intermediate: 49 channels do not divide by 2 ranks"):
                parallelize_module(build(dtype, bias, odd), mesh, {"gate_up_proj": ColwiseGateUp()})
        with pytest.raises(ArgumentError, match="plan: splits a GateUp, not a Linear"):
            parallelize_module(build(dtype, bias), mesh, {"down_proj": ColwiseGateUp()})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float64, True), (torch.float64, False), (torch.bfloat16, True)])
def test_two_processes_are_one(tmp_path, dtype, bias):
    mp.start_processes(work, (str(tmp_path / "store"), dtype, bias), nprocs=RANKS, start_method="spawn")
