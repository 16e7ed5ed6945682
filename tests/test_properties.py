"""Every relation on every kernel that runs on a CPU and on the model, at the shapes where kernels fail."""

import pytest
import relations
from hypothesis import given, settings

LARGEST = {"max_m": 129, "max_n": 129, "max_k": 193}
SMALL = {"max_m": 70, "max_n": 70, "max_k": 100}  # takes 0.1 s in an interpreter
EXAMPLES = settings().max_examples  # of the profile


@pytest.mark.parametrize(("relation", "name"), relations.pairs("cpu"))
def test_relation(relation, name):
    model = name == relations.MODEL

    @settings(max_examples=EXAMPLES if model else max(2, EXAMPLES // 4))
    @given(relations.cases(relation, name, "cpu", **LARGEST if model else SMALL))
    def holds(case):
        relations.check(case)

    holds()


def test_replay(replayed):
    relations.check(relations.Case.from_dict(replayed))
