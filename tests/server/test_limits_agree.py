"""Limits do not contradict each other, every limit is tried, and docs/server.md lists all of them."""

import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxserve import server
from jaxserve.core import allowed_tokens, sampling, structured
from jaxserve.core.config import EngineConfig
from jaxserve.core.options import options_of
from jaxserve.core.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_SPARSE_BIAS, MAX_STOP_TOKENS
from jaxserve.core.structured import MAX_CHOICES, MAX_GRAMMAR
from jaxserve.server.http import body_memory
from jaxserve.server.http.body import MAX_DEPTH, MAX_DIGITS, MAX_ITEMS
from jaxserve.server.http.connections import MAX_HEAD_BYTES, SLICE_BYTES
from jaxserve.server.http.normalize import MAX_REQUEST_ID
from jaxserve.server.responses import creation
from jaxserve.server.routes.admin import MAX_DECISIONS, MAX_PLAN_BYTES, MAX_PLAN_DEPTH
from jaxserve.server.routes.responses import MAX_PAGE
from jaxserve.server.schemas import admin
from jaxserve.server.schemas.body import Body
from jaxserve.server.schemas.tools import MAX_TOOLS
from jaxserve.server.settings import MEBIBYTE, ServerSettings
from jaxserve.structured import structural_tag
from tests.server.limits_table import LIMITS

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
ENGINE, SETTINGS = EngineConfig(), ServerSettings()
EOS_TOKENS = 16  # more than any model has
LEAST = ", at least"  # the end of the names of limits below which nothing is accepted

# Limits that test_request_limits.py tries, and those of the queue and the server, by their names in the documentation.
OTHERS = {
    "bytes of the head of a request": MAX_HEAD_BYTES,
    "bytes of a body": SETTINGS.max_body_bytes,
    "levels of lists and objects in a body": MAX_DEPTH,
    "digits of a number in a body of more than 64 KiB": MAX_DIGITS,
    "items of a body": MAX_ITEMS,
    "items of a conversation in `/v1/responses`": creation.MAX_ITEMS,
    "items of a page of `input_items`": MAX_PAGE,
    "characters of `previous_response_id`": 128,
    "characters of an `X-Request-Id` that is returned": MAX_REQUEST_ID,
    "`min` and `max` of a `repeat` in a structural tag": structural_tag.MAX_REPEAT,
    "waiting answers": ENGINE.max_queued_requests,
    "waiting prompt tokens": ENGINE.max_queued_tokens,
    "responses that are kept": SETTINGS.max_stored_responses,
    "MiB of responses that are kept": int(SETTINGS.stored_responses_mb),
    "seconds until the head of a request has arrived": int(SETTINGS.header_timeout),
    "seconds until the body of a request has arrived": int(SETTINGS.body_timeout),
    "bytes of a line of a batch": SETTINGS.max_body_bytes + 64 * 1024,
    "bytes of a plan": MAX_PLAN_BYTES,
    "levels of a plan": MAX_PLAN_DEPTH,
    "instances, or parts of one, in an edit of the plan": admin.MAX_INSTANCES,
    "devices in an edit of the plan": admin.MAX_DEVICES,
    "characters of an instance's name": admin.MAX_INSTANCE_NAME,
    "characters of a policy's name": admin.MAX_POLICY_NAME,
    "decisions in an answer": MAX_DECISIONS,
}
TRIED = {limit.documented or limit.limit for limit in LIMITS.values()} | set(OTHERS.values())
# Constants with such names that limit no request: what messages and logs show, and when work leaves the event loop.
NO_LIMITS = {
    *("MAX_VALUE_LENGTH", "MAX_MESSAGE_LENGTH", "MAX_SHOWN", "MAX_NAME", "MAX_VALIDATION_ERRORS"),
    *("MAX_INLINE_SIZE", "MAX_INLINE_BODY", "MAX_INLINE_MESSAGES", "MAX_SPARSE_BIAS", "MAX_TOKENS", "MAX_ID"),
}


# -- every limit is in the table


def modules() -> Iterator[Any]:
    yield from (sampling, structured, allowed_tokens, structural_tag)
    for found in pkgutil.walk_packages(server.__path__, f"{server.__name__}."):
        yield importlib.import_module(found.name)


def test_every_constant_that_limits_a_request_is_in_the_table():
    missing = {
        f"{module.__name__}.{name} = {number}"
        for module in modules()
        for name, number in vars(module).items()
        if name.startswith("MAX_") and name not in NO_LIMITS and number not in TRIED
    }
    assert missing == set()


def bodies(kind: type[BaseModel] = Body) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from bodies(one)


def bounds(hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield the limits in an annotation or a field, those of the values inside it included."""
    metadata = hint.metadata if isinstance(hint, FieldInfo) else getattr(hint, "__metadata__", ())
    for entry in metadata:
        if isinstance(entry, FieldInfo):
            yield from bounds(entry)
        for name in ("ge", "gt", "le", "lt", "max_length", "min_length"):
            if (bound := getattr(entry, name, None)) is not None:
                yield name, bound
    for part in get_args(hint.annotation) if isinstance(hint, FieldInfo) else get_args(hint):
        yield from bounds(part)


FIELDS = {(kind, name): set(bounds(field)) for kind in set(bodies()) for name, field in kind.model_fields.items()}


def test_limits_of_fields_are_found():
    names = {name for (_, name), found in FIELDS.items() if found}
    assert {"priority", "cache_salt", "metadata", "instances", "role"} <= names
    assert {("max_length", 16), ("max_length", 64), ("max_length", 512)} <= {
        bound for (_, name), found in FIELDS.items() if name == "metadata" for bound in found
    }


def test_every_limit_of_a_field_is_in_the_table():
    trivial = {("min_length", 1), ("ge", 1), ("ge", 2)}  # not empty; the documentation of the field says so
    missing = {
        f"{kind.__name__}.{name}: {bound}"
        for (kind, name), found in FIELDS.items()
        for bound in found - trivial
        if bound[1] not in TRIED
    }
    assert missing == set()


def test_field_has_the_same_limits_in_every_body():
    by_name = defaultdict(set)
    for (_, name), found in FIELDS.items():
        by_name[name].add(frozenset(found))
    differing = {
        "user",  # /v1/responses keeps it and repeats it; other endpoints ignore it
        "role",  # one of a few in /v1/messages
        "max_tokens",  # may be 0, or -1 for as many as fit, but not in /v1/messages
        "messages",  # may be missing in /tokenize
    }
    assert {name for name, found in by_name.items() if len(found) > 1} == differing


# -- an outer limit does not shadow an inner one


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (4 * MAX_GRAMMAR, SETTINGS.max_body_bytes),  # bytes of UTF-8
        (MAX_PLAN_BYTES, SETTINGS.max_body_bytes),
        (MAX_CHOICES, MAX_ITEMS),
        (3 * MAX_CHOICES, MAX_GRAMMAR),  # quotes, a character and a comma each
        (8 * MAX_TOOLS, MAX_ITEMS),
        (MAX_LOGIT_BIAS, MAX_ITEMS),
        (2 * creation.MAX_ITEMS, MAX_ITEMS),  # references to items that are kept
        # Every bad word is spelled with and without a space, and min_tokens bans what would end the answer.
        (MAX_LOGIT_BIAS + 2 * MAX_BAD_WORDS + MAX_STOP_TOKENS + EOS_TOKENS, MAX_SPARSE_BIAS),
        (ENGINE.max_n, ENGINE.max_queued_requests),
        (SETTINGS.max_prompts, MAX_ITEMS),
        (2 * SLICE_BYTES, MAX_HEAD_BYTES),
        (body_memory.MIN_FULL_BODIES * SETTINGS.max_body_bytes, body_memory.BODY_MEMORY_BYTES),
        (2 * SETTINGS.max_body_bytes, int(SETTINGS.stored_responses_mb * MEBIBYTE)),
    ],
)
def test_outer_limit_leaves_room_for_an_inner_one(inner, outer):
    assert inner <= outer


# -- the documentation


def table() -> dict[str, tuple[str, str]]:
    """Return the limits and the options that change them, by name, in the table of docs/server.md."""
    section = PAGE.read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", section, re.MULTILINE)[1:]
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (limit, option) for name, limit, option in rows}


def limits_in_words() -> dict[str, str]:
    """Return what the table says: a number, two with "to" in between, or "at least" and a number."""
    words = {}
    for name, limit in LIMITS.items():
        if limit.relative or not name.endswith(LEAST):
            continue
        high = LIMITS.get(name.removesuffix(LEAST))
        both = high is not None and not high.relative
        words[name.removesuffix(LEAST)] = f"{limit.limit:,} to {high.limit:,}" if both else f"at least {limit.limit:,}"
    for name, limit in LIMITS.items():
        if not limit.relative and not name.endswith(LEAST):
            words.setdefault(name, f"{limit.documented or limit.limit:,}")
    return words | {name: f"{number:,}" for name, number in OTHERS.items()}


def option_in(text: str) -> str:
    """Return the option that a row of the table names, as configurations spell it."""
    found = re.search(r"--([\w-]+)", text)
    return found[1].replace("-", "_") if found else ""


def test_documentation_lists_every_limit():
    assert {name: limit for name, (limit, _) in table().items()} == limits_in_words()


def test_documentation_names_the_option_that_changes_a_limit():
    named = {name: option_in(option) for name, (_, option) in table().items()}
    for name, limit in LIMITS.items():
        if name in named:
            assert named[name] == limit.option.lstrip("-").replace("-", "_")
    options = {field.name for kind in (EngineConfig, ServerSettings) for field in options_of(kind)}
    assert set(named.values()) <= options | {""}


def test_every_option_of_a_limit_is_documented_with_it():
    limiting = {
        field.name
        for kind in (EngineConfig, ServerSettings)
        for field in options_of(kind)
        if field.option.group == "Limits" or field.name.startswith("max_queued")
    }
    assert limiting - {option_in(option) for _, option in table().values()} == {"clamp_max_tokens"}  # refuses nothing
