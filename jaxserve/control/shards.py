"""Where the devices of a placement get their shares of a block's weights from, if other devices hold copies of it.

An array that tensor parallelism splits is thought of as `cuts` equal parts, as many as the largest degree has devices.
Of a copy on d devices, device j holds the j-th d-th of the cuts. An array that is not split has a single cut, which
every device holds.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

D = TypeVar("D", bound=Hashable)


@dataclass(frozen=True)
class ShardSource(Generic[D]):
    """Consecutive cuts, `first` to `last` - 1, that a device of the target takes from one place."""

    device: D
    first: int
    last: int
    source: D | None = None  # the device that they are read from; None: the host
    copy: int | None = None  # the index of the copy that the source holds them in
    held: tuple[int, int] | None = None  # the cuts of that copy that the source holds

    @property
    def is_local(self) -> bool:
        """Whether nothing crosses a link."""
        return self.source == self.device

    @property
    def is_whole(self) -> bool:
        """Whether these are all cuts of the copy that the source holds, so that nothing needs to be cut out."""
        return self.held == (self.first, self.last)


@dataclass(frozen=True)
class _Holder(Generic[D]):
    """A device with the cuts `first` to `last` - 1 of a copy."""

    device: D
    copy: int
    first: int
    last: int


def share(index: int, degree: int, cuts: int) -> tuple[int, int]:
    """Return the cuts (first, after the last) that device `index` of `degree` devices holds."""
    if cuts == 1:
        return 0, 1
    assert cuts % degree == 0, f"{cuts} cuts cannot be shared by {degree} devices"
    return index * cuts // degree, (index + 1) * cuts // degree


def shard_sources(target: Sequence[D], copies: Sequence[Sequence[D]], cuts: int) -> list[ShardSource[D]]:
    """Return the sources of all cuts that the devices of a target placement need, device by device and in order.

    `copies` are the devices of the copies that exist. What a device has already comes from there; other cuts come
    from the device that has most of what is missing, of equal ones from that which has sent least so far; and cuts
    that no device holds come from the host.
    """
    holders = [
        _Holder(device, copy, *share(index, len(devices), cuts))
        for copy, devices in enumerate(copies)
        for index, device in enumerate(devices)
    ]
    sent = dict.fromkeys((holder.device for holder in holders), 0)
    sources: list[ShardSource[D]] = []
    for index, device in enumerate(target):
        first, last = share(index, len(target), cuts)
        while first < last:
            own = [holder for holder in holders if holder.device == device and holder.last > first]
            here = [holder for holder in own if holder.first <= first]
            end = last if here else min([last, *(holder.first for holder in own)])
            found = here or [holder for holder in holders if holder.first <= first < holder.last]
            if found:
                best = min(found, key=lambda holder: (-min(holder.last, end), sent[holder.device]))
                end = min(end, best.last)
                sent[best.device] += 0 if here else end - first
                sources.append(ShardSource(device, first, end, best.device, best.copy, (best.first, best.last)))
            else:
                end = min([end, *(holder.first for holder in holders if holder.first > first)])
                sources.append(ShardSource(device, first, end))
            first = end
    return sources
