"""resources: read from a cubin that Triton's ptxas assembles here, and shown for kernels, with no GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fused_swiglu import Arithmetic, Config, Kernel, cli, registry
from fused_swiglu.errors import ArgumentError
from fused_swiglu.resources import Binary, Compilable, disassemble, resources

triton = pytest.importorskip("triton")

# out[i] = fma(2^x, 3, 4) of i = threadIdx.x, by way of shared memory and, where asked, of local memory.
PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry tiny(.param .u64 out, .param .f32 x) {{
  .reg .f32 %f<4>; .reg .b64 %rd<4>; .reg .b32 %r<4>;
  .shared .align 4 .b8 words[512];
  {local}
  ld.param.u64 %rd1, [out]; ld.param.f32 %f1, [x];
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
  ex2.approx.ftz.f32 %f2, %f1;
  fma.rn.f32 %f3, %f2, 0f40400000, 0f40800000;
  mov.u32 %r2, words; mad.lo.u32 %r2, %r1, 4, %r2; st.shared.f32 [%r2], %f3; bar.sync 0; ld.shared.f32 %f3, [words];
  {through}
  st.global.f32 [%rd1], %f3;
  ret;
}}
"""
LOCAL = {
    "local": ".local .align 4 .b8 stack[512]; .reg .b64 %l<3>;",
    "through": "mov.u64 %l1, stack; add.s64 %l2, %l1, %rd2; st.local.f32 [%l2], %f3; ld.local.f32 %f3, [%l1];",
}


def assemble(folder: Path, **parts: str) -> Path:
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    source, cubin = folder / "tiny.ptx", folder / "tiny.cubin"
    source.write_text(PTX.format(**{"local": "", "through": ""} | parts))
    subprocess.run([ptxas, "-arch=sm_90a", source, "-o", cubin], check=True, timeout=60)
    return cubin


@pytest.fixture(scope="module")
def cubin(tmp_path_factory) -> Path:
    return assemble(tmp_path_factory.mktemp("cubin"))


def test_a_cubin_says_what_it_takes_and_holds(cubin) -> None:
    (used,) = resources(cubin)
    assert (used.function, used.stack) == ("tiny", 0)
    assert 512 <= used.shared <= 512 + 1024
    assert 4 <= used.registers <= 32
    assert {name: count for name, count in used.counts.items() if count} == {"MUFU": 1, "FFMA": 1}
    code = disassemble(cubin)["tiny"]
    assert used.instructions == len(code)
    assert "MUFU.EX2" in {instruction.name for instruction in code}


def test_bytes_are_read_as_a_file_is(cubin) -> None:
    assert resources(cubin.read_bytes()) == resources(cubin)


def test_local_memory_shows_as_stack_and_spills(tmp_path) -> None:
    (used,) = resources(assemble(tmp_path, **LOCAL))
    assert used.stack >= 512
    assert used.counts["LDL"] == used.counts["STL"] == 1


@pytest.mark.parametrize("content", [b"", b"no cubin"])
def test_what_is_no_cubin_is_refused(content, tmp_path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ArgumentError, match="cubin"):
        resources(tmp_path / "file")


class Tiny(Kernel):
    """Of one launch, twice the same, or of none."""

    role = "fused"

    def __init__(self, name: str, made: list[Binary] | Exception) -> None:
        self.name, self.made = name, made  # type: ignore[misc]

    def arithmetics(self, problem):
        return Arithmetic("sm90", "ieee"), Arithmetic("sm90", "ex2")

    def compile(self, problem, config, arithmetic, device):
        pytest.fail("resources takes what `binaries` gives; it compiles nothing to run")

    def binaries(self, problem, config: Config, arithmetic: Arithmetic, *, build: bool = False):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made if build or arithmetic.recipe == "ieee" else []


@pytest.fixture
def tiny(cubin):
    before = dict(registry._registered)
    code = cubin.read_bytes()
    registry.register(Tiny("tiny.two", [Binary(code, 4096, stages=3), Binary(cubin, 0)]))
    registry.register(Tiny("tiny.broken", RuntimeError("no such tile")))
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.mark.usefixtures("tiny")
def test_kernels_are_shown_by_launch_with_the_shared_memory_of_each(capsys, cubin, tmp_path) -> None:
    assert isinstance(registry.get_kernel("tiny.two"), Compilable)
    out = tmp_path / "rows.jsonl"
    assert cli.main(["resources", "--kernels", "tiny.two", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    (static,) = resources(cubin)
    lines = [line.split() for line in said.splitlines() if "tiny.two" in line]
    assert [line[:4] for line in lines] == [["tiny.two", "default", "sm90:ieee:out", "tiny"]] * 2
    assert [line[5] for line in lines] == [str(static.shared + 4096), str(static.shared)]
    assert "MUFU" in said
    assert "HGMMA" not in said
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["dynamic"], first["stages"], first["counts"]["MUFU"]) == (4096, 3, 1)
    assert "stages" not in second


@pytest.mark.usefixtures("tiny")
def test_what_is_not_built_or_does_not_compile_is_named(capsys) -> None:
    assert cli.main(["resources", "--kernels", "tiny.two", "--arithmetic", "*ex2*"]) == 0
    said = capsys.readouterr().out
    assert "sm90:ex2:out: not built" in said
    assert "--build" in said
    assert cli.main(["resources", "--kernels", "tiny.two", "--arithmetic", "*ex2*", "--build"]) == 0
    assert "not built" not in capsys.readouterr().out
    assert cli.main(["resources", "--kernels", "tiny.*"]) == 1
    said = capsys.readouterr().out
    assert "tiny.broken default sm90:ieee:out: failed: RuntimeError: no such tile" in said
    assert "tiny.two" in said


def test_a_file_is_shown_without_kernels(capsys, cubin) -> None:
    assert cli.main(["resources", str(cubin)]) == 0
    said = capsys.readouterr().out
    assert "tiny.cubin" in said
    assert "triton" not in said


@pytest.mark.parametrize(
    "options",
    [["nowhere.cubin"], ["--kernels", "torch.eager"], ["--kernels", "triton.*", "--config", "no"], ["--jobs", "0"]],
)
def test_bad_input_is_one_line(options, capsys) -> None:
    assert cli.main(["resources", *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_triton_compiles_for_sm90_here(capsys) -> None:
    pytest.importorskip("triton_baselines")
    config = "bm=64,bn=32,bk=128,stages=6,*"
    assert cli.main(["resources", "--kernels", "triton.fused", "--config", config, "--quiet"]) == 0
    header, line = (text.split() for text in capsys.readouterr().out.splitlines())
    header.remove("function")  # its cell is empty where a kernel has one
    shown = dict(zip(header, line, strict=True))
    assert (shown["kernel"], shown["stages"], shown["spills"]) == ("triton.fused", "6", "0")
    assert min(int(shown[name]) for name in ("HGMMA", "UTMALDG", "UTMASTG", "FFMA")) > 0
    stages = 6 * (64 + 2 * 32) * 128 * 2
    assert stages < int(shown["shared"]) <= 228 * 1024
