"""Layers of a merged instance that its members still run each by themselves, while the instance is being merged.

A merged instance of n members begins with all decoder layers apart: each member's devices have the weights and KV
pages that they had before, and compute the rows of their own sequences. Nothing has moved yet. Then layer by layer
weights are cut and heads exchanged, and the layer runs on all devices together from the next step on. A split goes the
other way.

A sequence belongs to the member i for which all its pages q have q % n == i. In a layer that is apart, page q is page
q // n of that member. Every device computes all rows, so that step shapes are those of the merged instance: rows of
other members have no context and write to the null page, and the sum over members leaves each row's own result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.kernels import AttentionMeta, Pool
from jaxserve.parallel.placement import TP, Placement, on_device, spec

MEMBER = "member"
REPLICATED = PartitionSpec()
POOL = PartitionSpec(MEMBER, TP)  # pages by member, heads by the member's devices

Layer = Callable[..., tuple[Array, Pool]]  # (x, cos, sin, slots, meta, pool, leaves) -> (x, pool)


@dataclass(frozen=True)
class ApartPlacement:
    """The devices of a merged instance as members, of which each has its own copy of a layer."""

    placement: Placement
    members: int

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as [devices of a member, members]: device j * n + i is device j of member i."""
        return Mesh(np.array(self.placement.devices).reshape(-1, self.members), (TP, MEMBER))

    @property
    def degree(self) -> int:
        """Number of devices of a member."""
        return len(self.placement.devices) // self.members

    def sharding(self, partition: PartitionSpec = REPLICATED) -> NamedSharding:
        """Return the sharding of an array of all members; by default every device has the same."""
        return NamedSharding(self.mesh, partition)

    def member(self, index: int) -> Placement:
        """Return the placement of a member."""
        return Placement(self.placement.devices[index :: self.members])

    def join(self, parts: Sequence[Array], axes: Sequence[str | None]) -> Array:
        """Return the members' copies of a parameter as one array, which shares their buffers."""
        return self._assembled(parts, spec(axes), parts[0].shape)

    def join_pools(self, pools: Sequence[Pool]) -> Pool:
        """Return the members' pools of a layer as one pool, which shares their buffers."""
        return tuple(
            self._assembled(parts, POOL, (len(parts) * parts[0].shape[0], *parts[0].shape[1:]))
            for parts in zip(*pools, strict=True)
        )

    def part_pool(self, pool: Pool, shardings: Sequence[NamedSharding]) -> list[Pool]:
        """Return a pool as the members' pools: the reverse of `join_pools`."""
        return [
            tuple(
                jax.make_array_from_single_device_arrays(
                    (segment.shape[0] // self.members, *segment.shape[1:]),
                    sharding,
                    [on_device(segment, device) for device in self.member(index).devices],
                )
                for segment in pool
            )
            for index, sharding in enumerate(shardings)
        ]

    def _assembled(self, parts: Sequence[Array], partition: PartitionSpec, shape: tuple[int, ...]) -> Array:
        buffers = [
            on_device(parts[place % self.members], device) for place, device in enumerate(self.placement.devices)
        ]
        return jax.make_array_from_single_device_arrays(shape, self.sharding(partition), buffers)


def on_members(layer: Layer, place: ApartPlacement, leaves: Sequence[PartitionSpec]) -> Callable:
    """Return a layer of one member as a program of all members, each of which computes its own rows.

    The arguments and results are those of a layer of the merged instance, but for pool and `leaves`.
    """
    count = place.members

    def apart(
        x: Array, cos: Array, sin: Array, slots: Array, meta: AttentionMeta, pool: Pool, *leaves: Array
    ) -> tuple[Array, Pool]:
        size = pool[0].shape[3]
        page, offset = slots // size, slots % size
        own = page % count == lax.axis_index(MEMBER)
        x, pool = layer(
            x, cos, sin, jnp.where(own, page // count * size, 0) + offset, _own(meta, own, count), pool, *leaves
        )
        return lax.psum(jnp.where(own[:, None], x, 0), MEMBER), pool

    on_devices = jax.shard_map(
        apart,
        mesh=place.mesh,
        in_specs=(*[REPLICATED] * 5, POOL, *leaves),
        out_specs=(REPLICATED, POOL),
        check_vma=False,  # custom calls do not declare how their outputs vary
    )
    return jax.jit(on_devices, donate_argnums=5, out_shardings=(place.sharding(), place.sharding(POOL)))


def _own(meta: AttentionMeta, own: Array, count: int) -> AttentionMeta:
    """Return the rows of a member, in its own page ids. Other rows are padding."""
    decodes, tiles = len(meta.decode_lengths), len(meta.tile_lengths)
    tile = (len(own) - decodes) // tiles if tiles else 1
    return AttentionMeta(
        meta.decode_pages // count,
        jnp.where(own[:decodes], meta.decode_lengths, 0),
        meta.tile_pages // count,
        meta.tile_starts,
        jnp.where(own[decodes::tile][:tiles], meta.tile_lengths, 0),
    )
