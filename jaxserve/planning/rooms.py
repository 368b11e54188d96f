"""The room that an engine's parts leave for KV pages on each device, and what is wrong if it is too small.

Imports no JAX, so that the simulator divides the memory of simulated devices by the same code.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.control.plan import InstancePlan
from jaxserve.control.resources import Resources, stages_by_device
from jaxserve.core.block_names import is_layer
from jaxserve.core.errors import ConfigError, MemoryBudgetError
from jaxserve.core.kv_layout import pages_covered
from jaxserve.planning.budget import what_helps
from jaxserve.planning.spec import EngineSpec

MAX_POOL_BYTES = 2**46  # half of what a process can address


@dataclass(frozen=True)
class Room:
    """The room that the parts of a plan without its KV pages leave of one device."""

    device: int
    budget: int
    entries: Mapping[str, int]  # bytes of the parts by name
    freeable: int  # bytes that layers can free for pages by changing to their smallest precision
    page: int  # bytes of one KV page in the pools of all layers
    pools: int

    @property
    def free(self) -> int:
        """Bytes that are left for KV pages."""
        return self.budget - sum(self.entries.values())

    def pool_bytes(self, pages: int, segments: tuple[int, ...], granule: int) -> int:
        """Return the bytes that the pools take while `pages` are in use."""
        if not granule:
            return pages_covered(segments, pages) * self.page
        return min(pages * self.page + self.pools * granule, sum(segments) * self.page)


def rooms_of(instances: Iterable[InstancePlan], limits: Resources) -> list[Room]:
    """Return the room on each device of instances without KV pages."""
    instances = tuple(instances)
    bytes_at_smallest = limits.device_bytes(*map(limits.smallest, instances))
    entries = limits.device_entries(*instances)
    runtime = {"runtime": limits.runtime} if limits.runtime else {}
    rooms = []
    for device, stages in stages_by_device(instances).items():
        taken = runtime | entries[device]
        rooms.append(
            Room(
                device,
                limits.budget,
                taken,
                freeable=sum(taken.values()) - bytes_at_smallest[device],
                page=sum(map(limits.page_bytes, stages)),
                pools=sum(is_layer(block.block) for stage in stages for block in stage.blocks),
            )
        )
    return rooms


def check_room(room: Room, min_pages: int, spec: EngineSpec) -> None:
    """Raise `MemoryBudgetError` if a device has no room for the fewest pages that an instance can have."""
    needs = {**room.entries, "KV pages": min_pages * room.page}
    if (needed := sum(needs.values())) > room.budget:
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in needs.items())
        raise MemoryBudgetError(
            f"the memory budget is {room.budget / 1e9:.3f} GB per device: device {room.device} needs at least "
            f"{needed / 1e9:.3f} GB: {parts}: {what_helps(spec, needs, room.budget)}"
        )


def check_pools(rooms: Sequence[Room], pages: int, segments: tuple[int, ...], granule: int) -> None:
    """Check pools of `pages` pages on each device.

    Raise `MemoryBudgetError` if they exceed the budget, `ConfigError` if they could grow to more than a process can
    address.
    """
    for room in rooms:
        pool_bytes = room.pool_bytes(pages, segments, granule)
        if pool_bytes > room.free:
            raise MemoryBudgetError(
                f"kv needs {pool_bytes / 1e9:.3f} GB on device {room.device}, {room.free / 1e9:.3f} GB of the budget "
                f"of {room.budget / 1e9:.3f} GB are left; at least "
                f"{(room.budget - room.free + pool_bytes) / 1e9:.3f} GB are needed (memory_gb)"
            )
    page = max(room.page for room in rooms)
    if sum(segments) * page > MAX_POOL_BYTES:
        raise ConfigError(
            f"max_kv_pages is {sum(segments) - 1}: it must be at most {MAX_POOL_BYTES // page - 1}, because a process "
            "cannot address larger pools"
        )
