"""Every relation on every kernel, config and arithmetic on the GPU; of what nvcc compiles, on `properties.units`."""

import properties
import pytest
from hypothesis import given, settings
from prebuilt import prebuild

from fused_swiglu.testing.subjects import Case

EXAMPLES = settings().max_examples  # of the profile


@pytest.fixture(scope="session", autouse=True)
def _built(request):
    ours = [item for item in request.session.items if item.function is test_relation]
    prebuild(
        unit for name in sorted({item.callspec.params["name"] for item in ours}) for unit in properties.units(name)
    )


@pytest.mark.parametrize(("relation", "name"), properties.pairs("cuda"))
def test_relation(relation, name):
    few = max(3, EXAMPLES // 8) if name.startswith("triton.") else EXAMPLES  # compiled for each alignment and config

    @settings(max_examples=few)
    @given(properties.cases(relation, name, "cuda", max_m=300, max_n=300, max_k=600))
    def holds(case):
        properties.check(case)

    holds()


def test_replay(replayed):
    properties.check(Case.from_dict(replayed))
