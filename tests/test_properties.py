"""Every relation on every kernel that runs on a CPU and on the model, at the shapes where kernels fail."""

import properties
import pytest
from hypothesis import given, settings

from fused_swiglu.testing.subjects import MODEL, Case

LARGEST = {"max_m": 129, "max_n": 129, "max_k": 193}
SMALL = {"max_m": 70, "max_n": 70, "max_k": 100}  # takes 0.1 s in an interpreter
EXAMPLES = settings().max_examples  # of the profile


@pytest.mark.parametrize(("relation", "name"), properties.pairs("cpu"))
def test_relation(relation, name):
    model = name == MODEL

    @settings(max_examples=EXAMPLES if model else max(2, EXAMPLES // 6))
    @given(properties.cases(relation, name, "cpu", **LARGEST if model else SMALL))
    def holds(case):
        properties.check(case)

    holds()


def test_replay(replayed):
    properties.check(Case.from_dict(replayed))
