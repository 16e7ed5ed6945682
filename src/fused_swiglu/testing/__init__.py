"""For tests of kernels: hypothesis strategies, relations that kernels obey, and assertions that say what is wrong.

Strategies draw shapes, layouts, strides and seeds at the boundaries where kernels fail, never whole matrices:
`problems`, `families`, `seeds` for `inputs.make_inputs`, `edits` for `apply_edits`. Assertions fail with how many
outputs are wrong, in which rows and columns, the first coordinates, and how far: `assert_bits_equal`,
`assert_within_ulps`, `assert_batch_invariant`, `assert_padding_poisoned`. Relations are both in one: what is
`implied_by` a declared `Arithmetic` must hold, and needs no reference to compare with: small integers, one-hot rows,
sparse NaN, permuted rows, a row alone, and more.

A kernel of your own is a function of out[m, n], x[m, k] and weights [n, k]:

    DECLARED = Arithmetic("undeclared", "ieee")   # any order of sums; fp32 to the end, rounded once

    @pytest.mark.parametrize("relation", implied_by(DECLARED))
    @given(data=st.data())
    def test_relation(relation, data):
        case = data.draw(cases(relation, DECLARED, max_m=40, max_n=40, max_k=100))
        assert_holds(case, my_kernel)

    @given(problems(dtypes=("bf16",)), families(), seeds())
    def test_distance(problem, family, seed):
        inputs, out = make_inputs(problem, family, seed), make_out(problem)
        my_kernel(out, inputs.x, inputs.weights)
        assert_within_ulps(out, exact(inputs.x, inputs.weights, out_dtype=out.dtype), 1, max_share=0.01)
        assert_padding_poisoned(out)

Where a test fails because of what a kernel rounds, the attribution ladder says where it does:

    print(fused_swiglu.ladder.ladder(out, inputs.x, inputs.weights, DECLARED))

tests/test_own_kernel_example.py is this whole, with a Triton kernel into which faults are planted. A class of kernels
behind the `Kernel` interface gets more: `fused-swiglu check`, `compare` and `explain`.

Needs hypothesis (the `test` extra).
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "fused_swiglu.testing needs hypothesis: pip install '.[test]', or hypothesis alone",
        name="hypothesis",
    ) from None

from .assertions import (
    assert_batch_invariant,
    assert_bits_equal,
    assert_padding_poisoned,
    assert_within_ulps,
    raise_where,
)
from .editing import apply_edits
from .relations import RELATIONS, assert_holds, cases, implied_by
from .strategies import TILES, edits, families, lengths, problems, seeds, sizes, strides

__all__ = [
    "RELATIONS",
    "TILES",
    "apply_edits",
    "assert_batch_invariant",
    "assert_bits_equal",
    "assert_holds",
    "assert_padding_poisoned",
    "assert_within_ulps",
    "cases",
    "edits",
    "families",
    "implied_by",
    "lengths",
    "problems",
    "raise_where",
    "seeds",
    "sizes",
    "strides",
]
