"""The store of parameters: who uses them is counted, and they are freed exactly when nobody does."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.core.config import ModelConfig
from jaxserve.executor.block_store import BlockStore, Reference
from jaxserve.executor.host_memory import PINNED, HostShards, PinnedMemory
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from jaxserve.parallel.placement import Placement
from tests.support.internals import held_degrees, held_variants, references_in

VARIANTS = ("float32", "int4")
TIED = {"embed", "head"}
IN_PLACE = "layers.0", "int4"  # where the host is the device


class CountingSource:
    """A tied model that two devices can split. It counts what is read."""

    def __init__(self, checkpoint: Checkpoint):
        self.config = padded_config(replace(checkpoint.config, tie_embeddings=True), 2, split_unit(VARIANTS))
        self.reads: Counter[tuple[str, str]] = Counter()
        self.remembered: list[str | None] = []
        self._read = cache(checkpoint.variant)

    def variant(
        self, block_id: str, precision: str, padded: ModelConfig, between: Callable[[], None] | None = None
    ) -> Mapping[str, Any]:
        self.reads[block_id, precision] += 1
        if between is not None:
            between()
        return self._read(block_id, precision, padded)

    def remember(self, block_id: str | None = None) -> None:
        self.remembered.append(block_id)


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path) -> Checkpoint:
    return open_checkpoint(tiny_model, "dummy")


@pytest.fixture
def source(checkpoint: Checkpoint) -> CountingSource:
    return CountingSource(checkpoint)


@pytest.fixture
def store(source: CountingSource) -> Iterator[BlockStore]:
    store = BlockStore(source, source.config, VARIANTS, host_is_device=True)
    yield store
    store.close()


def on(*devices: int) -> Placement:
    return Placement(tuple(jax.devices()[index] for index in devices))


def leaves(reference: Reference) -> list[jax.Array]:
    return jax.tree.leaves(dict(reference.parameters))


def addresses(reference: Reference) -> dict[int, list[int]]:
    """Return where the buffers of each leaf lie, by the leaf's number."""
    return {
        number: [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
        for number, leaf in enumerate(leaves(reference))
    }


@pytest.mark.parametrize("placements", [[(0,), (1,)], [(0, 1), (2, 3)]])
def test_instances_run_on_the_same_host_arrays_without_a_copy(store, source, placements) -> None:
    copied: list[int] = []
    first, second = (
        store.acquire("layers.1", "int4", on(*devices), between=lambda: 1 / 0, copied=copied.append)
        for devices in placements
    )
    assert copied == []
    assert source.reads == {("layers.1", "int4"): 1}
    assert addresses(first) == addresses(second)
    assert first.in_place
    held = jax.tree.leaves(dict(held_variants(store)["layers.1", "int4"]))
    parts = {part.ctypes.data for shards in held for part in shards.parts}
    assert {address for each in addresses(first).values() for address in each} == parts
    assert store.held_bytes == sum(shards.nbytes for shards in held)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(dict(source.variant("layers.1", "int4", source.config)))]
    first.release()
    assert not any(leaf.is_deleted() for leaf in leaves(first)), "arrays that take no memory are kept"
    found = {leaf.tobytes() for leaf in map(np.asarray, leaves(second))}
    assert found == {leaf.tobytes() for leaf in expected}, "what one instance frees, the other one still uses"


@pytest.mark.parametrize("spec", [("mlp", None), (None, "mlp"), (None, None)])
def test_host_shards_are_cut_as_the_devices_shares_and_never_copied(spec) -> None:
    array = np.arange(6 * 10, dtype=np.float32).reshape(6, 10)
    shards = HostShards.cut(array, on(0, 1).sharding(spec))
    assert shards.nbytes == array.nbytes
    for devices in ((0, 1), (3, 2)):
        placed = shards.on(on(*devices).sharding(spec))
        np.testing.assert_array_equal(placed, array)
        where = {shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards}
        assert where == {part.ctypes.data for part in shards.parts}
        assert len(shards.parts) == (1 if spec == (None, None) else 2)


def test_full_precision_is_not_held_where_the_host_is_the_device(store, source) -> None:
    read: list[int] = []
    first = store.acquire("layers.1", "float32", on(0), between=lambda: read.append(1))
    first.release()
    first = store.acquire("layers.1", "float32", on(0), between=lambda: read.append(1))
    second = store.acquire("layers.1", "float32", on(1))
    assert store.acquire("layers.1", "float32", on(0)).parameters is first.parameters
    assert source.reads == {("layers.1", "float32"): 2}, "again after it was freed, and not while a device has it"
    assert read == [1, 1]
    assert not first.in_place
    store.hold("layers.1", "float32", on(0))
    assert source.remembered == [None, "layers.1"]
    assert held_variants(store) == {}
    second.release()
    assert all(leaf.is_deleted() for leaf in leaves(second))


@pytest.mark.parametrize("pinned", [PinnedMemory(PINNED), None])
def test_all_variants_are_held_once_where_the_device_has_memory_of_its_own(source, pinned) -> None:
    store = BlockStore(source, source.config, VARIANTS, pinned=pinned)
    references = [store.acquire("layers.1", precision, on(device)) for precision in VARIANTS for device in (0, 1)]
    assert source.reads == {("layers.1", precision): 1 for precision in VARIANTS}
    assert source.remembered == []
    held = [leaf for variant in held_variants(store).values() for leaf in jax.tree.leaves(dict(variant))]
    assert {isinstance(leaf, jax.Array) for leaf in held} == {pinned is not None}
    assert {leaf.sharding.memory_kind for reference in references for leaf in leaves(reference)} == {"device"}
    store.close()
    assert all(leaf.is_deleted() for leaf in (*held, *map(leaves, references)) if isinstance(leaf, jax.Array))


@pytest.mark.parametrize("host_is_device", [False, True])
def test_what_may_be_dropped_is_held_or_checked_when_it_is_read_again(source, host_is_device) -> None:
    store = BlockStore(source, source.config, host_is_device=host_is_device, may_drop=True)
    for block in ("embed", "layers.0", "head"):
        store.acquire(block, "float32", on(0)).release()
        assert not leaves(store.acquire(block, "float32", on(1)))[0].is_deleted()
    assert set(source.reads.values()) == {2 if host_is_device else 1}
    assert source.remembered == ([None] if host_is_device else [])
    store.close()


@pytest.mark.parametrize("released_first", ["embed", "head"])
def test_tied_embedding_is_freed_once_with_its_last_user(store, released_first) -> None:
    references = {block: store.acquire(block, "float32", on(0)) for block in ("embed", "head")}
    embedding = references["embed"].parameters["weight"]
    assert references["head"].parameters["weight"] is embedding
    references.pop(released_first).release()
    assert not embedding.is_deleted()
    (last,) = references.values()
    last.release()
    assert embedding.is_deleted()
    assert references_in(store) == {}


def test_head_on_other_devices_than_the_embedding_has_a_weight_of_its_own(store) -> None:
    embed, head = store.acquire("embed", "float32", on(0)), store.acquire("head", "float32", on(1))
    embed.release()
    assert embed.parameters["weight"].is_deleted()
    assert not head.parameters["weight"].is_deleted()


def test_failed_reading_leaves_no_reference_and_can_be_repeated(store, source, monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(source, "variant", fail)
        for precision in VARIANTS:
            with pytest.raises(OSError, match="Input/output"):
                store.acquire("layers.0", precision, on(0))
    assert references_in(store) == {}
    assert not leaves(store.acquire("layers.0", "int4", on(0)))[0].is_deleted()


keys = st.tuples(
    st.sampled_from([("embed", "float32"), ("head", "float32"), ("layers.0", "float32"), ("layers.0", "int4")]),
    st.sampled_from([(0,), (1,), (0, 1)]),
)


@settings(max_examples=60)
@given(st.lists(st.one_of(keys, st.integers(0, 30)), max_size=40), st.booleans())
def test_parameters_are_freed_exactly_when_the_last_reference_goes(checkpoint, history, host_is_device) -> None:
    """A history acquires (keys) and releases (numbers) in any order, and releases some references twice."""
    source = CountingSource(checkpoint)
    store = BlockStore(source, source.config, VARIANTS, host_is_device=host_is_device)
    taken: list[tuple[Any, Reference]] = []
    open_references: dict[int, Any] = {}
    shares: dict[int, Any] = {}  # of a head: the embedding that it was tied to
    for event in history:
        if isinstance(event, tuple):
            (block, precision), devices = event
            embedding = ("embed", precision, on(*devices))
            tied = block == "head" and embedding in references_in(store)
            made = (block, precision, on(*devices)) not in references_in(store)
            reference = store.acquire(block, precision, on(*devices))
            same = [n for n in open_references if taken[n][0] == event]
            open_references[len(taken)] = event
            shares[len(taken)] = embedding if (tied if made else any(shares[n] for n in same)) else None
            taken.append((event, reference))
        elif taken:
            number = event % len(taken)
            taken[number][1].release()
            open_references.pop(number, None)
        used = {(*taken[n][0][0], on(*taken[n][0][1])) for n in open_references}
        used |= {shares[n] for n in open_references if shares[n]}
        assert references_in(store).keys() == used
        for number in open_references:
            assert not any(leaf.is_deleted() for leaf in leaves(taken[number][1]))
        for (name, devices), reference in taken:
            if (*name, on(*devices)) not in used and name[0] not in TIED:
                kept = reference.in_place and len(devices) in held_degrees(store, *name)
                assert kept or all(leaf.is_deleted() for leaf in leaves(reference))
        degrees = {len(place.devices) for block, precision, place in used if (block, precision) == IN_PLACE}
        assert not host_is_device or held_degrees(store, *IN_PLACE) == degrees or not degrees
    store.close()
    assert all(leaf.is_deleted() for _, reference in taken for leaf in leaves(reference))
    for _, reference in taken:
        reference.release()
    assert references_in(store) == {}


class Other(CountingSource):
    """Another source of the same layers, whose norms are twice as large."""

    def variant(
        self, block_id: str, precision: str, padded: ModelConfig, between: Callable[[], None] | None = None
    ) -> Mapping[str, Any]:
        found = dict(super().variant(block_id, precision, padded, between))
        return found | {"input_norm.weight": 2 * found["input_norm.weight"]}


def norm(reference: Reference) -> np.ndarray:
    return np.array(reference.parameters["input_norm.weight"])


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
@pytest.mark.parametrize("in_place", [True, False])
def test_renewed_variants_are_used_from_the_next_change_on(source, tiny_model, devices, in_place) -> None:
    store = BlockStore(source, source.config, VARIANTS, host_is_device=in_place)
    placement, other = on(*devices), Other(open_checkpoint(tiny_model, "dummy"))
    for layer in ("layers.0", "layers.1"):
        store.hold(layer, "int4", placement)
    running = store.acquire("layers.0", "int4", placement)
    store.acquire("layers.1", "int4", placement).release()
    before, held = norm(running), store.held_bytes
    for layer in ("layers.0", "layers.1"):
        store.renew(other, layer, "int4", placement)
    assert store.held_bytes == held
    np.testing.assert_array_equal(norm(running), before)
    changed, rounded = store.acquire("layers.1", "int4", placement), source.variant("layers.1", "int4", source.config)
    np.testing.assert_array_equal(norm(changed), 2 * np.asarray(rounded["input_norm.weight"]))
    running.release()
    again = store.acquire("layers.0", "int4", placement)
    np.testing.assert_array_equal(norm(again), 2 * before)
    store.close()
