"""Built engines for the tests of transitions."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from jaxserve.build import BuiltEngine, build
from jaxserve.core.config import EngineConfig
from jaxserve.planning.memory import COPY_SHARES
from tests.actuator.adapted import OPTIONS, PRECISIONS, Adapted, pools_of
from tests.actuator.mixed import MixedReference


@pytest.fixture(scope="session")
def engines(tiny_model: Path) -> Iterator[Callable[[str], BuiltEngine]]:
    """Return the function that gives the engine with a kind of pools, built and warmed up once for all files."""
    made: list[BuiltEngine] = []

    @cache
    def engine(kind: str) -> BuiltEngine:
        with pools_of(kind):
            made.append(build(EngineConfig(model=tiny_model, **OPTIONS)))
        return made[-1]

    yield engine
    for built in made:
        built.close()


@pytest.fixture(scope="module", autouse=True)
def many_transitions_in_an_answer() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COPY_SHARES, "cpu", 1.0)
        yield


@pytest.fixture(scope="module", params=["elastic", "segments"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def adapted(engines: Callable[[str], BuiltEngine], kind: str) -> Iterator[Adapted]:
    with pools_of(kind):
        adapted = Adapted(engines(kind))
        yield adapted
        adapted.close()


@pytest.fixture(scope="module")
def mixed(tiny_model: Path) -> MixedReference:
    return MixedReference(tiny_model, PRECISIONS)
