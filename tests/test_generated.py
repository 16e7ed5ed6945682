"""What torch.compile fuses: real code on the CPU; small modules like those that Inductor generates on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fused_swiglu import ArgumentError, Operands, Problem
from fused_swiglu.cli import main
from fused_swiglu.inputs import make_inputs, make_out
from triton_baselines import inductor_cutlass
from triton_baselines.compiled import FUSED_CASTS, MODES, CompileConfig, TorchCompile
from triton_baselines.generated import LIBRARY, Launch, Report, examine, load, parse

CPU = torch.device("cpu")
SMALL = Problem(16, 96, 64)
POINTWISE = '''
# Topologically Sorted Source Nodes: [silu, mul], Original ATen: [aten.silu, aten.mul]
# Graph fragment:
#   %mm : Tensor "bf16[16, 96]cuda:0" = PlaceHolder[target=mm]
triton_poi_fused_mul_silu_0 = async_compile.triton('triton_poi_fused_mul_silu_0', """
@triton.jit
def triton_poi_fused_mul_silu_0(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    tl.store(in_out_ptr0 + xindex, tmp0, None)
""", device_str='cuda')
'''
TEMPLATE = '''
# Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.mm]
# Graph fragment:
#   %mm : Tensor "bf16[16, 96]cuda:0" = call_function[target=torch.ops.aten.mm.default](args = (%x, %permute))
triton_tem_fused_mm_t_0 = async_compile.triton('triton_tem_fused_mm_t_0', """
def triton_tem_fused_mm_t_0(arg_A, arg_B, out_ptr0):
    acc = tl.dot(a, b, acc, allow_tf32=ALLOW_TF32, out_dtype=ACC_TYPE)
""", device_str='cuda')
'''
EPILOGUE = '''
# Topologically Sorted Source Nodes: [linear_1, silu, mul], Original ATen: [aten.t, aten.mm, aten.silu, aten.mul]
# Graph fragment:
#   %mm : Tensor "bf16[16, 96]cuda:0" = PlaceHolder[target=mm]
#   %mm_1 : Tensor "bf16[16, 96]cuda:0" = call_function[target=torch.ops.aten.mm.default](args = (%x, %permute_1))
triton_tem_fused_mm_mul_silu_t_1 = async_compile.triton('triton_tem_fused_mm_mul_silu_t_1', """
def triton_tem_fused_mm_mul_silu_t_1(arg_A, arg_B, in_ptr2, out_ptr1):
    acc = tl.dot(a, b, acc, allow_tf32=ALLOW_TF32, out_dtype=ACC_TYPE)
""", device_str='cuda')
'''
BOTH = EPILOGUE.replace("PlaceHolder[target=mm]", "call_function[target=torch.ops.aten.mm.default](args = (%x, %y))")
CUTLASS = '''
# kernel path: /tmp/a.py
# Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.mm]
cutlass_1a2b3c4d = async_compile.cuda(r"""
#include "cutlass/gemm/device/gemm_universal_adapter.h"
""", 'so', aot_compile=False)
'''
EVT = '''
# Topologically Sorted Source Nodes: [linear_1, silu, mul], Original ATen: [aten.t, aten.mm, aten.silu, aten.mul]
cutlass_fused_mm_mul_silu_t_5e6f7a8b = async_compile.cuda(r"""
using EVT = cutlass::epilogue::fusion::Sm90EVT<Multiply>;
""", 'so', aot_compile=False)
'''
EXTERN = """
# Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.mm]
extern_kernels.mm(arg1_1, reinterpret_tensor(arg0_1, (64, 96), (1, 64), 0), out=buf0)
"""


def module(definitions: str, *calls: str, function: str = "call") -> str:
    body = "\n".join(line for call in calls for line in call.strip().splitlines())
    indented = "\n".join(f"        {line}" for line in body.splitlines())
    return f"""
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
{definitions}
async_compile.wait(globals())

class Runner:
    def {function}(self, args):
        arg0_1, arg1_1 = args
        buf0 = empty_strided_cuda((16, 96), (96, 1), torch.bfloat16)
{indented}
        return (buf0, )

def benchmark_compiled_module(args, times=10, repeat=10):
    extern_kernels.mm(a, b, out=c)
"""


def run(name: str) -> str:
    return f"stream0 = get_raw_stream(0)\n{name}.run(buf0, buf1, 1536, stream=stream0)"


def run_cutlass(name: str) -> str:
    return f"{name}.{name}(buf0, buf1, None, None, 16, 96, 64, c_void_p(stream0))"


CASES = {
    "two by the library, one pointwise": (
        module(POINTWISE, EXTERN, EXTERN, run("triton_poi_fused_mul_silu_0")),
        [("extern_kernels.mm", LIBRARY, 1, ("mm",))] * 2
        + [("triton_poi_fused_mul_silu_0", "Triton", 0, ("silu", "mul"))],
        "3 kernels: 2 GEMMs, each a kernel of its own (library); silu and product in one pointwise kernel (Triton)",
    ),
    "a Triton template takes the product": (
        module(TEMPLATE + EPILOGUE, run("triton_tem_fused_mm_t_0"), run("triton_tem_fused_mm_mul_silu_t_1")),
        [
            ("triton_tem_fused_mm_t_0", "Triton", 1, ("mm",)),
            ("triton_tem_fused_mm_mul_silu_t_1", "Triton", 1, ("mm", "silu", "mul")),
        ],
        "2 kernels: 2 GEMMs, each a kernel of its own (Triton); silu and product in the epilogue of one GEMM (Triton)",
    ),
    "one template, launched twice": (
        module(TEMPLATE + POINTWISE, *[run("triton_tem_fused_mm_t_0")] * 2, run("triton_poi_fused_mul_silu_0")),
        [("triton_tem_fused_mm_t_0", "Triton", 1, ("mm",))] * 2
        + [("triton_poi_fused_mul_silu_0", "Triton", 0, ("silu", "mul"))],
        "3 kernels: 2 GEMMs, each a kernel of its own (Triton); silu and product in one pointwise kernel (Triton)",
    ),
    "a library and a template": (
        module(EPILOGUE, EXTERN, run("triton_tem_fused_mm_mul_silu_t_1")),
        [
            ("extern_kernels.mm", LIBRARY, 1, ("mm",)),
            ("triton_tem_fused_mm_mul_silu_t_1", "Triton", 1, ("mm", "silu", "mul")),
        ],
        "2 kernels: 2 GEMMs, each a kernel of its own (1 by library, 1 by Triton); silu and product in the epilogue of "
        "one GEMM (Triton)",
    ),
    "CUTLASS, the product in its visitor tree": (
        module(CUTLASS + EVT, run_cutlass("cutlass_1a2b3c4d"), run_cutlass("cutlass_fused_mm_mul_silu_t_5e6f7a8b")),
        [
            ("cutlass_1a2b3c4d", "CUTLASS", 1, ("mm",)),
            ("cutlass_fused_mm_mul_silu_t_5e6f7a8b", "CUTLASS", 1, ("mm", "silu", "mul")),
        ],
        "2 kernels: 2 GEMMs, each a kernel of its own (CUTLASS); silu and product in the epilogue of one GEMM "
        "(CUTLASS)",
    ),
    "both GEMMs in one kernel": (
        module(BOTH, run("triton_tem_fused_mm_mul_silu_t_1")),
        [("triton_tem_fused_mm_mul_silu_t_1", "Triton", 2, ("mm", "silu", "mul"))],
        "1 kernel: both GEMMs in one kernel (Triton); silu and product in the epilogue of both GEMMs (Triton)",
    ),
    "one GEMM of joined weights, in a partition for a CUDA graph": (
        module(POINTWISE, EXTERN, run("triton_poi_fused_mul_silu_0"), function="partition_0"),
        [("extern_kernels.mm", LIBRARY, 1, ("mm",)), ("triton_poi_fused_mul_silu_0", "Triton", 0, ("silu", "mul"))],
        "2 kernels: one GEMM (library); silu and product in one pointwise kernel (Triton)",
    ),
    "nothing": (module(""), [], "0 kernels: no GEMM found; no silu or no product found"),
}


@pytest.mark.parametrize("case", CASES)
def test_launches_and_verdict(case):
    code, launches, verdict = CASES[case]
    found = parse(code)
    assert found.launches == tuple(Launch(*launch) for launch in launches)
    assert found.verdict == verdict
    assert found.gemms_fused == ("both" in case)


def test_what_reaches_memory_is_rounded():
    rounds = {case: parse(code).rounds for case, (code, *_) in CASES.items()}
    assert set(rounds.values()) == {("gate", "up"), ("up",), ()}
    assert all(("epilogue of one GEMM" in CASES[case][2]) == (found == ("up",)) for case, found in rounds.items())


def test_a_compiled_module_is_seen_without_a_reset():
    """The rounding is read from the code; what was compiled before stays compiled."""
    problem = Problem(4, 16, 24)
    kernel, inputs = TorchCompile(), make_inputs(problem, "normal", 0)
    weights = kernel.prepare(inputs.weights, problem, CompileConfig())
    before = kernel.compile(problem, CompileConfig(), FUSED_CASTS, torch.device("cpu"))
    bound = before.bind(Operands(inputs.x, weights, make_out(problem)))
    watched = replace(kernel.compile(problem, CompileConfig(), FUSED_CASTS, torch.device("cpu")), watch=True)
    watched.arithmetic = replace(FUSED_CASTS, rounds=())
    watched.bind(Operands(inputs.x, weights, make_out(problem)))
    assert watched.arithmetic == FUSED_CASTS
    with torch.compiler.set_stance("fail_on_recompile"):
        bound.run()


def test_silu_apart_from_the_product():
    alone = POINTWISE.replace("aten.silu, aten.mul", "aten.silu").replace("mul_silu", "silu")
    epilogue = EPILOGUE.replace("aten.silu, aten.mul", "aten.mul")
    calls = (EXTERN, run("triton_poi_fused_silu_0"), run("triton_tem_fused_mm_mul_silu_t_1"))
    verdict = parse(module(alone + epilogue, *calls)).verdict
    assert verdict.endswith("silu in one pointwise kernel (Triton), product in the epilogue of one GEMM (Triton)")


def test_an_operation_above_a_kernel_counts_and_not_its_name():
    """CUTLASS's kernels are named by a hash; a comment two kernels up is no kernel's."""
    code = module(CUTLASS, EXTERN, run_cutlass("cutlass_1a2b3c4d"))
    assert [launch.ops for launch in parse(code).launches] == [("mm",), ("mm",)]
    bare = module(CUTLASS.replace("Original ATen", "Nothing"), "extern_kernels.addmm(a, b, c, out=d)")
    assert parse(bare).launches == (Launch("extern_kernels.addmm", LIBRARY, 1, ("addmm",)),)


def needs_a_compiler() -> None:
    if reason := TorchCompile().why_not(SMALL, CompileConfig(), FUSED_CASTS, CPU):
        pytest.skip(reason)


def test_on_a_cpu_the_library_multiplies_and_one_kernel_has_the_rest():
    needs_a_compiler()
    report = examine(SMALL, CompileConfig(), CPU)
    assert (report.status, report.reason) == ("ok", None)
    assert report.generated is not None
    *gemms, pointwise = report.generated.launches
    assert gemms == [Launch("extern_kernels.mm", LIBRARY, 1, ("mm",))] * 2
    assert (pointwise.by, pointwise.gemms, pointwise.ops) == ("C++", 0, ("silu", "mul"))
    assert not report.generated.gemms_fused


@pytest.mark.parametrize("mode", ["max-autotune", "cutlass"])
def test_a_mode_that_cannot_run_is_a_report_with_its_reason(mode):
    report = examine(SMALL, CompileConfig(mode), CPU)
    assert (report.status, report.generated) == ("unsupported", None)
    assert "only mode=default" in str(report.reason)


def test_a_failure_is_a_report(monkeypatch):
    def fails(*_):
        raise RuntimeError("no such thing\nat line 3")

    monkeypatch.setattr("triton_baselines.generated.code_of", fails)
    monkeypatch.setattr(TorchCompile, "why_not", lambda *_: None)
    report = examine(SMALL, CompileConfig(), CPU)
    assert (report.status, report.reason) == ("failed", "RuntimeError: no such thing")


def test_reports_survive_their_json(tmp_path):
    made = Report("mode=default", 16, 96, 64, "bf16", "NVIDIA H200", "2.11", generated=parse(CASES["nothing"][0]))
    fused = Report("mode=a", 16, 96, 64, "bf16", "H", "2.11", generated=parse(CASES["both GEMMs in one kernel"][0]))
    failed = Report("mode=cutlass", 16, 96, 64, "bf16", "cpu", "2.11", "failed", "it broke", run="r")
    path = tmp_path / "g.jsonl"
    path.write_text("\n".join(['{"environment": {}}', *(report.to_json() for report in (made, fused, failed))]))
    assert load(path) == [made, fused, failed]
    assert json.loads(fused.to_json())["generated"]["verdict"].startswith("1 kernel: both GEMMs")


def test_the_command_stores_and_shows_every_mode(tmp_path, capsys):
    needs_a_compiler()
    out = tmp_path / "g.jsonl"
    options = ["generated", "--model", "smollm2-135m", "--tokens", "2", "--device", "cpu", "--out", str(out)]
    assert main([*options, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("unsupported") == len(MODES) - 1
    assert "2 GEMMs, each a kernel of its own (library)" in shown
    assert [report.config for report in load(out)] == [f"mode={mode}" for mode in MODES]
    assert "environment" in json.loads(out.read_text().splitlines()[0])
    assert main(["generated", "--from", str(out)]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("text", ['{"kernel": "torch.eager"}', "[]", '{"generated": {"config": "mode=default"}}'])
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ArgumentError, match="holds no generated code"):
        load(path)


def test_the_cutlass_backend_runs_only_by_name():
    kernel = TorchCompile()
    assert "mode=cutlass" not in map(str, kernel.configs(SMALL))
    for device in (CPU, torch.device("cuda")):
        assert all(config.mode in MODES for config, _ in kernel.defaults(SMALL, device))
    assert CompileConfig.parse("mode=cutlass").autotunes
    assert next(iter(kernel.arithmetics(SMALL))) == FUSED_CASTS


def test_the_cutlass_backend_says_what_is_missing(monkeypatch, tmp_path):
    for name in ("CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs nvcc" in str(inductor_cutlass.why_not())
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert inductor_cutlass.why_not() is None
    assert inductor_cutlass.options()["cuda.cuda_cxx"] == str(nvcc)
    monkeypatch.setattr(inductor_cutlass, "find_spec", lambda name: None if name == "pycute" else object())
    assert "nvidia-cutlass, which has pycute" in str(inductor_cutlass.why_not())


IMPORTS = """
import importlib, torch
from torch._inductor import config
from triton_baselines import inductor_cutlass
options = inductor_cutlass.options()
torch.compile(lambda x: x, options=options)  # refuses an option that it does not know, or of another type
name = "cutlass.utils" if importlib.util.find_spec("torch._inductor.codegen.cutlass.utils") else "cuda.cutlass_utils"
with config.patch({key: value for key, value in options.items() if "cutlass" in key}):
    assert importlib.import_module(f"torch._inductor.codegen.{name}").try_import_cutlass()
"""


def test_inductor_imports_the_installed_cutlass(tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CUTLASS_ALLOWLIST", None)
    for _ in range(2):  # the second finds the folder
        command = [sys.executable, "-c", IMPORTS]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
    folder = next(tmp_path.glob("cutlass-*"))
    assert (folder / "include" / "cutlass" / "cutlass.h").is_file()
    assert (folder / "tools" / "util" / "include").is_dir()
