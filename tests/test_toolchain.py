"""The toolchain: which compiler it takes, what it builds once, what it never loads; most of it with an nvcc of sh."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from cutlass_kernels import builds, cache, compiler, toolchain
from cutlass_kernels.unit import Unit
from fused_swiglu import ArgumentError, Kernel, registry
from fused_swiglu.cli import main

# How a kernel here exports a function, and launches on a stream that it is given.
SCALE = r"""
#include <cuda_runtime.h>
#include <tvm/ffi/function.h>

__global__ void scale(float* x, int64_t n) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= FACTOR;
}

void run(int64_t x, int64_t n, int64_t stream) {
  if (n < 0) TVM_FFI_THROW(ValueError) << "n is " << n;
  scale<<<unsigned((n + 255) / 256), 256, 0, reinterpret_cast<cudaStream_t>(stream)>>>(reinterpret_cast<float*>(x), n);
  if (cudaError_t error = cudaGetLastError()) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(error);
}

int64_t factor(int64_t a, int64_t b) { return FACTOR * a + b; }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(factor, factor);
"""
# Plain C, for ctypes; its kernel would be one FFMA if nvcc were free to fuse.
PLAIN = """
__global__ void axpy(float* x, float a) { x[threadIdx.x] = a * x[threadIdx.x] + x[32]; }
extern "C" __attribute__((visibility("default"))) int factor() { return FACTOR; }
"""
PACKAGE = compiler._package
try:
    NO_COMPILER = None if compiler.find_tools() else ""
except ArgumentError as error:
    NO_COMPILER = str(error)
compiles = pytest.mark.skipif(NO_COMPILER is not None, reason=f"compiles: {NO_COMPILER}")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def nvcc_of_sh(home: Path, version: str = "13.0.88", body: str = "", said: str | None = None) -> Path:
    """An nvcc that writes its version and the command into the library, and counts its runs in home/runs."""
    said = f"Cuda compilation tools, release {version[:4]}, V{version}" if said is None else said
    return executable(
        home / "bin" / "nvcc",
        f"if [ $1 = --version ]; then echo '{said}'; exit 0; fi\n"
        f'for out; do :; done\necho x >> {home}/runs\n{body}\necho {version} "$@" > $out\n',
    )


def runs(home: Path) -> int:
    return len((home / "runs").read_text().split()) if (home / "runs").exists() else 0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a host compiler, but neither an nvcc on PATH, nor one among Python's packages, nor a cache."""
    for name in ("CUDA_HOME", "CUTLASS_PATH", *compiler.NVCC_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FUSED_SWIGLU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(executable(tmp_path / "host" / "g++", "").parent))
    without(monkeypatch, "nvidia-cuda-nvcc")
    return tmp_path


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Packages that are not installed, as the toolchain sees it."""

    def found(name: str):
        if name in names:
            raise PackageNotFoundError(name)
        return PACKAGE(name)

    monkeypatch.setattr(compiler, "_package", found)


def on_path(monkeypatch: pytest.MonkeyPatch, *nvccs: Path) -> None:
    folders = [str(nvcc.parent) for nvcc in nvccs]
    monkeypatch.setenv("PATH", os.pathsep.join([*folders, os.environ["PATH"]]))


@pytest.fixture
def nvcc(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of an nvcc on PATH."""
    on_path(monkeypatch, nvcc_of_sh(site / "cuda"))
    return site / "cuda"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "src" / "include").mkdir(parents=True)
    (tmp_path / "src" / "include" / "part.h").write_text("// part\n")
    path = tmp_path / "src" / "scale.cu"
    path.write_text('#include "part.h"\n')
    return path


def unit_of(source: Path, factor: int = 1) -> Unit:
    return Unit(str(source), (("FACTOR", factor),), ctypes=True)


# Which compiler


def test_old_nvcc_on_path_is_refused_with_path_version_and_remedy(site: Path, monkeypatch) -> None:
    old = nvcc_of_sh(site / "old", "11.8.89")
    on_path(monkeypatch, old)
    with pytest.raises(ArgumentError) as caught:
        compiler.find_tools()
    assert all(part in str(caught.value) for part in (str(old), "11.8.89", "12.8", "pip install"))


@pytest.mark.parametrize(
    ("version", "taken"), [("12.7.99", False), ("12.8.0", True), ("12.10.0", True), ("13.10.1", True)]
)
def test_versions_compare_as_numbers(version: str, taken: bool, site: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(nvcc_of_sh(site / "a", version).parent.parent))
    if taken:
        assert compiler.find_tools().nvcc_version == version
    else:
        with pytest.raises(ArgumentError, match=r"CUDA_HOME.*12\.7\.99"):
            compiler.find_tools()


def test_order_is_cuda_home_packages_path_and_goes_past_an_old_one(site: Path, monkeypatch) -> None:
    old, good = nvcc_of_sh(site / "old", "12.0.1"), nvcc_of_sh(site / "good")
    on_path(monkeypatch, old, good)
    assert compiler.find_tools().nvcc == good
    packages = site / "packages"
    packaged = nvcc_of_sh(packages / "nvidia" / "cu13", "13.1.1")
    (packages / "nvidia_cuda_nvcc-13.1.dist-info").mkdir()
    (packages / "nvidia_cuda_nvcc-13.1.dist-info" / "METADATA").write_text("Name: nvidia-cuda-nvcc\nVersion: 13.1\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(compiler, "_package", PACKAGE.__wrapped__)
    assert compiler.find_tools().nvcc == packaged
    named = nvcc_of_sh(site / "named", "12.9.1")
    monkeypatch.setenv("CUDA_HOME", str(site / "named"))
    assert compiler.find_tools().nvcc == named


@pytest.mark.usefixtures("nvcc")
def test_cuda_home_without_nvcc_is_named_though_path_has_one(site: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(site / "nowhere"))
    with pytest.raises(ArgumentError, match=r"^CUDA_HOME: is .*nowhere.*unset it"):
        compiler.find_tools()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo 'libfoo is missing' >&2; exit 127", "libfoo is missing"),
        ("exit 3", "exit code 3"),
        ("echo nvcc of some kind", "nvcc of some kind"),
        (None, "cannot be run"),
    ],
)
def test_a_broken_nvcc_is_named_and_passed_over(text: str | None, says: str, site: Path, monkeypatch) -> None:
    broken = executable(site / "broken" / "bin" / "nvcc", text or "")
    if text is None:
        broken.write_bytes(b"\x7fELF of another machine")
    on_path(monkeypatch, broken)
    with pytest.raises(ArgumentError, match=says) as caught:
        compiler.find_tools()
    assert str(broken) in str(caught.value)
    good = nvcc_of_sh(site / "good")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{good.parent}")
    assert compiler.find_tools().nvcc == good


def test_nothing_there_is_one_line_and_no_exception(site: Path, source: Path) -> None:
    reason = toolchain.why_not(unit_of(source))
    assert reason is not None
    assert "\n" not in reason
    assert all(part in reason for part in ("no build", "pip install '.[cuda]'", str(site / "cache")))
    with pytest.raises(ArgumentError, match="pip install"):
        toolchain.build([unit_of(source)])


def test_a_missing_host_compiler_is_named(site: Path, nvcc: Path, monkeypatch) -> None:
    (site / "host" / "g++").unlink()
    with pytest.raises(ArgumentError, match=r"g\+\+"):
        compiler.find_tools()
    monkeypatch.setenv("NVCC_CCBIN", "clang++")
    assert compiler.find_tools().nvcc == nvcc / "bin" / "nvcc"


@pytest.mark.usefixtures("nvcc")
def test_cutlass_is_taken_from_cutlass_path_or_its_package(site: Path, monkeypatch) -> None:
    assert compiler.find_tools().cutlass_version == distribution("nvidia-cutlass").version[:5]
    header = site / "CUTLASS" / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 6\n#define CUTLASS_PATCH 1 // of it\n")
    for named in (site / "CUTLASS", site / "CUTLASS" / "include"):
        monkeypatch.setenv("CUTLASS_PATH", str(named))
        tools = compiler.find_tools()
        assert (tools.cutlass, tools.cutlass_version) == (site / "CUTLASS" / "include", "4.6.1")
    monkeypatch.setenv("CUTLASS_PATH", str(site))
    with pytest.raises(ArgumentError, match=r"CUTLASS_PATH.*version\.h"):
        compiler.find_tools()
    monkeypatch.delenv("CUTLASS_PATH")
    without(monkeypatch, "nvidia-cuda-nvcc", "nvidia-cutlass")
    with pytest.raises(ArgumentError, match=r"CUTLASS_PATH.*pip install nvidia-cutlass"):
        compiler.find_tools()


# What is built


@pytest.mark.usefixtures("site")
def test_everything_that_is_compiled_is_in_the_key(source: Path) -> None:
    unit = unit_of(source)
    keys = [unit.key]
    for other in (unit_of(source, 2), Unit(str(source)), Unit(str(source), unit.defines, ("-G",), ctypes=True)):
        keys.append(other.key)
    include = source.parent / "include"
    (include / "deep").mkdir()
    texts = (
        (include / "part.h", "#include <deep/new.h>\n"),
        (include / "deep" / "new.h", '#  include "beside.h"\n'),
        (include / "deep" / "beside.h", "// the first\n"),
        (include / "deep" / "beside.h", "// changed\n"),
        (source, '#include "part.h"\n// changed\n'),
    )
    for path, text in texts:
        path.write_text(text)
        keys.append(unit.key)
    assert len(set(keys)) == len(keys)
    (include / "of_another.h").write_text("// nobody includes it\n")
    os.utime(source, (0, 0))
    assert unit.key == keys[-1]


def test_one_unit_has_one_spelling(source: Path) -> None:
    assert Unit(str(source), (("A", True),)) == Unit(str(source), (("A", 1),))
    with pytest.raises(ArgumentError, match="source"):
        Unit("nothing.cu")


def test_a_unit_is_compiled_once_by_each_compiler(nvcc: Path, source: Path) -> None:
    units = [unit_of(source, factor) for factor in (1, 2)]
    seen = []
    built = toolchain.build([*units, units[0]], progress=lambda *step: seen.append(step))
    assert sorted(step[:2] for step in seen) == [(1, 2), (2, 2)]
    assert toolchain.build(units) == built
    assert runs(nvcc) == 2
    assert "FACTOR=2" in built[units[1]].read_text()
    nvcc_of_sh(nvcc, "13.1.2")
    newer = toolchain.build(units)
    assert runs(nvcc) == 4
    assert set(newer.values()).isdisjoint(built.values())
    assert newer[units[0]].read_text().startswith("13.1.2")


def test_a_source_that_is_edited_while_it_compiles_is_compiled_again(nvcc: Path, source: Path) -> None:
    """Else what nvcc read before would stand under the name of what is there now."""
    nvcc_of_sh(nvcc, body=f"[ -e {nvcc}/edited ] || echo '// edited' >> {source}; : > {nvcc}/edited")
    library = toolchain.build_one(unit_of(source))
    assert runs(nvcc) == 2
    assert toolchain.find(unit_of(source)) == library
    assert [entry.library for entry in cache.entries(cache.root())] == [library]


def test_failures_do_not_stop_the_others(nvcc: Path, source: Path) -> None:
    nvcc_of_sh(nvcc, body='case "$*" in *FACTOR=2*) echo note; echo "a.cu(3): error: no such tile" >&2; exit 1;; esac')
    units = [unit_of(source, factor) for factor in (1, 2, 3)]
    with pytest.raises(ExceptionGroup) as caught:
        toolchain.build(units, jobs=1)
    [error] = caught.value.exceptions
    assert isinstance(error, toolchain.BuildError)
    assert (error.unit, error.errors) == (units[1], ["a.cu(3): error: no such tile"])
    assert "note" in error.log.read_text()
    assert [toolchain.find(unit) is not None for unit in units] == [True, False, True]
    assert not list(cache.root().glob(".*"))


@pytest.fixture
def _everywhere(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes take that nvcc too, whatever Python's packages have."""
    monkeypatch.setenv("CUDA_HOME", str(nvcc))


RACER = """
import sys
from cutlass_kernels import toolchain
from cutlass_kernels.unit import Unit
print(toolchain.build_one(Unit(sys.argv[1], (("FACTOR", 1),), ctypes=True)))
"""


@pytest.mark.usefixtures("_everywhere")
def test_two_processes_on_an_empty_cache(nvcc: Path, source: Path) -> None:
    """Each nvcc waits for the other, so that both compile."""
    nvcc_of_sh(nvcc, body=f"while [ $(wc -l < {nvcc}/runs) -lt 2 ] && [ $((n+=1)) -lt 999 ]; do sleep 0.02; done")
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/bin:/bin"}
    command = [sys.executable, "-c", RACER, str(source)]
    racers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {racer.communicate(timeout=30)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0]
    assert runs(nvcc) == 2
    assert said == {str(toolchain.find(unit_of(source)))}
    assert len(list(cache.root().iterdir())) == 1


@pytest.mark.usefixtures("_everywhere")
def test_a_killed_build_leaves_nothing_that_is_found(nvcc: Path, source: Path) -> None:
    nvcc_of_sh(nvcc, body=f"echo half > $out; : > {nvcc}/half; exec /bin/sleep 60")
    racer = subprocess.Popen([sys.executable, "-c", RACER, str(source)], start_new_session=True)
    wait_for((nvcc / "half").exists)
    os.killpg(racer.pid, signal.SIGKILL)
    racer.wait()
    [leftover] = cache.root().iterdir()
    assert (leftover / cache.LIBRARY).read_text() == "half\n"
    assert toolchain.find(unit_of(source)) is None
    nvcc_of_sh(nvcc)
    assert toolchain.build_one(unit_of(source)).read_text().startswith("13.0.88")
    assert leftover.exists()  # for all that the second build knows it is being written
    os.utime(leftover, (0, 0))
    toolchain.build_one(unit_of(source, 2))
    assert not leftover.exists()


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from cutlass_kernels import toolchain
from cutlass_kernels.unit import Unit
toolchain.build([Unit(sys.argv[1], (("FACTOR", factor),), ctypes=True) for factor in range(3)], jobs=1)
"""


@pytest.mark.usefixtures("_everywhere")
def test_an_interrupt_ends_what_runs_starts_no_more_and_leaves_nothing(nvcc: Path, source: Path) -> None:
    """Only Python gets the signal, as from a notebook; from a terminal nvcc would, too."""
    nvcc_of_sh(nvcc, body=f": > {nvcc}/half; exec /bin/sleep 60")
    command = [sys.executable, "-c", INTERRUPTED, str(source)]
    builder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for((nvcc / "half").exists)
    builder.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in builder.communicate(timeout=20)[1]
    assert runs(nvcc) == 1
    assert cache.entries(cache.root()) == []
    assert not list(cache.root().glob(".*"))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.usefixtures("nvcc")
@pytest.mark.parametrize("folder", ["/proc/fused-swiglu", "/dev/null"])
def test_a_cache_that_cannot_be_written_is_one_error(folder: str, source: Path, monkeypatch) -> None:
    monkeypatch.setenv("FUSED_SWIGLU_CACHE", folder)
    with pytest.raises(ArgumentError, match=f"FUSED_SWIGLU_CACHE: cannot write in {folder}"):
        toolchain.build_one(unit_of(source))


def test_a_read_only_cache_serves_what_is_in_it(nvcc: Path, source: Path, monkeypatch) -> None:
    built = toolchain.build_one(unit_of(source))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))  # as root, too
    assert toolchain.build_one(unit_of(source)) == built
    nvcc_of_sh(nvcc, "13.1.2")
    assert toolchain.build_one(unit_of(source)) == built  # of another compiler, but this one cannot write
    assert "FUSED_SWIGLU_CACHE" in (toolchain.why_not(unit_of(source, 2)) or "")
    assert toolchain.why_not(unit_of(source)) is None


def test_a_library_that_was_cut_short_is_not_used(nvcc: Path, source: Path, monkeypatch) -> None:
    built = toolchain.build_one(unit_of(source))
    whole = built.read_text()
    for broken in (whole[:-5], "", whole.replace("13", "31")):
        built.write_text(broken)
        os.utime(built, (0, 0))  # so that it has changed for a coarse clock, too
        assert toolchain.find(unit_of(source)) is None
        assert cache.entry(built.parent).state == "broken"
        assert toolchain.build_one(unit_of(source)).read_text().startswith("13")
    built.unlink()
    (nvcc / "bin" / "nvcc").unlink()
    assert "no build" in (toolchain.why_not(unit_of(source)) or "")


def test_a_copied_cache_serves_a_machine_without_any_tools(site: Path, nvcc: Path, source: Path, monkeypatch) -> None:
    toolchain.build_one(unit_of(source))
    nvcc_of_sh(nvcc, "13.1.2")
    toolchain.build_one(unit_of(source))
    shutil.move(site / "cache", site / "copy")
    shutil.rmtree(nvcc)
    without(monkeypatch, "nvidia-cuda-nvcc", "nvidia-cutlass", "apache-tvm-ffi")
    monkeypatch.setenv("FUSED_SWIGLU_CACHE", str(site / "copy"))
    assert toolchain.why_not(unit_of(source)) is None
    assert toolchain.build_one(unit_of(source)).read_text().startswith("13.1.2")  # the newest
    assert toolchain.why_not(unit_of(source, 2))
    source.write_text("// changed\n")
    assert toolchain.why_not(unit_of(source))


def test_where_the_cache_is(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FUSED_SWIGLU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root() == tmp_path / ".cache" / "fused-swiglu"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "xdg" / "fused-swiglu"
    monkeypatch.setenv("FUSED_SWIGLU_CACHE", str(tmp_path / "own"))
    assert cache.root() == tmp_path / "own"
    assert cache.root(tmp_path) == tmp_path


# The commands


class Compiled(Kernel):
    """A kernel with three configs, of which two are one unit."""

    name, role = "cutlass.fake", "control"

    def __init__(self, source: Path) -> None:
        self.source = source

    def units(self) -> Iterator[tuple[str, Unit]]:
        for text, factor in (("tile=1,rows=1", 1), ("tile=1,rows=2", 1), ("tile=2,rows=1", 2)):
            yield text, unit_of(self.source, factor)

    arithmetics = compile = None  # type: ignore[assignment]


@pytest.fixture
def compiled(source: Path, kernels: None) -> None:
    registry.register(Compiled(source))


@pytest.mark.usefixtures("compiled")
def test_build_and_cache_commands(nvcc: Path, source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert set(builds.catalogue(["cutlass.fake"])) == {
        ("cutlass.fake", "tile=1,rows=1"),
        ("cutlass.fake", "tile=1,rows=2"),
        ("cutlass.fake", "tile=2,rows=1"),
    }
    command = ["build", "--kernels", "cutlass.fake"]
    assert main([*command, "--config", "tile=1*"]) == 0
    assert "1 built by nvcc 13.0.88" in capfd.readouterr().out
    assert main([*command, "--jobs", "1"]) == 0
    assert "1 built by nvcc 13.0.88 with CUTLASS 4.2.0, 1 were there, 0 failed" in capfd.readouterr().out
    assert runs(nvcc) == 2
    assert main(["cache"]) == 0
    out = capfd.readouterr().out
    assert "2 builds" in out
    assert "cutlass.fake  tile=1,rows=1 (+1)" in out
    assert "cutlass.fake  tile=2,rows=1 " in out
    source.write_text("// changed\n")
    assert main(["cache"]) == 0
    assert capfd.readouterr().out.count("outdated") == 2
    assert main([*command, "--config", "tile=2*"]) == 0
    capfd.readouterr()
    assert main(["cache", "--prune"]) == 0
    out = capfd.readouterr().out
    assert out.count("outdated: ") == 2
    assert "1 builds left" in out
    assert main(["cache", "--prune", "--older-than", "1"]) == 0
    assert "0 deleted" in capfd.readouterr().out
    assert main(["cache", "--prune", "--older-than", "0"]) == 0
    assert "0 builds left" in capfd.readouterr().out


@pytest.mark.usefixtures("compiled")
def test_build_names_the_config_that_fails(nvcc: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nvcc_of_sh(nvcc, body='case "$*" in *FACTOR=2*) echo "a.cu(3): error: no such tile"; exit 1;; esac')
    elsewhere = tmp_path / "elsewhere"
    assert main(["build", "--kernels", "cutlass.f*", "--cache", str(elsewhere)]) == 1
    out, err = capfd.readouterr()
    assert err.count("\n") == 1
    assert "cutlass.fake tile=2,rows=1: a.cu(3): error: no such tile" in err
    assert "1 built" in out
    assert len(cache.entries(elsewhere)) == 1


@pytest.mark.usefixtures("compiled", "site")
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["build", "--kernels", "cutlass.fake"], "CUDA_HOME: not set"),
        (["build", "--kernels", "cutlass.fake", "--config", "tile=9"], "--config: nothing matches tile=9"),
        (["build", "--kernels", "nothing.*"], "--kernels: nothing matches"),
        (["build", "--kernels", "torch.eager"], "not compiled by nvcc"),
        (["build", "--jobs", "0"], "--jobs: 0 is too small"),
        (["cache", "--older-than", "3"], "--older-than: goes with --prune"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert says in err


def test_help_lists_the_commands_and_imports_no_torch() -> None:
    script = "import sys\nfrom fused_swiglu.cli import main\nmain(['--help'])\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert re.search(r"^  build +compile", done.stdout, re.MULTILINE)
    assert re.search(r"^  cache +list", done.stdout, re.MULTILINE)
    assert done.stdout.split()[-1] == "False"


# With a real nvcc


@compiles
def test_exported_functions_of_two_units_in_one_process(tmp_path: Path, monkeypatch) -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    monkeypatch.setenv("FUSED_SWIGLU_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "scale.cu"
    source.write_text(SCALE)
    units = [Unit(str(source), (("FACTOR", factor),)) for factor in (3, 5)]
    assert [toolchain.why_not(unit) for unit in units] == [None, None]
    toolchain.build(units)
    modules = [toolchain.load(unit) for unit in units]
    assert isinstance(modules[0], tvm_ffi.Module)
    assert [module.factor(2, 1) for module in modules] == [7, 11]
    with pytest.raises(ValueError, match="n is -1"):
        modules[0].run(0, -1, 0)


@compiles
def test_a_plain_library_for_sm_90a_alone_without_fused_multiply_adds(tmp_path: Path, monkeypatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("FUSED_SWIGLU_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "plain.cu"
    source.write_text(PLAIN)
    library = toolchain.build_one(unit_of(source, 7))
    assert toolchain.load(unit_of(source, 7)).factor() == 7
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    dumped = [
        subprocess.run([cuobjdump, o, library], capture_output=True, text=True).stdout for o in ("-lelf", "-sass")
    ]
    assert dumped[0].count("cubin") == dumped[0].count("sm_90a.cubin") >= 1
    assert "FMUL" in dumped[1]
    assert "FFMA" not in dumped[1]


@compiles
def test_errors_of_a_real_nvcc(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text('#include "absent.h"\n')
    with pytest.raises(toolchain.BuildError, match=r"wrong\.cu FACTOR=1: .*absent\.h"):
        toolchain.build_one(unit_of(source), tmp_path / "cache")
