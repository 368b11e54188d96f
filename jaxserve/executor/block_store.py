"""BlockStore: the one owner of parameters, which counts who uses them and frees them when nobody does."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxserve.compilation.programs import StartsCompiling, abstract
from jaxserve.core.aligned_arrays import aligned
from jaxserve.core.config import ModelConfig
from jaxserve.executor.held_variants import HeldVariants
from jaxserve.executor.host_memory import Parameter, PinnedMemory
from jaxserve.executor.shard_copies import BlockCopy, BlockLeaves, ShardCopier, is_in_other_parts
from jaxserve.executor.traffic import Traffic
from jaxserve.models import abstract_block, check_parameters
from jaxserve.parallel.placement import Placement, bytes_held


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


Between = Callable[[], None] | None
Copied = Callable[[int], None] | None


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
        self.outdated = False  # what is held instead was read later

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
    the checkpoint's files, and must be what was loaded at the start. Elsewhere all variants are held, in pinned memory
    if possible. The same holds for all other blocks if instances may drop blocks that they have in common: the one that
    is left may be lost with its device.

    What other devices have is not read again. The devices of a placement take their shares from copies of the same
    block and precision: from one on the same device, else from one on another device. The rest comes from the host.
    """

    def __init__(
        self,
        source: ParameterSource,
        model: ModelConfig,
        variants: Collection[str] = (),
        *,
        host_is_device: bool = False,
        pinned: PinnedMemory | None = None,
        may_drop: bool = False,
    ):
        """Take the precisions that layers may change to, and a `model` that is padded for tensor parallelism.

        `may_drop` says whether instances may drop blocks that they have in common.
        Make the store before any layer is read: what is read again later must be what was loaded first.
        """
        self.traffic = Traffic()
        self._source, self._model, self._host_is_device = source, model, host_is_device
        self._held = HeldVariants(
            self._read,
            variants,
            host_is_device=host_is_device,
            pinned=pinned,
            max_degree=model.shards,
            all_blocks=may_drop,
        )
        self._copier = ShardCopier(model.shards, self.traffic)
        self._copies: dict[tuple[str, str, Placement], _DeviceCopy] = {}
        self._lock = threading.Lock()  # for the references
        if (variants or may_drop) and host_is_device:
            source.remember()

    def hold(self, block: str, precision: str, placement: Placement) -> None:
        """Read a variant into the host's memory, for `acquire` with this placement or others.

        Where full precision is not held, take the checksums of its tensors instead.
        """
        if self._held.holds(block, precision):
            self._held.get(block, precision, self._shardings(block, precision, placement))
        else:
            self._source.remember(block)

    def renew(self, source: ParameterSource, block: str, precision: str, placement: Placement) -> None:
        """Hold what another source has of a variant that is held, and read what is not held from there as well.

        Layers that run on what was held before go on with it until they change.
        """
        self._source = source
        if not self._held.holds(block, precision):
            return
        self._held.renew(block, precision, self._shardings(block, precision, placement))
        with self._lock:
            for key in [key for key in self._copies if key[:2] == (block, precision)]:
                self._copies[key].outdated = True
                if not self._copies[key].references:
                    del self._copies[key]

    def acquire(
        self, block: str, precision: str, placement: Placement, *, between: Between = None, copied: Copied = None
    ) -> Reference:
        """Return a reference to a block's parameters on the devices of a placement, made now unless they are there.

        `between` is called before each tensor that is read, and `copied` with the bytes of each array after it came
        from the host or another device; both may wait. Without `copied`, copies may go on after this returns.
        Raise `CheckpointError` if tensors cannot be read or have changed since they were loaded.
        """
        key = block, precision, placement
        in_place = self._in_place(block, precision)
        with self._lock:
            copy = self._copies.setdefault(key, _DeviceCopy())
            reference = Reference({}, partial(self._release, key, copy), in_place=in_place)
            copy.references.add(reference)
        try:
            with copy.making:
                if copy.parameters is None:
                    copy.tied = copy.tied or self._tied(block, precision, placement)
                    copy.parameters = self._make(key, copy.tied, between, copied)
                reference.parameters = copy.parameters
        except BaseException:
            reference.release()
            raise
        if in_place:
            self._drop_unused_cuts(block, precision)
        return reference

    def compile_copies(
        self,
        compiler: StartsCompiling,
        shapes: Reference,
        block: str,
        precision: str,
        target: Placement,
        copies: Sequence[Placement],
    ) -> None:
        """Start to compile what `acquire` runs for a target placement if a block is on devices only as `copies`.

        `shapes` has the shapes of the block's parameters. Variants that are used in place are cut in the host's memory.
        """
        if not self._in_place(block, precision):
            self._copier.compile(compiler, *self._copied(shapes, block, target), target, copies)

    @property
    def held_bytes(self) -> int:
        """Bytes of the variants that are held in the host's memory."""
        return self._held.nbytes

    def close(self) -> None:
        """Free everything. No block may run any more, and remaining references do nothing."""
        with self._lock:
            copies = list(self._copies.values())
            self._copies.clear()
        for copy in copies:
            copy.references.clear()
        for copy in copies:
            copy.free()
        self._held.close()

    def _in_place(self, block: str, precision: str) -> bool:
        return self._host_is_device and self._held.holds(block, precision)

    def _make(
        self, key: tuple[str, str, Placement], tied: Reference | None, between: Between, copied: Copied
    ) -> Mapping[str, Parameter]:
        """Return a block's parameters on the devices of a placement."""
        block, precision, placement = key
        shardings = self._shardings(block, precision, placement)
        if self._in_place(block, precision):
            held = self._held.get(block, precision, shardings)
            return {name: jax.tree.map(lambda part, s=s: part.on(s), held[name]) for name, s in shardings.items()}
        if tied is not None:
            del shardings["weight"]

        @cache
        def host() -> Mapping[str, Any]:
            if self._held.holds(block, precision):
                return self._held.get(block, precision, self._shardings(block, precision, placement))
            return self._read(block, precision, between)

        with self._existing(block, precision, placement) as copies:
            placed = self._place(placement, shardings, copies, host, copied)
        return placed if tied is None else placed | {"weight": tied.parameters["weight"]}

    def _place(
        self,
        placement: Placement,
        shardings: Mapping[str, NamedSharding],
        copies: Sequence[tuple[Placement, Mapping[str, Parameter]]],
        host: Callable[[], Mapping[str, Any]],
        copied: Copied,
    ) -> dict[str, Any]:
        """Return parameters on the devices of a placement, from `copies`; what they lack comes from the host."""
        if not copies and not is_in_other_parts(host(), placement):
            put = partial(_put, copied=copied, traffic=self.traffic)
            return {name: jax.tree.map(partial(put, sharding=s), host()[name]) for name, s in shardings.items()}
        there = [BlockCopy(where, BlockLeaves.of(parameters, shardings).leaves) for where, parameters in copies]
        block = BlockLeaves.of(copies[0][1] if copies else host(), shardings)
        made = self._copier.copy(
            placement, there, block.shardings, lambda: BlockLeaves.of(host(), shardings).leaves, copied
        )
        return block.with_leaves(made)

    @contextmanager
    def _existing(
        self, block: str, precision: str, target: Placement
    ) -> Iterator[list[tuple[Placement, Mapping[str, Parameter]]]]:
        """Return the copies of a block on devices, which are not freed meanwhile.

        Those that lie on some of the target's devices come first: their instances are about to end, and serve no more.
        """
        found: dict[Placement, Reference] = {}
        with self._lock:
            for key, copy in self._copies.items():
                if key[:2] == (block, precision) and copy.parameters is not None:
                    found[key[2]] = Reference(copy.parameters, partial(self._release, key, copy))
                    copy.references.add(found[key[2]])
        try:
            nearest = sorted(found, key=lambda placement: set(target.devices).isdisjoint(placement.devices))
            yield [(placement, found[placement].parameters) for placement in nearest]
        finally:
            for reference in found.values():
                reference.release()

    def _copied(
        self, loaded: Reference, block: str, target: Placement
    ) -> tuple[Sequence[jax.ShapeDtypeStruct], Sequence[NamedSharding]]:
        """Return the abstract arrays of a block that are copied to a target placement, and their shardings there."""
        axes = abstract_block(self._model, block)[1]
        shardings = {name: target.sharding(axes[name].axes) for name in loaded.parameters}
        if block == "head" and self._model.tie_embeddings:
            del shardings["weight"]
        flat = BlockLeaves.of(loaded.parameters, shardings)
        return [abstract(leaf) for leaf in flat.leaves], flat.shardings

    def _read(self, block: str, precision: str, between: Between = None) -> Mapping[str, Parameter]:
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
            if copy.references:
                return
            # Arrays on held memory are kept: they take none of their own, and making them again takes a millisecond,
            # twenty with the throttle, while a layer waits to change.
            kept = reference.in_place and copy.parameters is not None and not copy.outdated
            if not kept:
                del self._copies[key]
        if kept:
            self._drop_unused_cuts(*key[:2])
        else:
            copy.free()

    def _drop_unused_cuts(self, block: str, precision: str) -> None:
        """Give up what is held for degrees that no instance uses, as long as there is another one."""
        unused: list[_DeviceCopy] = []
        with self._lock:
            there = {key: copy for key, copy in self._copies.items() if key[:2] == (block, precision)}
            used = {len(placement.devices) for (*_, placement), copy in there.items() if copy.references}
            for degree in self._held.cuts(block, precision).keys() - used:
                if self._held.drop(block, precision, degree):
                    unused += [self._copies.pop(key) for key in there if len(key[2].devices) == degree]
        for copy in unused:
            copy.free()


def _put(part: np.ndarray | Array, sharding: NamedSharding, copied: Copied, traffic: Traffic) -> Array:
    devices = sharding.device_set
    if copied is not None and isinstance(part, np.ndarray) and [device.platform for device in devices] == ["cpu"]:
        # XLA would copy an unaligned array in the thread that runs steps, for up to a second.
        part = aligned(part)
    array = jax.device_put(part, sharding)
    for device in devices:
        traffic.count(bytes_held(array) // len(devices), device, None)
    if copied is not None:
        copied(array.block_until_ready().nbytes)
    return array
