"""A server with scripted answers for client libraries. Some of them only `make test-clients` installs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from tests.server.answering import Scripted
from tests.server.serving import serving

if find_spec("litellm") is None:
    collect_ignore = ["test_frameworks.py"]


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, Scripted]]]:
    """Return a function that serves answers with the given texts, and returns the server's URL and its engine."""
    with ExitStack() as stack:

        def start(*scripts: str) -> tuple[str, Scripted]:
            engine = Scripted(*scripts)
            return stack.enter_context(serving(engine)).url, engine

        yield start
