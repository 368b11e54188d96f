"""Parameters of a new placement come from the devices that have them, as real copies, at every degree."""

import gc
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.compilation.cache import CompileCounter
from jaxserve.compilation.programs import Compiler
from jaxserve.core.config import ModelConfig
from jaxserve.executor.block_store import BlockStore, Reference
from jaxserve.executor.host_memory import PINNED, PinnedMemory, PinnedShards
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from jaxserve.parallel.placement import Placement, on_device
from tests.conftest import TINY
from tests.support.internals import held_degrees, held_variants, references_in, wrap_shard_copies

SMALL = TINY | {"num_key_value_heads": 4, "tie_word_embeddings": True, "num_hidden_layers": 2}
BLOCKS = [("embed", "float32"), ("layers.1", "float32"), ("layers.1", "int4"), ("head", "float32")]
DEGREES = [
    ([(0,), (1,)], [(0, 1)]),
    ([(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)]),
    ([(0, 1), (2, 3)], [(0, 2, 1, 3)]),
]


class Source:
    """A checkpoint that counts what is read."""

    def __init__(self, checkpoint: Checkpoint):
        self.config = padded_config(checkpoint.config, 4, split_unit(["int4"]))
        self.reads: Counter[tuple[str, str]] = Counter()
        self._checkpoint = checkpoint

    def variant(self, block: str, precision: str, padded: ModelConfig, between: Any = None) -> Mapping[str, Any]:
        self.reads[block, precision] += 1
        return self._checkpoint.variant(block, precision, padded, between)

    def remember(self, block: str | None = None) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("four")
    (folder / "config.json").write_text(json.dumps(SMALL))
    return open_checkpoint(folder, "dummy")


@pytest.fixture
def source(checkpoint: Checkpoint) -> Source:
    return Source(checkpoint)


@pytest.fixture
def store(source: Source) -> Iterator[BlockStore]:
    store = BlockStore(source, source.config)
    yield store
    store.close()


def on(*devices: int) -> Placement:
    return Placement(tuple(jax.devices()[index] for index in devices))


def leaves(reference: Reference) -> list[jax.Array]:
    return jax.tree.leaves(dict(reference.parameters))


def share_bytes(reference: Reference) -> int:
    """Return the bytes that a block takes on its first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves(reference))


def buffers(reference: Reference) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for leaf in leaves(reference) for shard in leaf.addressable_shards]


def assert_equal(reference: Reference, expected: Mapping[str, Any]) -> None:
    found = jax.tree.leaves({name: reference.parameters[name] for name in expected})
    for leaf, value in zip(found, jax.tree.leaves(dict(expected)), strict=True):
        np.testing.assert_array_equal(leaf, value)


@pytest.mark.parametrize(("members", "merged"), DEGREES)
@pytest.mark.parametrize(("block", "precision"), BLOCKS)
def test_blocks_are_merged_on_their_devices_and_split_again(store, source, block, precision, members, merged) -> None:
    """The old copy of a block is freed before the next degree uses the new one, so that shared buffers would show."""
    expected = source.variant(block, precision, source.config)
    source.reads.clear()
    references = [store.acquire(block, precision, on(*devices)) for devices in members]
    assert sum(source.reads.values()) == 1, "the other members take it from the first"
    whole, part = share_bytes(references[0]), 0
    store.traffic.reset()
    for devices in (merged, members):
        new = [store.acquire(block, precision, on(*each)) for each in devices]
        old, references = references, new
        part = part or share_bytes(new[0])
        assert set(buffers(new[0])).isdisjoint(pointer for each in old for pointer in buffers(each))
        for each in old:
            each.release()
        assert all(leaf.is_deleted() for each in old for leaf in leaves(each))
        for each in new:
            assert_equal(each, expected)
        counted = store.traffic.reset()
        assert counted.host == 0
        if devices == merged:
            assert counted.local == part * len(merged[0])
            assert not counted.links, "a merge moves nothing over a link"
        else:
            moved = sum(counted.links.values())
            assert moved + counted.local == whole * len(merged[0])
            assert moved <= (whole - whole // (len(merged[0]) // len(members[0]))) * len(merged[0])
    assert sum(source.reads.values()) == 1


def test_new_instance_gets_the_blocks_of_another_one_from_its_devices(store, source) -> None:
    first = store.acquire("layers.0", "float32", on(0, 1))
    store.traffic.reset()
    second = store.acquire("layers.0", "float32", on(4, 5))
    links = store.traffic.reset().links
    assert sum(source.reads.values()) == 1
    assert sum(links.values()) == 2 * share_bytes(second)
    assert {(source.id, target.id) for source, target in links} == {(0, 4), (1, 5)}
    first.release()
    assert_equal(second, source.variant("layers.0", "float32", source.config))


def test_block_in_another_precision_is_no_source(store) -> None:
    store.acquire("layers.0", "float32", on(0))
    store.traffic.reset()
    reference = store.acquire("layers.0", "int4", on(0, 1))
    assert store.traffic.bytes.host == 2 * share_bytes(reference)
    assert store.traffic.bytes.local == 0


def test_tied_head_follows_the_embedding_to_its_new_devices(store) -> None:
    old = {name: store.acquire(name, "float32", on(0)) for name in ("embed", "head")}
    new = {}
    for name in ("embed", "head"):
        new[name] = store.acquire(name, "float32", on(0, 1))
        old[name].release()
    assert new["head"].parameters["weight"] is new["embed"].parameters["weight"]
    assert old["embed"].parameters["weight"].is_deleted()
    assert not any(leaf.is_deleted() for leaf in leaves(new["head"]))
    assert set(references_in(store)) == {(name, "float32", on(0, 1)) for name in ("embed", "head")}


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_error_during_a_copy_leaves_nothing_behind(store, monkeypatch, failing: int) -> None:
    members = [store.acquire("layers.0", "float32", on(device)) for device in (0, 1)]
    before, there = references_in(store), {id(array) for array in jax.live_arrays()}
    calls = 0

    def wrap(run: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory for the share")
            return run(*arguments)

        return counted

    with monkeypatch.context() as patch:
        wrap_shard_copies(patch, store, wrap)
        with pytest.raises(jax.errors.JaxRuntimeError, match="no memory for the share"):
            store.acquire("layers.0", "float32", on(0, 1))
    assert references_in(store) == before
    gc.collect()
    new = [array for array in jax.live_arrays() if id(array) not in there and not array.is_deleted()]
    own = {id(on_device(leaf, device)) for each in members for leaf in leaves(each) for device in leaf.devices()}
    assert [array.shape for array in new if id(array) not in own] == []
    merged = store.acquire("layers.0", "float32", on(0, 1))
    assert not any(leaf.is_deleted() for each in (*members, merged) for leaf in leaves(each))


@pytest.mark.parametrize(("members", "merged"), DEGREES)
def test_programs_of_a_merge_and_a_split_are_compiled_ahead(store, members, merged) -> None:
    references = [store.acquire("layers.1", "int4", on(*devices)) for devices in members]
    here, there = [on(*each) for each in members], on(*merged[0])
    ways = [(there, here), *((each, [there, *here[:index]]) for index, each in enumerate(here))]
    compiler = Compiler()
    for target, copies in ways:
        store.compile_copies(compiler, references[0], "layers.1", "int4", target, copies)
    compiler.wait()
    counter = CompileCounter()
    whole = store.acquire("layers.1", "int4", there)
    for each in references:
        each.release()
    for place in here:
        store.acquire("layers.1", "int4", place)
    assert set(counter.counts.values()) == {0}
    counter.close()
    assert not any(leaf.is_deleted() for leaf in leaves(whole))


def test_held_variants_are_cut_again_for_the_degree_in_use(source) -> None:
    """Cuts of two degrees exist while both are used. Of the second, only products over a split axis take memory."""
    store = BlockStore(source, source.config, ("int4",), host_is_device=True)
    expected = source.variant("layers.0", "int4", source.config)
    members = [store.acquire("layers.0", "int4", on(device)) for device in (0, 1)]
    size = store.held_bytes
    merged = store.acquire("layers.0", "int4", on(0, 1))
    assert merged.in_place
    assert held_degrees(store, "layers.0", "int4") == {1, 2}
    split_inputs = ("attention.o", "mlp.down")
    copied = store.held_bytes - size - sum(expected[name].nbytes for name in split_inputs)
    assert 0 <= copied < 2048, "and parts that are too small to be aligned"
    assert_equal(merged, expected)
    for each in members:
        each.release()
    assert held_degrees(store, "layers.0", "int4") == {2}
    assert store.held_bytes == size, "no second copy is left"
    assert all(leaf.is_deleted() for each in members for leaf in leaves(each))
    assert_equal(merged, expected)
    merged.release()
    assert held_degrees(store, "layers.0", "int4") == {2}, "the variant stays"
    again = store.acquire("layers.0", "int4", on(1))
    assert held_degrees(store, "layers.0", "int4") == {1}
    assert store.held_bytes == size
    assert_equal(again, expected)
    assert source.reads["layers.0", "int4"] == 2, "once by the store, and once by this test"
    assert store.traffic.bytes.host == 0
    store.close()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_pinned_variants_serve_every_degree(source, degree: int) -> None:
    store = BlockStore(source, source.config, ("int4",), pinned=PinnedMemory(PINNED))
    store.hold("layers.0", "int4", on(0))
    held = held_variants(store)["layers.0", "int4"]
    parts = jax.tree.leaves(dict(held), is_leaf=lambda leaf: isinstance(leaf, PinnedShards))
    assert {len(leaf.parts) for leaf in parts if isinstance(leaf, PinnedShards)} == {4}
    size = store.held_bytes
    reference = store.acquire("layers.0", "int4", on(*range(degree)))
    assert_equal(reference, source.variant("layers.0", "int4", source.config))
    assert {leaf.sharding.memory_kind for leaf in leaves(reference)} == {"device"}
    assert store.traffic.bytes.host == degree * share_bytes(reference)
    assert store.held_bytes == size
    store.close()
