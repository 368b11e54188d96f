"""Layers that the members of a merged instance run apart compute what the members computed before."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint import Checkpoint
from jaxserve.executor.apart import ApartPlacement
from jaxserve.executor.block_store import BlockStore
from jaxserve.executor.blocks import BlockBuilder
from jaxserve.executor.pools import PoolPrograms
from jaxserve.kernels import AttentionMeta
from jaxserve.models import rope_cos_sin
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from jaxserve.parallel.placement import POOL_AXES
from tests.executor.test_merged_layers import PAGE, PAGES, PROMPT, Layer, checkpoint, on  # noqa: F401


def check_equal(pool: jax.Array, expected: jax.Array | np.ndarray) -> None:
    """Compare all pages but the null page. Products of more rows are rounded differently."""
    np.testing.assert_allclose(np.asarray(pool)[1:], np.asarray(expected)[1:], atol=1e-6)


@pytest.mark.parametrize("precision", ["float32", "int4"])
@pytest.mark.parametrize("members", [[(0,), (1,)], [(0, 1), (2, 3)], [(0,), (2,), (1,), (3,)]])
def test_members_compute_their_own_rows(checkpoint: Checkpoint, precision: str, members: Sequence[tuple]) -> None:  # noqa: F811
    count, config = len(members), padded_config(checkpoint.config, 4, split_unit(["int4"]))
    builder = BlockBuilder(config, BlockStore(checkpoint, config))
    places = [on(devices) for devices in members]
    place = ApartPlacement(on([devices[j] for j in range(len(members[0])) for devices in members]), count)
    sizes = {"kv_heads": config.num_kv_heads, "page_size": PAGE, "head_dim": config.head_dim, "dtype": "float32"}
    random = np.random.default_rng(0)
    prompts = random.standard_normal((count, PROMPT, config.hidden_size), np.float32)
    tokens = random.standard_normal((count, config.hidden_size), np.float32)

    layers = [Layer(builder, precision, own) for own in places]
    pools = [PoolPrograms(own, **sizes).make(PAGES) for own in places]
    pools = [layer.prompt(prompt, pool, (3, 5)) for layer, pool, prompt in zip(layers, pools, prompts, strict=True)]
    copies = [jax.tree.map(jnp.copy, pool) for pool in pools]
    expected = [
        layer.token(tokens[index : index + 1], pool, np.array([[3, 5, 9]]))
        for index, (layer, pool) in enumerate(zip(layers, copies, strict=True))
    ]

    apart = builder.apart([layer.loaded for layer in layers], place)
    assert [leaf.shape for leaf in apart.leaves] == [leaf.shape for leaf in layers[0].loaded.leaves]
    pool = place.join_pools(pools)
    pages = np.array([[count * page + index for page in (3, 5, 9)] for index in range(count)])
    none = jnp.zeros(0, jnp.int32)
    meta = AttentionMeta(
        jnp.asarray(pages, jnp.int32), jnp.full(count, PROMPT + 1, jnp.int32), jnp.zeros((0, 3), jnp.int32), none, none
    )
    cos, sin = rope_cos_sin(config, jnp.full(count, PROMPT, jnp.int32))
    slots = jnp.asarray(pages[:, -1] * PAGE, jnp.int32)
    inputs = jax.device_put((jnp.asarray(tokens), cos, sin, slots, meta), place.placement.sharding())
    out, pool = apart.executable(*inputs, pool, *apart.leaves)

    np.testing.assert_allclose(np.asarray(out), np.concatenate([own for own, _ in expected]), atol=1e-6)
    parts = place.part_pool(pool, [own.sharding(POOL_AXES) for own in places])
    for part, (_, wanted) in zip(parts, expected, strict=True):
        check_equal(part[0], wanted[0])


def test_prompts_are_computed_apart(checkpoint: Checkpoint) -> None:  # noqa: F811
    """Each tile of a step belongs to a member."""
    config = padded_config(checkpoint.config, 2)
    builder, places = BlockBuilder(config, BlockStore(checkpoint, config)), [on((0,)), on((1,))]
    place = ApartPlacement(on((0, 1)), 2)
    sizes = {"kv_heads": config.num_kv_heads, "page_size": PAGE, "head_dim": config.head_dim, "dtype": "float32"}
    x = np.random.default_rng(0).standard_normal((2, PROMPT, config.hidden_size)).astype(np.float32)
    layers = [Layer(builder, "float32", own) for own in places]
    expected = [
        np.asarray(layer.prompt(prompt, PoolPrograms(own, **sizes).make(PAGES), (3, 5))[0])
        for layer, own, prompt in zip(layers, places, x, strict=True)
    ]
    apart = builder.apart([layer.loaded for layer in layers], place)
    pool = place.join_pools([PoolPrograms(own, **sizes).make(PAGES) for own in places])
    pages, none = np.array([[6, 10], [7, 11]]), jnp.zeros(0, jnp.int32)
    meta = AttentionMeta(
        jnp.zeros((0, 2), jnp.int32),
        none,
        jnp.asarray(pages, jnp.int32),
        jnp.zeros(2, jnp.int32),
        jnp.full(2, PROMPT, jnp.int32),
    )
    positions = np.tile(np.arange(PROMPT), 2)
    cos, sin = rope_cos_sin(config, jnp.asarray(positions, jnp.int32))
    slots = np.repeat(pages, PAGE, axis=1).reshape(-1) * PAGE + positions % PAGE
    inputs = (jnp.asarray(x.reshape(2 * PROMPT, -1)), cos, sin, jnp.asarray(slots, jnp.int32), meta)
    _, pool = apart.executable(*jax.device_put(inputs, place.placement.sharding()), pool, *apart.leaves)
    for part, wanted in zip(place.part_pool(pool, [own.sharding(POOL_AXES) for own in places]), expected, strict=True):
        check_equal(part[0], wanted)
