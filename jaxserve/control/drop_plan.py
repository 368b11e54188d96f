"""The drop plan of KunServe (section 4.1, figure 6): which instances share their layers to free memory.

The smallest groups are joined first, because every further stage makes a group slower.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member")
Group = tuple[Member, ...]


@dataclass(frozen=True)
class DropPlan(Generic[Member]):
    """The groups after the plan, and what it frees, which may be less than was required."""

    groups: Sequence[Group[Member]]
    freed: int
    required: int

    @property
    def suffices(self) -> bool:
        """True if as much becomes free as was required."""
        return self.freed >= self.required


def drop_plan(
    groups: Sequence[Group[Member]],
    required: int,
    freed_by: Callable[[Group[Member], Group[Member]], int],
    max_size: int,
) -> DropPlan[Member]:
    """Return the plan that joins groups until `required` is free, in O(N log N) for N groups.

    `freed_by` says what becomes free when two groups become one. No group gets more than `max_size` members. Of groups
    of the same size, those that come first are joined first.
    """
    heap = [(len(group), number, group) for number, group in enumerate(groups)]
    heapq.heapify(heap)
    freed, number = 0, len(heap)
    while freed < required and len(heap) >= 2:
        smallest = heapq.heappop(heap)
        size, _, group = smallest
        if size + heap[0][0] > max_size:
            heapq.heappush(heap, smallest)
            break
        _, _, other = heapq.heappop(heap)
        freed += freed_by(group, other)
        heapq.heappush(heap, (size + len(other), number, (*group, *other)))
        number += 1
    return DropPlan([group for _, _, group in sorted(heap)], freed, required)
