"""Limits of a request hold inclusively: n is accepted, and n + 1 is refused with its field, its value and the limit."""

import re
from dataclasses import replace

import httpx
import pytest

from jaxserve.server.settings import ServerSettings
from tests.server.answering import answering
from tests.server.limits_table import BODIES, LIMITS, MESSAGES, PROMPTS, VOCABULARY, WINDOW
from tests.server.serving import serving


@pytest.fixture(scope="module")
def servers():
    """Return a client of a server whose model has a small context, and of one with a large one."""
    small = answering("x", max_model_len=WINDOW)
    large = answering("x", max_model_len=1_000_000, capacity=1000)
    large.info = replace(large.info, vocab_size=VOCABULARY)
    settings = ServerSettings(max_prompts=PROMPTS)
    with (
        serving(small, settings) as first,
        serving(large, settings) as second,
        httpx.Client(base_url=first.url, timeout=60) as of_small,
        httpx.Client(base_url=second.url, timeout=60) as of_large,
    ):
        yield {True: of_small, False: of_large}


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, limit in LIMITS.items() for path in limit.fields])
def test_limit_is_inclusive_and_a_refusal_names_it(servers, name, path):
    limit = LIMITS[name]
    http, fields = servers[limit.small], limit.fields[path]
    accepted = http.post(path, json=BODIES[path] | fields(limit.limit))
    assert accepted.status_code == 200, accepted.text
    refused = http.post(path, json=BODIES[path] | fields(limit.beyond))
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    message = error["message"]
    assert limit.option in message
    assert has_number(message, limit.beyond), message
    assert has_number(message, limit.limit) or has_number(message, WINDOW), message
    if path != MESSAGES:  # Anthropic's envelope has the message alone
        assert error["param"].split(".")[0] in fields(limit.beyond), error
        assert error["value"] in (limit.beyond, str(limit.beyond)), error
        assert error["limit"] is not None, error


def has_number(message: str, number: int) -> bool:
    return (
        re.search(rf"(?<![\d.-]){number}(?!\d)", message.replace("-2**63 to 2**63 - 1", f"{-(2**63)} to {2**63 - 1}"))
        is not None
    )
