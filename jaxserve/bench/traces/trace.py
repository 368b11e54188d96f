"""The trace: what is known of the requests of a service, without their text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_REQUESTS = 10_000_000  # of a trace: more do not fit, and take weeks
HashIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests in order of arrival. The arrays are read-only; `Trace.of` makes a trace from any.

    `hash_ids` names the blocks of `block_tokens` tokens that a prompt consists of: equal ids are equal text, so that
    prompts share prefixes as they did in the service. A prompt may be longer than its blocks; the rest is its own.
    `history` says how the trace was read and every change since, in order.
    """

    name: str
    arrival_s: Floats  # [n], not decreasing, seconds after the start of the trace; the first may be later than 0
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
        """A trace from columns in any order of arrival; requests of equal arrival keep theirs."""
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
        """Arrival of the last request."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def changed(self, operation: str, facts: Mapping[str, Any], **columns: Any) -> "Trace":
        """With other columns, put in order of arrival, and the operation with its facts added to the history."""
        values = {name: columns.get(name, getattr(self, name)) for name in COLUMNS}
        trace = Trace.of(self.name, **values, block_tokens=columns.get("block_tokens", self.block_tokens))
        entry = {"operation": operation, **facts, "requests": len(trace)}
        return replace(trace, history=(*self.history, entry))

    def taken(self, rows: ArrayLike) -> dict[str, Any]:
        """The columns of some rows, by index, for `changed`."""
        index = np.asarray(rows, np.int64)
        ids = None if self.hash_ids is None else tuple(self.hash_ids[i] for i in index.tolist())
        return {
            "arrival_s": self.arrival_s[index],
            "input_tokens": self.input_tokens[index],
            "output_tokens": self.output_tokens[index],
            "hash_ids": ids,
        }

    def description(self) -> dict[str, Any]:
        """What a result says about it."""
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
