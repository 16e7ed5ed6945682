"""The wgmma harness without a GPU: what its kernels consist of, and that its operands tell mistaken rules apart."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import harness
import numpy as np
import pytest
import triton

from cutlass_kernels import toolchain
from fused_swiglu.sm90 import accumulate

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="needs Triton's cuobjdump")
def test_every_kernel_is_one_instruction_of_its_shape_and_source(tmp_path):
    if reason := toolchain.why_not(harness.UNIT, tmp_path):
        pytest.skip(reason)
    library = toolchain.build_one(harness.UNIT, tmp_path)
    sass = subprocess.run([DISASSEMBLER, "-sass", library], check=True, capture_output=True, text=True).stdout
    kernels = {re.match(r"\S*?kernel_(\w+?)PK", text)[1]: text for text in sass.split("Function : ")[1:]}
    assert len(kernels) == len(harness.FORMATS) * len(harness.WIDTHS) * len(harness.SOURCES_OF_A)
    for name, form in harness.FORMATS.items():
        operation = "HGMMA" if form.dtype.itemsize == 2 else "QGMMA"
        suffix = "" if name == "fp16" else ".BF16" if name == "bf16" else f".{name}.{name}".upper()
        for n in harness.WIDTHS:
            for source in harness.SOURCES_OF_A:
                text = kernels[f"{form.ptx}_n{n}_{source}"]
                (found,) = re.findall(r"[HQ]GMMA.*;", text)
                a = r"gdesc\S+" if source == "shared" else r"R\d+, gdesc\S+"
                shape = f"64x{n}x{form.rule.products}"
                assert re.match(rf"{operation}\.{shape}\.F32{suffix} (R\d+), {a}, \1,", found), found
                assert not re.search(r"\b(LDL|STL)\b", text), "spills"


MISTAKES = {
    "a bit less": lambda rule: replace(rule, fraction=rule.fraction - 1),
    "a bit more": lambda rule: replace(rule, fraction=rule.fraction + 1),
    "half the products": lambda rule: replace(rule, products=rule.products // 2),
    "a kept bit less": lambda rule: replace(rule, kept=rule.kept - 1),
}


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
@pytest.mark.parametrize("kind", ["aligned", "normal", "special"])
@pytest.mark.parametrize("name", sorted(harness.FORMATS))
def test_operands_tell_mistaken_rules_apart(name, kind, mistake):
    a, b, c = harness.draw(kind, name, 2, 256, seed=1)
    wrong = MISTAKES[mistake](harness.FORMATS[name].rule)
    pairs = [(accumulate(a[t], b[t], c=c[t]), accumulate(a[t], b[t], c=c[t], step=wrong)) for t in range(2)]
    shares = [(right.view(np.int32) != other.view(np.int32)).mean() for right, other in pairs]
    assert min(shares) > (0.15 if kind == "aligned" else 0.01)


@pytest.mark.parametrize("kind", sorted(harness.KINDS))
@pytest.mark.parametrize("name", sorted(harness.FORMATS))
def test_operands_are_reproducible_and_of_their_shape(name, kind):
    drawn, again = (harness.draw(kind, name, 3, 8, seed=2) for _ in range(2))
    k = harness.FORMATS[name].rule.products
    assert [tuple(t.shape) for t in drawn] == [(3, 64, k), (3, 8, k), (3, 64, 8)]
    words = [t.view(harness.FORMATS[name].words) if i < 2 else t.view(np.int32) for i, t in enumerate(drawn)]
    others = [t.view(harness.FORMATS[name].words) if i < 2 else t.view(np.int32) for i, t in enumerate(again)]
    assert all(bool((x == y).all()) for x, y in zip(words, others, strict=True))
    assert len(np.unique(words[2])) > 20
