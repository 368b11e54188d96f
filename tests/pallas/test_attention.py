from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import AttentionMeta, kv_write, paged_attention as dispatched
from jaxserve.kernels.kv import row_size
from pallas_kernels.blocks import HOPPER, AttentionBlocks
from pallas_kernels.paged_attention import attend, merge, paged_attention, splits_for, supports
from tests.kernels.problems import Shape, dense_answer, in_segments, make_problem
from tests.pallas.conftest import lowered
from tests.support.thorough import some

SMALL = Shape(B=2, N=1, Q=8, K=1, G=4, D=64, S=16, W=9, dtype="bfloat16")
SHAPES = {
    "gqa": SMALL,
    "mha": replace(SMALL, K=2, G=1),
    "groups that do not divide the rows": replace(SMALL, G=7, Q=20),
    "tiles of many blocks": replace(SMALL, B=0, Q=40),
    "no tiles": replace(SMALL, N=0),
    "nothing": replace(SMALL, B=0, N=0),
    "D=80": replace(SMALL, D=80),
    "D=96": replace(SMALL, D=96),
    "D=128": replace(SMALL, D=128),
    "D=256": replace(SMALL, D=256),
    "pages of 8": replace(SMALL, S=8, W=19),
    "pages of 32": replace(SMALL, S=32, W=5),
    "pages of 64": replace(SMALL, S=64, W=3),
    "pages larger than a tile": replace(SMALL, S=128, W=2),
    "window": replace(SMALL, window=70),
    "window of one": replace(SMALL, window=1),
    "f16": replace(SMALL, dtype="float16"),
    "int8": replace(SMALL, kv_dtype="int8"),
    "int8, D=80": replace(SMALL, D=80, kv_dtype="int8"),
    "int8, D=96": replace(SMALL, D=96, kv_dtype="int8"),
    "int8, D=128, window": replace(SMALL, D=128, kv_dtype="int8", window=70),
    "int8, D=256": replace(SMALL, D=256, kv_dtype="int8"),
    "int8, pages of 8": replace(SMALL, S=8, W=19, kv_dtype="int8"),
    "int8, pages of 32": replace(SMALL, S=32, W=5, kv_dtype="int8"),
    "int8, pages of 64": replace(SMALL, S=64, W=3, kv_dtype="int8"),
    "int8, pages larger than a tile": replace(SMALL, S=128, W=2, kv_dtype="int8"),
}
SCALE = 0.3
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


def problem_on_gpu(shape, seed=0):
    """Return a problem whose pool is stored as on a GPU, and whose int8 values are expected in the queries' dtype."""
    problem = make_problem(shape, seed)
    (pool,) = problem.pool
    if shape.kv_dtype == "int8":
        fill = row_size(shape.D, "int8", "gpu") - pool.shape[-1]
        contexts = [tuple(x.astype(shape.dtype).astype(np.float32) for x in kv) for kv in problem.contexts]
        pool = jnp.pad(pool, [(0, 0)] * 4 + [(0, fill)], constant_values=-1)
        return replace(problem, pool=(pool,), contexts=contexts)
    return replace(problem, pool=(pool.view(shape.dtype),))


def check(shape, seed=0, **kwargs):
    problem = problem_on_gpu(shape, seed)
    attention = jax.jit(partial(paged_attention, scale=SCALE, window=shape.window, **kwargs))
    out = np.asarray(attention(problem.q, problem.pool, problem.meta)).astype(np.float32)
    answer = dense_answer(problem, SCALE, shape.window)
    np.testing.assert_allclose(out, answer, atol=TOLERANCE[shape.dtype], rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gpu_attention_equals_dense_attention(interpret, shape):
    check(shape, interpret=interpret)


@pytest.mark.parametrize("sizes", [AttentionBlocks(64, 3), AttentionBlocks(128, 2)], ids=str)
def test_gpu_attention_with_other_block_sizes_equals_dense_attention(interpret, sizes):
    check(replace(SMALL, W=20), blocks=replace(HOPPER, decode=sizes, prefill=sizes), interpret=interpret)


@pytest.mark.parametrize(
    "shape",
    [SMALL, replace(SMALL, S=128, W=2), replace(SMALL, kv_dtype="int8")],
    ids=["small pages", "large pages", "int8"],
)
@pytest.mark.parametrize("shares", [(0.2, 0.5, 0.7), [i / 8 for i in range(1, 8)]], ids=["unequal", "eight"])
def test_gpu_attention_over_pool_segments_equals_dense_attention(interpret, shape, shares):
    problem = in_segments(problem_on_gpu(shape), *shares)
    out = paged_attention(problem.q, problem.pool, problem.meta, scale=SCALE, interpret=interpret)
    np.testing.assert_allclose(out.astype(jnp.float32), dense_answer(problem, SCALE, None), atol=2e-2, rtol=0)


@pytest.mark.parametrize(("window", "kv_dtype"), [(None, None), (100, None), (None, "int8")])
def test_gpu_attention_split_over_programs_equals_dense_attention(interpret, window, kv_dtype):
    """Some of the splits see no key at all."""
    shape = replace(SMALL, N=0, W=20, window=window, kv_dtype=kv_dtype)
    problem = problem_on_gpu(shape)
    meta = problem.meta
    lengths = meta.decode_lengths
    out = attend(
        problem.q[:, None], problem.pool, meta.decode_pages, lengths - 1, jnp.minimum(lengths, 1),
        scale=SCALE, window=window, splits=4, blocks=HOPPER.decode, interpret=interpret,
    )  # fmt: skip
    np.testing.assert_allclose(out[:, 0].astype(jnp.float32), dense_answer(problem, SCALE, window), atol=2e-2)


def test_merged_shares_of_keys_equal_attention_over_all_keys():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(3, 5, 7)) * 4, rng.normal(size=(3, 7, 2))
    exponentials = np.exp2(scores)
    shares = np.einsum("srk,skd->srd", exponentials, values) / exponentials.sum(-1, keepdims=True)
    whole = np.einsum("srk,skd->rd", exponentials, values) / exponentials.sum((0, 2))[:, None]
    merged = merge(jnp.asarray(shares, jnp.float32), jnp.asarray(np.log2(exponentials.sum(-1)), jnp.float32))
    np.testing.assert_allclose(merged, whole, atol=1e-5)


def test_few_long_contexts_are_split_until_all_cores_have_work():
    assert splits_for(8, 8192, HOPPER) == 33
    assert splits_for(8, 256, HOPPER) == 2  # too short for more
    assert splits_for(1024, 8192, HOPPER) == 1


REAL = {
    "decode": (32, 0, 64, 8, 4, 128, 16, 512),
    "one long row": (1, 0, 64, 8, 4, 128, 16, 512),
    "prefill": (0, 32, 64, 8, 4, 128, 16, 128),
    "both": (32, 4, 64, 4, 8, 64, 64, 32),
    "odd group": (4, 2, 64, 4, 7, 128, 32, 32),
    "D=80": (32, 4, 64, 32, 1, 80, 16, 64),
    "D=96": (32, 4, 64, 8, 4, 96, 16, 64),
    "D=256": (4, 2, 64, 4, 2, 256, 16, 32),
}
KV_DTYPES = ("bfloat16", "int8")


def arguments(B, N, Q, K, G, D, S, W, segments=1, kv_dtype="bfloat16"):
    def ids(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = jax.ShapeDtypeStruct((B + N * Q, K, G, D), jnp.bfloat16)
    pool = (jax.ShapeDtypeStruct((4096, K, 2, S, row_size(D, kv_dtype, "gpu")), jnp.dtype(kv_dtype)),) * segments
    return q, pool, AttentionMeta(ids(B, W), ids(B), ids(N, W), ids(N), ids(N))


LOWERED = [*product(REAL, KV_DTYPES, [1]), *product(["decode", "D=96"], KV_DTYPES, [8])]


@pytest.mark.parametrize(("shape", "kv_dtype", "segments"), some(LOWERED, 6))
def test_gpu_attention_lowers_for_cuda(shape, kv_dtype, segments):
    q, pool, meta = arguments(*REAL[shape], segments, kv_dtype)
    assert supports(q, pool)
    assert "mosaic_gpu" in lowered(partial(paged_attention, scale=0.1), q, pool, meta)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_gpu_attention_compiles_for_h200_without_a_copy_of_the_pool(compile_for_h200, shape, kv_dtype):
    q, pool, meta = arguments(*shape, kv_dtype=kv_dtype)
    stats = compile_for_h200(partial(paged_attention, scale=0.1, window=1024), q, pool, meta).memory_analysis()
    assert stats.temp_size_in_bytes < pool[0].size * pool[0].dtype.itemsize / 5


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("segments", [1, 2, 5, 8])
def test_gpu_write_and_attention_leave_the_pool_in_place(compile_for_h200, segments, kv_dtype):
    q, pool, meta = arguments(*REAL["both"], segments, kv_dtype)
    kv = jax.ShapeDtypeStruct((q.shape[0], q.shape[1], q.shape[3]), q.dtype)
    slots = jax.ShapeDtypeStruct((q.shape[0],), jnp.int32)

    def step(pool, q, k, v, slots, meta):
        pool = kv_write(pool, k, v, slots)
        return pool, dispatched(q, pool, meta, scale=0.1, backend="pallas")

    compiled = compile_for_h200(step, pool, q, kv, kv, slots, meta, donate=(0,))
    stats = compiled.memory_analysis()
    assert "mosaic_gpu" in compiled.as_text()
    assert stats.alias_size_in_bytes == sum(segment.size * segment.dtype.itemsize for segment in pool)
    assert stats.temp_size_in_bytes < stats.alias_size_in_bytes / 10


def from_one_vector(packed, q, pool, shape=(2, 9)):
    """Return attention whose metadata are parts of a vector, as in a step, and begin anywhere in it."""
    rows, width = shape
    pages, lengths = packed[3 : 3 + rows * width].reshape(shape), packed[3 + rows * width :][:rows]
    none = jnp.zeros(0, jnp.int32)
    meta = AttentionMeta(pages, lengths, none.reshape(0, width), none, none)
    return dispatched(q, pool, meta, scale=SCALE, backend="pallas")


def test_gpu_attention_accepts_parts_of_a_packed_vector():
    problem = problem_on_gpu(replace(SMALL, N=0))
    meta = problem.meta
    packed = jnp.concatenate([jnp.zeros(3, jnp.int32), meta.decode_pages.ravel(), meta.decode_lengths])
    out = jax.jit(from_one_vector)(packed, problem.q, problem.pool)
    np.testing.assert_allclose(out.astype(jnp.float32), dense_answer(problem, SCALE, None), atol=2e-2, rtol=0)


def test_gpu_attention_realigns_parts_of_a_packed_vector(compile_for_h200):
    """Kernels read at multiples of 256 bytes, but XLA passes a slice where it lies."""
    q, pool, _ = arguments(2, 0, 8, 1, 4, 64, 16, 9)
    packed = jax.ShapeDtypeStruct((64,), jnp.int32)
    assert "dynamic-slice-fusion" not in compile_for_h200(from_one_vector, packed, q, pool).as_text()


def test_attention_backend_can_be_forced():
    q, pool, meta = arguments(*REAL["decode"])
    assert "mosaic_gpu" in lowered(partial(dispatched, scale=0.1, backend="pallas"), q, pool, meta)
    assert "mosaic_gpu" not in lowered(partial(dispatched, scale=0.1, backend="xla"), q, pool, meta)


@pytest.mark.parametrize("shape", [(4, 0, 8, 2, 2, 72, 16, 8), (4, 0, 8, 2, 2, 64, 4, 8), (4, 0, 8, 2, 2, 64, 24, 8)])
def test_attention_of_unsupported_shapes_goes_through_xla(shape):
    q, pool, meta = arguments(*shape)
    assert not supports(q, pool)
    assert "mosaic_gpu" not in lowered(partial(dispatched, scale=0.1, backend="pallas"), q, pool, meta)
