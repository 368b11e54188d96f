"""Placement of a block: its devices, and the split of its arrays over them.

Modules name logical axes, and `RULES` maps them to the mesh axis "tp".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TP = "tp"
# All other logical axes are replicated.
RULES: dict[str, str] = {"kv_heads": TP, "mlp": TP, "vocab": TP}
POOL_AXES = (None, "kv_heads", None, None, None)


@dataclass(frozen=True)
class Placement:
    """The devices of a block as a mesh with the axis "tp".

    Blocks with equal placements share executables and inputs.
    """

    devices: tuple[jax.Device, ...]

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (TP,))

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    def sharding(self, axes: Sequence[str | None] = ()) -> NamedSharding:
        """Return the sharding of an array with these logical axes; replicated by default."""
        return NamedSharding(self.mesh, spec(axes))


def spec(axes: Sequence[str | None] = ()) -> PartitionSpec:
    """Return the partition of an array with these logical axes."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def split_axis(sharding: NamedSharding) -> int | None:
    """Return the axis that a sharding splits over devices, or None if every device has the whole array."""
    return next((axis for axis, name in enumerate(sharding.spec) if name is not None), None)


def on_device(array: Array, device: jax.Device) -> Array:
    """Return the part of an array that a device holds, as an array of its own with the same buffer."""
    # As a mapping, because JAX lists the shards twice if two threads ask at once.
    return {shard.device: shard.data for shard in array.addressable_shards}[device]


def assembled(parts: Sequence[Array], sharding: NamedSharding) -> Array:
    """Return the array that has these parts on its devices, in the order of the mesh. It shares their buffers."""
    axis, shape = split_axis(sharding), list(parts[0].shape)
    if axis is not None:
        shape[axis] *= len(parts)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))


def bytes_held(array: Array) -> int:
    """Return the bytes of an array, summed over its devices."""
    # Not by its shards, which JAX lists twice if two threads ask at once.
    sharding = array.sharding
    return prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize * len(sharding.device_set)
