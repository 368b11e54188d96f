import shutil
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import AttentionMeta, kv_pool, kv_write, native, paged_attention, reference, xla_cpu
from jaxserve.kernels.native.build import compiler
from tests.kernels.problems import Shape, dense_answer, in_segments, make_problem
from tests.support.internals import native_library_path
from tests.support.thorough import some

SHAPES = {
    "gqa": Shape(),
    "mha": Shape(K=3, G=1),
    "wide groups": Shape(K=1, G=8),
    "seven rows": Shape(K=2, G=7, N=0),
    "D=80": Shape(D=80),
    "D=96": Shape(D=96, G=2),
    "D=128": Shape(D=128, K=1),
    "page of one token": Shape(S=1, W=50),
    "page of 32 tokens": Shape(S=32, W=7),
    "no decode rows": Shape(B=0),
    "no tiles": Shape(N=0),
    "nothing": Shape(B=0, N=0),
    "many rows": Shape(B=9, N=5, Q=16, S=16, W=12),
    "window": Shape(window=5),
    "window of one": Shape(window=1),
    "window of many chunks": Shape(window=200, W=100),
    "bf16": Shape(dtype="bfloat16"),
    "bf16 window": Shape(dtype="bfloat16", window=70, S=16, W=20),
    "bf16 D=32, tokens of two tiles of rows": Shape(dtype="bfloat16", D=32, G=7, N=3),
    "bf16 D=96": Shape(dtype="bfloat16", D=96, G=2, N=4, S=16, W=20),
    "bf16 D=128 long": Shape(dtype="bfloat16", D=128, K=1, G=4, B=0, Q=32, S=16, W=40),
    "bf16 D=256": Shape(dtype="bfloat16", D=256, K=1, G=1, Q=32),
    "bf16 window of one": Shape(dtype="bfloat16", window=1, N=4),
    "bf16 wide groups": Shape(dtype="bfloat16", K=1, G=8, N=0, S=16, W=20),
    "bf16 seven rows": Shape(dtype="bfloat16", G=7, N=0, D=128),
    "bf16 twenty rows": Shape(dtype="bfloat16", K=1, G=20, N=0, S=16, W=20),
    "bf16 128 rows": Shape(dtype="bfloat16", K=1, G=128, D=256, B=2, N=0),
    "bf16 D=160": Shape(dtype="bfloat16", D=160, N=0),
    "bf16 D=224": Shape(dtype="bfloat16", D=224, K=1, N=0),
    "bf16 D=80": Shape(dtype="bfloat16", D=80, K=4, G=1),
    "f16": Shape(dtype="float16"),
    "int8": Shape(kv_dtype="int8"),
    "int8 window": Shape(kv_dtype="int8", window=70, S=16, W=20),
    "int8 D=80": Shape(kv_dtype="int8", D=80, K=4, G=1),
    "int8 bf16": Shape(kv_dtype="int8", dtype="bfloat16"),
    "int8 bf16 mha": Shape(kv_dtype="int8", dtype="bfloat16", K=3, G=1),
    "int8 bf16 wide groups": Shape(kv_dtype="int8", dtype="bfloat16", K=1, G=8),
    "int8 bf16 window": Shape(kv_dtype="int8", dtype="bfloat16", window=70, S=16, W=20),
    "int8 bf16 D=80": Shape(kv_dtype="int8", dtype="bfloat16", D=80, G=2, N=0),
    "int8 bf16 D=96": Shape(kv_dtype="int8", dtype="bfloat16", D=96, G=7, B=0),
    "int8 bf16 D=128": Shape(kv_dtype="int8", dtype="bfloat16", D=128, K=1),
    "int8 bf16 D=256": Shape(kv_dtype="int8", dtype="bfloat16", D=256, K=1, G=2),
    "int8 bf16 many rows": Shape(kv_dtype="int8", dtype="bfloat16", B=9, N=5, Q=16, S=16, W=12),
    "int8 f16": Shape(kv_dtype="int8", dtype="float16"),
}
SCALE = 0.3  # sharper than 1 / sqrt(D), so that a wrong maximum or mask shows
NATIVE_SHAPES = {
    name: shape for name, shape in SHAPES.items() if shape.dtype != "float16"
}  # float16 has no native path
some_shapes = pytest.mark.parametrize("shape", [pytest.param(SHAPES[name], id=name) for name in some(SHAPES, 15)])
TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2, "float16": 3e-3}


@cache
def solved(shape, seed):
    problem = make_problem(shape, seed)
    return problem, dense_answer(problem, SCALE, shape.window)


def check(attention, shape, seeds=(0, 1)):
    attention = jax.jit(partial(attention, scale=SCALE, window=shape.window))
    for seed in seeds:
        problem, answer = solved(shape, seed)
        out = attention(problem.q, problem.pool, problem.meta)
        assert out.dtype == problem.q.dtype
        np.testing.assert_allclose(np.asarray(out).astype(np.float32), answer, atol=TOLERANCE[shape.dtype], rtol=0)


@some_shapes
def test_reference_attention_equals_dense_attention(shape):
    check(reference.paged_attention, shape)


@some_shapes
def test_xla_attention_equals_dense_attention(shape):
    check(xla_cpu.paged_attention, shape)


@pytest.mark.parametrize("shape", NATIVE_SHAPES.values(), ids=NATIVE_SHAPES)
def test_native_attention_equals_dense_attention(native_kernels, shape):
    check(native_kernels.paged_attention, shape)


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("name", ["gqa", "D=80", "seven rows", "bf16 window", "int8", "int8 D=80", "int8 bf16 D=96"])
def test_native_attention_with_fewer_lanes_equals_dense_attention(native_kernels, name, lanes):
    check(partial(native_kernels.paged_attention, max_lanes=lanes), SHAPES[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dispatched_attention_equals_dense_attention(dtype):
    check(paged_attention, Shape(dtype=dtype, B=4, N=3))
    check(paged_attention, Shape(dtype=dtype, D=24))  # no native path for this head_dim


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("attention", [reference.paged_attention, xla_cpu.paged_attention])
def test_attention_over_pool_segments_equals_attention_over_one(attention, kv_dtype):
    whole = make_problem(Shape(kv_dtype=kv_dtype), 0)
    cut = in_segments(whole, 0.2, 0.5, 0.6)
    outputs = [attention(problem.q, problem.pool, problem.meta, scale=SCALE) for problem in (cut, whole)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "float32"), ("bfloat16", "uint16")])
def test_attention_lowers_to_each_platforms_own_path(native_kernels, dtype, stored):
    problem = make_problem(Shape(dtype=dtype), 0)
    pool = {"cpu": stored, "cuda": dtype}

    def lowered(platform):
        arguments = (problem.q, (jax.ShapeDtypeStruct(problem.pool[0].shape, pool[platform]),), problem.meta)
        trace = jax.jit(partial(paged_attention, scale=SCALE)).trace(*arguments)
        return trace.lower(lowering_platforms=(platform,)).as_text()

    assert "jaxserve_paged_attention" in lowered("cpu")
    assert "custom_call" not in lowered("cuda")
    assert "while" not in lowered("cuda")


def test_attention_over_a_long_context_keeps_its_accuracy():
    check(paged_attention, Shape(B=2, N=1, S=16, W=256), seeds=(0,))


def test_attention_of_a_tile_equals_that_of_decode_rows():
    problem = make_problem(Shape(B=0, N=1, Q=6, W=20), 3)
    meta = problem.meta
    length = int(meta.tile_lengths[0])
    rows = AttentionMeta(
        decode_pages=jnp.repeat(meta.tile_pages, length, 0),
        decode_lengths=meta.tile_starts + 1 + jnp.arange(length),
        tile_pages=meta.tile_pages[:0],
        tile_starts=meta.tile_starts[:0],
        tile_lengths=meta.tile_lengths[:0],
    )
    tile = paged_attention(problem.q, problem.pool, meta, scale=SCALE)
    np.testing.assert_allclose(
        paged_attention(problem.q[:length], problem.pool, rows, scale=SCALE), tile[:length], atol=1e-5
    )


def test_attention_of_a_row_does_not_depend_on_other_rows():
    problem = make_problem(Shape(B=4, N=0, dtype="bfloat16"), 5)
    together = paged_attention(problem.q, problem.pool, problem.meta, scale=SCALE)
    for row in range(4):
        one = problem.meta._replace(
            decode_pages=problem.meta.decode_pages[row : row + 1],
            decode_lengths=problem.meta.decode_lengths[row : row + 1],
        )
        alone = paged_attention(problem.q[row : row + 1], problem.pool, one, scale=SCALE)
        np.testing.assert_array_equal(alone[0].astype(jnp.float32), together[row].astype(jnp.float32))


@pytest.mark.parametrize("unit", [True, False], ids=["matrix unit", "vectors"])
@pytest.mark.parametrize("shape", [Shape(Q=32, S=16, W=40), Shape(G=1, D=128, Q=32), Shape(window=9, Q=32)], ids=repr)
def test_attention_of_tiles_in_bfloat16_errs_by_little_more_than_its_rounding(native_kernels, shape, unit):
    """Its weights are exact on the matrix unit, and have 8 bits on vectors of pairs of bfloat16 (AVX512-BF16)."""
    shape = replace(shape, B=0, N=4, dtype="bfloat16")
    problem, answer = solved(shape, 7)
    out = native_kernels.paged_attention(
        problem.q, problem.pool, problem.meta, scale=SCALE, window=shape.window, matrix_unit=unit
    )
    exact_weights = unit and "amx" in native_kernels.variants()
    error, rounding = (np.square(np.asarray(x, np.float64) - answer).mean() for x in (out, answer.astype(jnp.bfloat16)))
    assert error <= rounding * (1.02 if exact_weights else 1.5)
    np.testing.assert_allclose(np.asarray(out, np.float32), answer, rtol=2**-7, atol=1e-4 if exact_weights else 5e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_of_a_token_does_not_depend_on_the_prompts_chunks(native_kernels, dtype):
    problem = make_problem(Shape(B=0, N=1, Q=32, S=16, W=20, dtype=dtype), 3)
    meta, attention = problem.meta, partial(native_kernels.paged_attention, scale=SCALE)
    whole, all_tokens = attention(problem.q, problem.pool, meta), int(meta.tile_lengths[0])
    assert all_tokens > 8
    for start, length in [(0, 1), (1, 7), (8, all_tokens - 8)]:
        piece = meta._replace(tile_starts=meta.tile_starts + start, tile_lengths=jnp.full((1,), length))
        one = attention(problem.q[start : start + length], problem.pool, piece)
        np.testing.assert_array_equal(one.astype(jnp.float32), whole[start : start + length].astype(jnp.float32))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(B=1, N=0),
        Shape(B=1, N=0, dtype="bfloat16"),
        Shape(B=1, N=0, dtype="bfloat16", kv_dtype="int8"),
        Shape(B=0, N=1, dtype="bfloat16"),
    ],
)
def test_attention_of_a_nan_query_is_nan(native_kernels, shape):
    problem = make_problem(shape, 0)
    q = problem.q.at[0, 0, 0].set(jnp.nan)
    for attention in (xla_cpu.paged_attention, native_kernels.paged_attention):
        out = attention(q, problem.pool, problem.meta, scale=SCALE)
        assert jnp.isnan(out[0, 0, 0]).all()
        assert not jnp.isnan(out[0, 0, 1:]).any()


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("shape", [Shape(W=60), Shape(D=128, G=7), Shape(D=224, G=2)], ids=str)
def test_native_decode_attention_is_the_exact_answer_rounded(native_kernels, shape, lanes):
    shape = replace(shape, dtype="bfloat16", N=0, B=16)
    problem, answer = solved(shape, 0)
    out = native_kernels.paged_attention(problem.q, problem.pool, problem.meta, scale=SCALE, max_lanes=lanes)
    assert np.mean(np.asarray(out) == answer.astype(jnp.bfloat16)) > 0.998


@pytest.mark.parametrize("lanes", [8, 16])
def test_native_int8_attention_is_off_only_by_its_own_rounding(native_kernels, lanes):
    """Queries and weights have all magnitudes."""
    shape = Shape(kv_dtype="int8", dtype="bfloat16", D=128, S=16, W=24)
    problem = make_problem(shape, 0)
    rng = np.random.default_rng(1)
    q = (np.asarray(problem.q, np.float32) * 2.0 ** rng.integers(-6, 3, problem.q.shape)).astype(problem.q.dtype)
    problem = replace(problem, q=jnp.asarray(q))
    out = native_kernels.paged_attention(problem.q, problem.pool, problem.meta, scale=SCALE, max_lanes=lanes)
    answer = dense_answer(problem, SCALE, None)
    np.testing.assert_allclose(np.asarray(out, np.float32), answer, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_attention_over_a_non_finite_int8_page_is_not_finite(native_kernels, dtype, half):
    shape = Shape(B=1, N=0, kv_dtype="int8", dtype=dtype)
    problem = make_problem(shape, 0)
    page = int(problem.meta.decode_pages[0, 0])
    pool = (problem.pool[0].at[page, 0, half, 0, shape.D :].set(-1),)  # the scale's bytes: NaN
    for attention in (xla_cpu.paged_attention, native_kernels.paged_attention):
        out = attention(problem.q, pool, problem.meta, scale=SCALE)
        assert jnp.isnan(out[0, 0]).all()
        assert not jnp.isnan(out[0, 1:]).any()


def test_native_attention_refuses_pages_and_positions_outside_the_pool(native_kernels):
    problem = make_problem(Shape(B=2, N=0), 0)
    row = int(jnp.argmax(problem.meta.decode_lengths))
    outside = problem.meta._replace(decode_pages=problem.meta.decode_pages.at[row, 0].set(10_000))
    with pytest.raises(jax.errors.JaxRuntimeError, match="page 10000 is outside a pool of"):
        native_kernels.paged_attention(problem.q, problem.pool, outside, scale=SCALE).block_until_ready()
    beyond = problem.meta._replace(decode_lengths=problem.meta.decode_lengths.at[row].set(161))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit a page table of width 40"):
        native_kernels.paged_attention(problem.q, problem.pool, beyond, scale=SCALE).block_until_ready()


def test_attention_split_by_kv_head_over_devices_equals_the_whole():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
    spec = jax.sharding.PartitionSpec
    problem = make_problem(Shape(K=4), 1)
    attention = partial(paged_attention, scale=SCALE)
    heads = spec(None, "tp")
    split = jax.jit(
        jax.shard_map(attention, mesh=mesh, in_specs=(heads, heads, spec()), out_specs=heads, check_vma=False)
    )
    np.testing.assert_array_equal(
        split(problem.q, problem.pool, problem.meta), jax.jit(attention)(problem.q, problem.pool, problem.meta)
    )


def test_written_keys_and_values_are_attended_to():
    """Prefill in two tiles and then a decode write their own keys, and equal dense attention over all of them."""
    tokens, K, G, D, S = 12, 2, 2, 32, 4
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(tokens + 1, K, G, D)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(tokens + 1, K, D)), jnp.float32) for _ in range(2))
    table = jnp.asarray([5, 2, 7, 1], jnp.int32)
    slots = table[jnp.arange(tokens + 1) // S] * S + jnp.arange(tokens + 1) % S
    none = jnp.zeros((0,), jnp.int32)
    pool = kv_write(kv_pool(9, K, S, D, jnp.float32), k[:tokens], v[:tokens], slots[:tokens])
    tiles = AttentionMeta(none.reshape(0, 4), none, table[None].repeat(2, 0), jnp.asarray([0, 6]), jnp.asarray([6, 6]))
    prefill = paged_attention(q[:tokens], pool, tiles, scale=SCALE)
    pool = kv_write(pool, k[tokens:], v[tokens:], slots[tokens:])
    row = AttentionMeta(table[None], jnp.asarray([tokens + 1]), none.reshape(0, 4), none, none)
    decode = paged_attention(q[tokens:], pool, row, scale=SCALE)

    scores = SCALE * jnp.einsum("qkgd,tkd->kgqt", q, k)
    mask = jnp.tril(jnp.ones((tokens + 1, tokens + 1), bool))
    dense = jnp.einsum("kgqt,tkd->qkgd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)
    np.testing.assert_allclose(jnp.concatenate([prefill, decode]), dense, atol=1e-5)


def test_attention_memory_does_not_follow_the_page_tables_width():
    """No buffer of the XLA path grows with W, except the page table itself."""

    def temporary_bytes(width):
        shape = replace(Shape(N=0), W=width)
        problem = make_problem(replace(shape, W=2), 0)
        meta = problem.meta._replace(decode_pages=jnp.zeros((shape.B, width), jnp.int32))
        compiled = jax.jit(partial(xla_cpu.paged_attention, scale=SCALE)).lower(problem.q, problem.pool, meta).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) - temporary_bytes(64) <= 3 * 3 * 2048 * 4


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty cache folder, with no native library in the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.library, "HERE", tmp_path)
    caches = (native.targets, native_library_path())
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_missing_compiler_is_logged_once_and_xla_is_used(nowhere, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not native.targets()
    assert not native.targets()
    assert [r.message for r in caplog.records] == [
        "no C++ compiler (no-such-compiler) for the native CPU kernels, using the slower plain XLA (CXX names one)"
    ]
    check(paged_attention, Shape(B=2, N=1))


@pytest.mark.parametrize(("given", "command"), [("", ["c++"]), (" ", ["c++"]), ("ccache g++", ["ccache", "g++"])])
def test_empty_cxx_means_the_default_compiler(monkeypatch, given, command):
    monkeypatch.setenv("CXX", given)
    assert compiler() == command


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_missing_native_library_is_compiled_into_the_cache(nowhere, monkeypatch):
    for part, units in {"UNITS": {}, "ELSEWHERE": (("rows.cc", []),), "CHECKS": (), "CALLS": ("kv_call.cc",)}.items():
        monkeypatch.setattr(native.build, part, units)  # a part of it, which takes seconds
    library = native_library_path()()  # not loaded: its calls may be registered once in a process
    assert library.parent == nowhere / "jaxserve" / "native"
    assert library.exists()
