"""Every relation on every kernel, config and arithmetic on the GPU."""

import properties
import pytest
from hypothesis import given, settings
from subjects import Case

EXAMPLES = settings().max_examples  # of the profile


@pytest.mark.parametrize(("relation", "name"), properties.pairs("cuda"))
def test_relation(relation, name):
    few = max(5, EXAMPLES // 5) if name.startswith("triton.") else EXAMPLES  # compiled for each alignment and config

    @settings(max_examples=few)
    @given(properties.cases(relation, name, "cuda", max_m=300, max_n=300, max_k=600))
    def holds(case):
        properties.check(case)

    holds()


def test_replay(replayed):
    properties.check(Case.from_dict(replayed))
