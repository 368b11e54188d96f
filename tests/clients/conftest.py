"""A server with scripted answers for client libraries. Some of them only `make test-clients` installs."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from jaxserve.core.request import RequestOutput
from tests.server.fake import FakeClient, byte_tokenizer
from tests.server.serving import serving

# Shows tools in Hermes' form, and its results.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if false %}<think></think>{% endif %}"
)

if find_spec("litellm") is None:
    collect_ignore = ["test_frameworks.py"]


class Scripted(FakeClient):
    """An engine that answers one request after another with the next of its scripts."""

    def __init__(self, scripts: tuple[str, ...]):
        super().__init__(max_model_len=100_000, tokenizer=byte_tokenizer(TEMPLATE))
        self._scripts = list(scripts)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        self.script = self._scripts.pop(0)
        async for output in super().generate(*args, **kwargs):
            yield output

    def prompts(self) -> list[str]:
        """Return the prompts of all requests so far."""
        return [self.tokenizer.decode(prompt.token_ids) for prompt, *_ in self.seen]


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, Scripted]]]:
    """Return a function that serves answers with the given texts, and returns the server's URL and its engine."""
    with ExitStack() as stack:

        def start(*scripts: str) -> tuple[str, Scripted]:
            engine = Scripted(scripts)
            return stack.enter_context(serving(engine)).url, engine

        yield start
