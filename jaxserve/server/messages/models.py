"""Models in the form of Anthropic's API."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jaxserve.core.errors import RequestError

MAX_PAGE = 1000  # models
MAX_SHOWN = 128  # characters of an unknown id that an error repeats


def model_card(name: str, *, created: int, max_tokens: int) -> dict[str, Any]:
    """Return a model. `created`: seconds since the epoch. `max_tokens`: tokens of prompt and answer together."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_tokens,
        "max_tokens": max_tokens,
    }


def page_of(
    cards: Sequence[dict[str, Any]], limit: int, *, before_id: str | None = None, after_id: str | None = None
) -> dict[str, Any]:
    """Return the first `limit` models, or those right after or right before one.

    Raise RequestError, naming the parameter, if that is not the id of a model.
    """
    ids = [card["id"] for card in cards]
    if before_id is not None:
        end = _position(ids, "before_id", before_id)
        start = max(end - limit, 0)
        more = start > 0
    else:
        start = 0 if after_id is None else _position(ids, "after_id", after_id) + 1
        end = start + limit
        more = end < len(ids)
    page = list(cards[start:end])
    return {
        "data": page,
        "has_more": more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _position(ids: Sequence[str], parameter: str, id: str) -> int:
    if id not in ids:
        shown = id[:MAX_SHOWN]
        raise RequestError(f"{parameter} is {shown!r}, which is no model's id", field=parameter, value=shown)
    return ids.index(id)
