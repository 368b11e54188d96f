"""BlockStore: the one owner of parameters, which counts who uses them and frees them when nobody does."""

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxserve.core.aligned_arrays import aligned
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.executor.host_memory import HostShards, Parameter, PinnedMemory
from jaxserve.models import abstract_block, check_parameters
from jaxserve.parallel.placement import Placement


class ParameterSource(Protocol):
    """A source that parameters are read from, which is a `Checkpoint`."""

    def variant(
        self, block_id: str, precision: str, padded: ModelConfig, between: Callable[[], None] | None = None
    ) -> Mapping[str, Parameter]:
        """Return a block's parameters in a precision, in new arrays. `between` is called before tensors are read."""
        ...

    def remember(self, block_id: str | None = None) -> None:
        """Check from now on that tensors are unchanged when they are read again: of a block, or of all read next."""
        ...


class Reference:
    """A counted reference to a block's parameters on its devices, which exist until all references are released."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        release: Callable[["Reference"], None] | None = None,
        *,
        in_place: bool = False,
    ):
        """Without `release`, the parameters belong to the caller and are never freed.

        With `in_place`, they are a variant that the store holds anyway, so that they take no memory of their own.
        """
        self.parameters, self._release, self.in_place = parameters, release, in_place

    def release(self) -> None:
        """Give the parameters back. A second call does nothing."""
        if self._release is not None:
            self._release(self)


class _DeviceCopy:
    """A block's parameters on the devices of a placement, with the references to it."""

    def __init__(self) -> None:
        self.making = threading.Lock()  # held by the thread that copies
        self.references: set[Reference] = set()
        self.parameters: Mapping[str, Parameter] | None = None
        self.tied: Reference | None = None  # the embedding, whose arrays are the weight of this head

    def free(self) -> None:
        """Free the arrays, except those that belong to the embedding."""
        others = {id(leaf) for leaf in jax.tree.leaves(dict(self.tied.parameters))} if self.tied else ()
        for leaf in jax.tree.leaves(dict(self.parameters or {})):
            if id(leaf) not in others:
                leaf.delete()
        if self.tied is not None:
            self.tied.release()


class BlockStore:
    """The owner of all parameters of an engine, in the host's memory and on devices. Thread-safe.

    Variants that layers may change to are read or rounded once, and held in the host's memory for all instances. Where
    the host is the device, layers run on the held arrays themselves. There full precision is not held: it is read from
    the checkpoint's files each time, and must be what was loaded at the start. Elsewhere all variants are held, in
    pinned memory if possible.
    """

    def __init__(
        self,
        source: ParameterSource,
        model: ModelConfig,
        variants: Collection[str] = (),
        *,
        host_is_device: bool = False,
        pinned: PinnedMemory | None = None,
    ):
        """Take the precisions that layers may change to, and a `model` that is padded for tensor parallelism.

        Make the store before any layer is read: what is read again later must be what was loaded first.
        """
        self._source, self._model = source, model
        self._variants, self._host_is_device, self._pinned = frozenset(variants), host_is_device, pinned
        # By block, precision and number of shards; host arrays, pinned arrays or `HostShards`.
        self._held: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        self._copies: dict[tuple[str, str, Placement], _DeviceCopy] = {}
        self._lock = threading.Lock()  # for the references
        self._reading = threading.Lock()  # for what is held
        if variants and host_is_device:
            source.remember()

    def hold(self, block: str, precision: str, placement: Placement) -> None:
        """Read a variant into the host's memory, for `acquire` with this placement or another one of as many devices.

        Where full precision is not held, take the checksums of its tensors instead.
        """
        if self._is_held(block, precision):
            self._hold(block, precision, placement)
        else:
            self._source.remember(block)

    def acquire(
        self,
        block: str,
        precision: str,
        placement: Placement,
        *,
        between: Callable[[], None] | None = None,
        copied: Callable[[int], None] | None = None,
    ) -> Reference:
        """Return a reference to a block's parameters on the devices of a placement, made now unless they are there.

        `between` is called before each tensor that is read, and `copied` with the bytes of each array after its copy;
        both may wait. Raise `CheckpointError` if tensors cannot be read or have changed since they were loaded.
        """
        key = block, precision, placement
        with self._lock:
            copy = self._copies.setdefault(key, _DeviceCopy())
            in_place = self._host_is_device and self._is_held(block, precision)
            reference = Reference({}, partial(self._release, key, copy), in_place=in_place)
            copy.references.add(reference)
        try:
            with copy.making:
                if copy.parameters is None:
                    copy.tied = copy.tied or self._tied(block, precision, placement)
                    copy.parameters = self._copy(block, precision, placement, copy.tied, between, copied)
                reference.parameters = copy.parameters
        except BaseException:
            reference.release()
            raise
        return reference

    @property
    def held_bytes(self) -> int:
        """Bytes of the variants that are held in the host's memory."""
        return sum(leaf.nbytes for variant in self._held.values() for leaf in jax.tree.leaves(dict(variant)))

    def close(self) -> None:
        """Free everything. No block may run any more, and remaining references do nothing."""
        with self._lock, self._reading:
            copies, held = list(self._copies.values()), list(self._held.values())
            self._copies.clear()
            self._held.clear()
        for copy in copies:
            copy.references.clear()
        for copy in copies:
            copy.free()
        for leaf in jax.tree.leaves([dict(variant) for variant in held]):
            if isinstance(leaf, Array):
                leaf.delete()

    def _is_held(self, block: str, precision: str) -> bool:
        return is_layer(block) and precision in self._variants and (precision in BITS or not self._host_is_device)

    def _hold(self, block: str, precision: str, placement: Placement) -> Mapping[str, Any]:
        """Return a variant in the host's memory, read now if this is its first use."""
        key = block, precision, len(placement.devices)
        with self._reading:
            if key not in self._held:
                shardings = self._shardings(block, precision, placement)
                parameters = self._read(block, precision)
                if self._host_is_device:
                    self._held[key] = {
                        name: jax.tree.map(partial(HostShards.cut, sharding=sharding), parameters[name])
                        for name, sharding in shardings.items()
                    }
                else:
                    self._held[key] = self._pinned.pin(parameters, shardings) if self._pinned else parameters
            return self._held[key]

    def _copy(
        self,
        block: str,
        precision: str,
        placement: Placement,
        tied: Reference | None,
        between: Callable[[], None] | None,
        copied: Callable[[int], None] | None,
    ) -> Mapping[str, Parameter]:
        if self._is_held(block, precision):
            parameters = self._hold(block, precision, placement)
        else:
            parameters = self._read(block, precision, between)
        placed = {
            name: jax.tree.map(partial(_put, sharding=sharding, copied=copied), parameters[name])
            for name, sharding in self._shardings(block, precision, placement).items()
            if tied is None or name != "weight"
        }
        return placed if tied is None else placed | {"weight": tied.parameters["weight"]}

    def _read(self, block: str, precision: str, between: Callable[[], None] | None = None) -> Mapping[str, Parameter]:
        parameters = self._source.variant(block, precision, self._model, between)
        check_parameters(abstract_block(self._model, block, precision)[1], parameters)
        return parameters

    def _shardings(self, block: str, precision: str, placement: Placement) -> dict[str, NamedSharding]:
        _, variables = abstract_block(self._model, block, precision)
        return {name: placement.sharding(variable.axes) for name, variable in variables.items()}

    def _tied(self, block: str, precision: str, placement: Placement) -> Reference | None:
        """Return a reference to the embedding if a head on the same devices shares its weight, else None."""
        if block != "head" or not self._model.tie_embeddings or ("embed", precision, placement) not in self._copies:
            return None
        return self.acquire("embed", precision, placement)

    def _release(self, key: tuple[str, str, Placement], copy: _DeviceCopy, reference: Reference) -> None:
        with self._lock:
            if reference not in copy.references:
                return
            copy.references.remove(reference)
            # Arrays on held memory are kept: they take none of their own, and making them again takes a millisecond,
            # twenty with the throttle, while a layer waits to change.
            if copy.references or (reference.in_place and copy.parameters is not None):
                return
            del self._copies[key]
        copy.free()


def _put(part: np.ndarray | Array | HostShards, sharding: NamedSharding, copied: Callable[[int], None] | None) -> Array:
    if isinstance(part, HostShards):
        return part.on(sharding)
    if copied is None:
        return jax.device_put(part, sharding)
    if isinstance(part, np.ndarray) and [device.platform for device in sharding.device_set] == ["cpu"]:
        # XLA would copy an unaligned array in the thread that runs steps, for up to a second.
        part = aligned(part)
    array = jax.device_put(part, sharding)
    copied(array.block_until_ready().nbytes)
    return array
