"""Every relation on every kernel, config and arithmetic on the GPU."""

import pytest
import relations
from hypothesis import given, settings

EXAMPLES = settings().max_examples  # of the profile


@pytest.mark.parametrize(("relation", "name"), relations.pairs("cuda"))
def test_relation(relation, name):
    @settings(max_examples=EXAMPLES)
    @given(relations.cases(relation, name, "cuda", max_m=300, max_n=300, max_k=600))
    def holds(case):
        relations.check(case)

    holds()


def test_replay(replayed):
    relations.check(relations.Case.from_dict(replayed))
