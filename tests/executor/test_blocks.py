"""Collectives and native kernels in the executables of split blocks."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.executor.block_store import BlockStore
from jaxserve.executor.blocks import BlockBuilder
from jaxserve.kernels import AttentionMeta, kv_pool, native
from jaxserve.kernels.native.library import MATMUL, WRITE_AND_ATTEND
from jaxserve.models import abstract_block, config_from_hf
from jaxserve.parallel.padding import padded_config
from jaxserve.parallel.placement import POOL_AXES, Placement
from tests.golden.cases import llama

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}


def lowered(block: str, precision: str, *, dtype: str = "bfloat16") -> jax.stages.Lowered:
    """Return the program of a block split over two devices, for four decoding sequences."""
    model = padded_config(config_from_hf(llama(dtype=dtype, head_dim=64, **SIZES)), tp=2)
    placement = Placement(tuple(jax.devices()[:2]))
    _, variables = abstract_block(model, block, precision)
    tensors = {name: jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), v.get_value()) for name, v in variables.items()}
    source = SimpleNamespace(variant=lambda *args: tensors)
    loaded = BlockBuilder(model, BlockStore(source, model)).load(block, precision, placement)
    x, ids = jnp.zeros((4, model.hidden_size), dtype), jnp.arange(4, dtype=jnp.int32)
    if block == "head":
        return loaded.executable.lower(x, ids, *loaded.leaves)
    pool = kv_pool(9, model.num_kv_heads, 16, model.head_dim, dtype, placement.sharding(POOL_AXES))
    none = jnp.zeros(0, jnp.int32)
    meta = AttentionMeta(jnp.ones((4, 2), jnp.int32), ids + 1, jnp.zeros((0, 2), jnp.int32), none, none)
    rotation = jnp.ones((4, model.head_dim // 2))
    return loaded.executable.lower(x, rotation, rotation, ids + 16, meta, pool, *loaded.leaves)


def collectives(program: jax.stages.Lowered) -> list[str]:
    text = program.compile().as_text()
    return re.findall(r"= \S+ (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "int4")],
)
def test_split_layer_runs_two_all_reduces_and_moves_no_weight(dtype: str, precision: str) -> None:
    assert collectives(lowered("layers.0", precision, dtype=dtype)) == ["all-reduce"] * 2


def test_split_head_gathers_its_logits_once() -> None:
    assert collectives(lowered("head", "bfloat16")) == ["all-gather"]


@pytest.mark.skipif(not native.targets(), reason="needs the native library")
@pytest.mark.parametrize("precision", ["int8", "int4", "int3"])
def test_split_layer_runs_native_kernels_on_each_devices_share(precision: str) -> None:
    program = lowered("layers.0", precision).as_text()
    assert program.count(f"@{MATMUL}") >= 4
    assert f"@{WRITE_AND_ATTEND}" in program
