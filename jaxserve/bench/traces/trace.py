"""A trace: arrival times and lengths of a service's requests, without their text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_REQUESTS = 10_000_000  # per trace: more do not fit into memory and would take weeks
HashIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests in order of arrival, as read-only arrays. `Trace.of` makes a trace from columns in any order.

    `hash_ids` names the blocks of `block_tokens` tokens at the start of each prompt. Equal ids stand for equal text, so
    that prompts share prefixes as they did in the service. A prompt may be longer than its blocks; the remainder is not
    shared. `history` describes how the trace was read and every change since, in order.
    """

    name: str
    arrival_s: Floats  # [n], not decreasing; seconds after the start of the trace, which may begin with idle time
    input_tokens: Ints  # [n]; 0 where the service failed
    output_tokens: Ints  # [n]
    hash_ids: HashIds | None = None
    block_tokens: int = 512
    history: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        assert len(self.input_tokens) == len(self.output_tokens) == n
        assert self.hash_ids is None or len(self.hash_ids) == n
        assert n == 0 or (self.arrival_s[0] >= 0 and not np.any(np.diff(self.arrival_s) < 0)), "arrivals not in order"

    @classmethod
    def of(
        cls,
        name: str,
        arrival_s: ArrayLike,
        input_tokens: ArrayLike,
        output_tokens: ArrayLike,
        *,
        hash_ids: HashIds | None = None,
        block_tokens: int = 512,
        history: tuple[Mapping[str, Any], ...] = (),
    ) -> "Trace":
        """Return a trace from columns in any order; requests with equal arrival keep their order."""
        times = np.asarray(arrival_s, np.float64)
        order = np.argsort(times, kind="stable")
        return cls(
            name,
            _frozen(times[order]),
            _frozen(np.asarray(input_tokens, np.int64)[order]),
            _frozen(np.asarray(output_tokens, np.int64)[order]),
            None if hash_ids is None else tuple(hash_ids[i] for i in order.tolist()),
            block_tokens,
            history,
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """The arrival time of the last request."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def changed(self, operation: str, facts: Mapping[str, Any], **columns: Any) -> "Trace":
        """Return the trace with other columns, in order of arrival, and with the operation added to its history."""
        values = {name: columns.get(name, getattr(self, name)) for name in COLUMNS}
        trace = Trace.of(self.name, **values, block_tokens=columns.get("block_tokens", self.block_tokens))
        entry = {"operation": operation, **facts, "requests": len(trace)}
        return replace(trace, history=(*self.history, entry))

    def taken(self, indices: ArrayLike) -> dict[str, Any]:
        """Return the columns of the requests with these indices, as arguments for `changed`."""
        index = np.asarray(indices, np.int64)
        ids = None if self.hash_ids is None else tuple(self.hash_ids[i] for i in index.tolist())
        return {
            "arrival_s": self.arrival_s[index],
            "input_tokens": self.input_tokens[index],
            "output_tokens": self.output_tokens[index],
            "hash_ids": ids,
        }

    def description(self) -> dict[str, Any]:
        """Return the description of the trace for a result."""
        return {
            "trace": self.name,
            "requests": len(self),
            "duration_s": round(self.duration_s, 6),
            "shared_prefixes": self.hash_ids is not None,
            "history": [dict(entry) for entry in self.history],
        }


COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "hash_ids")


def _frozen(array: NDArray) -> NDArray:
    array.flags.writeable = False
    return array
