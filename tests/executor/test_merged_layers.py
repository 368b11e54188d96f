"""Blocks and KV pages of a merged instance compute what those of an instance that always had its degree compute."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.build import build
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.executor.block_store import BlockStore
from jaxserve.executor.blocks import BlockBuilder, LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.kv_exchange import KVExchange, Side
from jaxserve.executor.pools import PoolPrograms, Pools
from jaxserve.executor.programs import InstanceSizes
from jaxserve.kernels import AttentionMeta, Pool
from jaxserve.kvcache import PageTable
from jaxserve.models import rope_cos_sin
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from jaxserve.parallel.placement import Placement
from jaxserve.sampling.device_sampler import DeviceSampler
from tests.conftest import TINY
from tests.support.internals import run_on_padding, store_of

PAGES, PAGE = 40, 16
PROMPT = 2 * PAGE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("four")
    (folder / "config.json").write_text(json.dumps(TINY | {"num_key_value_heads": 4, "num_hidden_layers": 1}))
    return open_checkpoint(folder, "dummy")


def on(devices: Sequence[int]) -> Placement:
    return Placement(tuple(jax.devices()[index] for index in devices))


class Layer:
    """A decoder layer on a placement, called with the hidden states of prompts and of next tokens."""

    def __init__(self, builder: BlockBuilder, precision: str, placement: Placement):
        self.config, self.placement = builder.config, placement
        self.loaded: LoadedBlock = builder.load("layers.0", precision, placement)

    def prompt(self, x: np.ndarray, pool: Pool, pages: Sequence[int]) -> Pool:
        """Write the keys and values of a prompt to these pages."""
        none = jnp.zeros(0, jnp.int32)
        tiles = (jnp.array([pages], jnp.int32), jnp.zeros(1, jnp.int32), jnp.array([len(x)], jnp.int32))
        meta = AttentionMeta(jnp.zeros((0, len(pages)), jnp.int32), none, *tiles)
        positions = np.arange(len(x))
        return self._call(x, positions, np.array(pages)[positions // PAGE], meta, pool)[1]

    def token(self, x: np.ndarray, pool: Pool, pages: np.ndarray) -> tuple[np.ndarray, Pool]:
        """Return the outputs for the next token of sequences with these pages, whose last one is new."""
        none, count = jnp.zeros(0, jnp.int32), len(x)
        lengths = jnp.full(count, PROMPT + 1, jnp.int32)
        meta = AttentionMeta(
            jnp.asarray(pages, jnp.int32), lengths, jnp.zeros((0, pages.shape[1]), jnp.int32), none, none
        )
        return self._call(x, np.full(count, PROMPT), pages[:, -1], meta, pool)

    def _call(
        self, x: np.ndarray, positions: np.ndarray, pages: np.ndarray, meta: AttentionMeta, pool: Pool
    ) -> tuple[np.ndarray, Pool]:
        cos, sin = rope_cos_sin(self.config, jnp.asarray(positions, jnp.int32))
        slots = jnp.asarray(pages * PAGE + positions % PAGE, jnp.int32)
        inputs = jax.device_put((jnp.asarray(x), cos, sin, slots, meta), self.placement.sharding())
        out, pool = self.loaded.executable(*inputs, pool, *self.loaded.leaves)
        return np.asarray(out), pool


@pytest.mark.parametrize(
    ("precision", "host_is_device", "members"),
    [
        ("float32", False, [(0, 1), (2, 3)]),
        ("int4", False, [(0,), (2,), (1,), (3,)]),
        ("int4", True, [(0,), (1,)]),
    ],
)
def test_merged_layer_equals_one_of_the_same_degree_and_splits_again(
    checkpoint: Checkpoint, precision: str, host_is_device: bool, members: list
) -> None:
    count, config = len(members), padded_config(checkpoint.config, 4, split_unit(["int4"]))
    store = BlockStore(checkpoint, config, ["int4"] if host_is_device else (), host_is_device=host_is_device)
    builder = BlockBuilder(config, store)
    sizes = {"kv_heads": config.num_kv_heads, "page_size": PAGE, "head_dim": config.head_dim}
    programs = partial(PoolPrograms, **sizes, dtype="float32")
    places = [on(devices) for devices in members]
    merged_place = on([devices[j] for j in range(len(members[0])) for devices in members])
    random = np.random.default_rng(0)
    prompts = random.standard_normal((count, PROMPT, config.hidden_size), np.float32)
    tokens = random.standard_normal((count, config.hidden_size), np.float32)

    layers = [Layer(builder, precision, place) for place in places]
    pools = [Pools([programs(place)], (PAGES,)) for place in places]
    for layer, own, prompt in zip(layers, pools, prompts, strict=True):
        own[0] = layer.prompt(prompt, own[0], (3, 5))
    exchange = KVExchange(
        [Side((programs(place),), (PAGES,)) for place in places], Side((programs(merged_place),), (count * PAGES,))
    )
    merged = Layer(builder, precision, merged_place)
    for layer in layers:
        layer.loaded.free()
    pool = exchange.merge(pools, [3, 5])

    static = Layer(BlockBuilder(config, BlockStore(checkpoint, config)), precision, merged_place)
    expected = programs(merged_place).make(count * PAGES)
    for index, prompt in enumerate(prompts):
        expected = static.prompt(prompt, expected, (3 * count + index, 5 * count + index))
    tables = np.array([[3 * count + index, 5 * count + index, 9 * count + index] for index in range(count)])
    found, pool[0] = merged.token(tokens, pool[0], tables)
    wanted, expected = static.token(tokens, expected, tables)
    np.testing.assert_allclose(found, wanted, atol=2e-5)

    layers = [Layer(builder, precision, place) for place in places]
    merged.loaded.free()
    for index, (layer, own) in enumerate(zip(layers, exchange.split(pool, [3, 5, 9]), strict=True)):
        out, _ = layer.token(tokens[index : index + 1], own[0], np.array([[3, 5, 9]]))
        np.testing.assert_allclose(out[0], found[index], atol=2e-5)
    store.close()


class Engine:
    """Two instances that may become one: their weights are padded for two devices."""

    def __init__(self, model: Path):
        options = {"load_format": "dummy", "dp": 2, "max_tp": 2, "memory_gb": 8, "max_num_seqs": 4, "kv_pages": 40}
        self.built = build(EngineConfig(model=model, warmup=False, fuse=False, **options))
        self.members = [steps.executor for steps in self.built.instances]
        resolved, layers = self.built.resolved, self.built.resolved.padded_model.num_layers
        self.store, self.model = store_of(self.members[0]), resolved.padded_model
        self.places = [each.blocks[0].placement for each in self.members]
        self.merged_place = on([place.devices[0].id for place in self.places])
        self.programs = self.built.programs
        self.builder = self.programs.builder
        sizes = self.members[0].pools.sizes
        self.exchange = KVExchange(
            [Side((self.programs.pools(place),) * layers, sizes) for place in self.places],
            Side((self.programs.pools(self.merged_place),) * layers, tuple(2 * size for size in sizes)),
        )
        self.pages = range(1, sizes[0])

    def merge(self) -> tuple[list[LoadedBlock], Pools]:
        """Return the blocks and pools of the merged instance. The members' blocks are freed one by one."""
        blocks = []
        for old in zip(*(each.blocks for each in self.members), strict=True):
            blocks.append(self.builder.load(old[0].block, old[0].precision, self.merged_place))
            for loaded in old:
                loaded.free()
        return blocks, self.exchange.merge([each.pools for each in self.members], self.pages)

    def split(self, blocks: list[LoadedBlock], pools: Pools) -> None:
        """Give everything back to the members."""
        for member, own in zip(self.members, self.exchange.split(pools, self.pages), strict=True):
            member.pools.take_over(own)
        for loaded in blocks:
            for member, place in zip(self.members, self.places, strict=True):
                member.replace([self.builder.load(loaded.block, loaded.precision, place)])
            loaded.free()


def test_executor_of_a_merged_placement_takes_blocks_and_pools_of_its_members(tiny_model: Path) -> None:
    """Closing the members afterwards frees nothing of the merged executor."""
    engine = Engine(tiny_model)
    resolved, (first, _) = engine.built.resolved, engine.members
    assert engine.store.traffic.reset().host == sum(loaded.nbytes for loaded in first.blocks), "not once for each"
    blocks, pools = engine.merge()
    traffic = engine.store.traffic.reset()
    assert not traffic.host
    assert not traffic.links
    buckets = resolved.buckets_of(2)
    sizes = InstanceSizes(buckets, pools.sizes, resolved.max_len(2))
    sampler = DeviceSampler(engine.programs.sampler(engine.merged_place, sizes))
    table = PageTable(8, first.table.width)
    page_size = resolved.config.page_size
    merged = BlockExecutor(blocks, pools, engine.programs, sampler, buckets, table, page_size)
    for member in engine.members:
        member.close()
    run_on_padding(merged, buckets.all()[-1])
    merged.wait_for_pools()
    merged.close()
    engine.built.close()


def test_instances_answer_as_before_after_a_merge_and_a_split(tiny_model: Path) -> None:
    """Both happen with a step in flight, as if a merge was undone that had moved everything."""
    answers = []
    for regroup in (False, True):
        engine, tokens = Engine(tiny_model), [[], []]
        for index, steps in enumerate(engine.built.instances):
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            steps.add(Request(f"r{index}", tuple(range(3 + index, 43)), params, 0.0))
        for step in range(40):
            for own, steps in zip(tokens, engine.built.instances, strict=True):
                own += [token for output in steps.step() for each in output.outputs for token in each.token_ids]
            if regroup and step == 7:
                assert all(steps.in_flight for steps in engine.built.instances)
                engine.split(*engine.merge())
        answers.append(tokens)
        engine.built.close()
    assert [len(own) for own in answers[0]] == [30, 30]
    assert answers[0] == answers[1]
