"""The native products compared with numpy, in every variant that this machine can run, and their callers."""

from dataclasses import replace
from functools import partial
from itertools import product as product_of

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxserve.core.config import KernelBackend
from jaxserve.kernels import DeferredNorm, DeferredSwiGLU, matmul
from jaxserve.kernels.native import library, matmul as native
from jaxserve.quantization import QArray
from jaxserve.quantization.rounding import quantize
from tests.support.thorough import some

pytestmark = pytest.mark.usefixtures("native_kernels")
DEQUANTIZE = jax.jit(QArray.dequantize, static_argnums=1)
IN_INTEGERS = jax.jit(native.in_integers)
every_variant = pytest.mark.parametrize("variant", library.VARIANTS)


def skip_unless_there(variant: str, bits: int = 16) -> None:
    if variant not in library.variants(bits):
        pytest.skip(f"needs a CPU with the instructions of {variant}")


def operands(rows: int, out: int, inner: int, bits: int = 16, **kwargs) -> tuple[jax.Array, jax.Array | QArray]:
    rng = np.random.default_rng([rows, out, inner, bits])
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((rows, inner), (out, inner)))
    if bits == 16:
        return x, w
    return x, jax.tree.map(jnp.asarray, quantize(np.asarray(w, np.float32), bits, **kwargs))


def product(x: jax.Array, w: jax.Array | QArray, variant: str) -> np.ndarray:
    """Return the product in float64 of the operands as the variant takes them: the matrix unit multiplies bfloat16."""
    if isinstance(w, QArray):
        if variant in native.ROUND_X and x.dtype == jnp.bfloat16:
            x = IN_INTEGERS(x, w)
        w = DEQUANTIZE(w, jnp.bfloat16 if variant == "amx" else jnp.float32)
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def assert_close(got: jax.Array, expected: np.ndarray, bits: int, variant: str) -> None:
    size = np.abs(expected).max()
    tolerance = 1e-5
    if got.dtype == jnp.bfloat16:
        tolerance = 1e-2
    elif bits == 8 and variant == "amx":  # it folds the zero into an addend: a weight may round to its other neighbour
        tolerance = 2e-3
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance * size)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_native_variant_equals_the_exact_product(data: st.DataObject) -> None:
    rows = data.draw(st.one_of(st.integers(1, 33), st.integers(34, 300)), "rows")
    out = data.draw(st.integers(1, 200), "out")
    inner = data.draw(st.one_of(st.integers(1, 40).map(lambda n: 32 * n), st.integers(1, 600)), "inner")
    bits = data.draw(st.sampled_from([16, 8, 4, 3]), "bits")
    form = {
        "group": data.draw(st.sampled_from([0, 32, 64, 128]), "group"),
        "symmetric": data.draw(st.booleans(), "symmetric"),
        "scale_dtype": jnp.dtype(data.draw(st.sampled_from(["bfloat16", "float32"]), "scales")),
    }
    dtype = data.draw(st.sampled_from([jnp.bfloat16, jnp.float32]), "dtype")
    x, w = operands(rows, out, inner, bits, **form)
    every = jax.jit(lambda x, w: [native.matmul(x, w, dtype=dtype, variant=v) for v in library.variants(bits)])
    for variant, got in zip(library.variants(bits), every(x, w), strict=True):
        assert got.dtype == dtype
        assert_close(got, product(x, w, variant), bits, variant)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_rounding_activations_to_integers_loses_little(bits: int) -> None:
    x, w = operands(5, 60, 640, bits)
    x = x.at[0, 7].mul(1000).at[1, 128:256].mul(1e-3)
    exact, rounded = product(x, w, ""), np.asarray(IN_INTEGERS(x, w), np.float64) @ np.asarray(w.dequantize()).T
    lost = np.linalg.norm(rounded - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert lost[0] < 0.05
    assert (lost[1:] < 0.01).all()


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_native_product_of_non_finite_rows_is_not_finite(poison: float, bits: int) -> None:
    x, w = operands(6, 40, 384, bits)
    x = x.at[2, 200].set(poison)
    for variant in library.variants(bits):
        finite = np.isfinite(np.asarray(native.matmul(x, w, variant=variant)))
        assert not finite[2].any()
        assert np.delete(finite, 2, axis=0).all()


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_native_product_of_the_largest_integers_does_not_overflow(rows: int, bits: int) -> None:
    x, w = operands(rows, 40, 512, bits)
    x, w = jnp.ones_like(x).at[1::2].mul(-1), replace(w, codes=jnp.full_like(w.codes, 255))
    for variant in library.variants(bits):
        assert_close(native.matmul(x, w, variant=variant), product(x, w, variant), bits, variant)


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("rows", [1, 6])
def test_native_product_of_zeros_and_denormals_is_exact(rows: int, bits: int) -> None:
    x, w = operands(rows, 40, 384, bits)
    x = x.at[:, :256].set(0).at[:, :128].set(1e-39)
    for variant in library.variants(bits):
        assert_close(native.matmul(x, w, variant=variant), product(x, w, variant), bits, variant)


@every_variant
@pytest.mark.parametrize("bits", [16, 8, 4, 3])
@pytest.mark.parametrize("rows", [1, 600])
def test_native_product_of_large_operands_equals_the_exact_product(rows: int, bits: int, variant: str) -> None:
    skip_unless_there(variant, bits)
    x, w = operands(rows, 300, 1408, bits)
    assert_close(native.matmul(x, w, variant=variant), product(x, w, variant), bits, variant)


@pytest.mark.parametrize("group", [96, 160])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_native_product_with_groups_of_96_and_160_inputs_is_exact(bits: int, group: int) -> None:
    x, w = operands(3, 40, 960, bits, group=32)
    w = QArray(w.codes, w.scales[:, : 960 // group], None, bits, 960)
    for variant in library.variants(bits):
        assert_close(native.matmul(x, w, variant=variant), product(x, w, variant), bits, variant)


@pytest.mark.parametrize("variant", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_native_product_keeps_float32_activations(bits: int, variant: str) -> None:
    skip_unless_there(variant, bits)
    x, w = operands(5, 40, 256, bits)
    x = x.astype(jnp.float32) + 1e-3
    np.testing.assert_allclose(native.matmul(x, w, variant=variant), product(x, w, variant), rtol=1e-5, atol=1e-3)


@every_variant
@pytest.mark.parametrize("inner", [1000, 1056])  # single rows meet numbers in another way up to 1024
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_native_product_of_a_row_does_not_depend_on_other_rows(bits: int, inner: int, variant: str) -> None:
    skip_unless_there(variant, bits)
    x, w = operands(70, 100, inner, bits)
    whole = np.asarray(native.matmul(x, w, variant=variant))
    for rows in (1, 4, 17, 32, 33):
        np.testing.assert_array_equal(np.asarray(native.matmul(x[:rows], w, variant=variant)), whole[:rows])


@pytest.mark.parametrize(
    ("rows", "inner", "dtype"), some(product_of([1, 4, 40], [32, 96, 768, 1000], [jnp.bfloat16, jnp.float32]), 9)
)
def test_native_product_normalises_and_gates_its_rows(rows: int, inner: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng([rows, inner])
    x, gate_up = (jnp.asarray(8 * rng.standard_normal((rows, *shape)), dtype) for shape in ((inner,), (1, 2, inner)))
    lefts = DeferredNorm(x, jnp.asarray(rng.standard_normal(inner), dtype), 1e-5), DeferredSwiGLU(gate_up)
    w = jnp.asarray(rng.standard_normal((40, inner)), dtype)
    formats = [(bits, symmetric) for bits in (8, 4, 3) for symmetric in (True, False)]
    quantised = [quantize(np.asarray(w, np.float32), bits, symmetric=symmetric) for bits, symmetric in formats]
    weights = [jax.tree.map(jnp.asarray, weight) for weight in quantised]
    if dtype == jnp.bfloat16:
        weights.append(w)
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5  # a rounding may go to the other neighbour
    products = jax.jit(lambda left: [native.matmul(left, weight) for weight in weights])
    for left in lefts:
        for got, expected in zip(products(left), map(np.asarray, products(left.value())), strict=True):
            np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("bits", [16, 8, 4, 3])
@pytest.mark.parametrize(("front", "rows", "behind"), [(0, 3, 5), (24, 8, 0), (31, 40, 57), (1, 1, 1)])
def test_native_product_of_padding_rows_is_zero(front: int, rows: int, behind: int, bits: int) -> None:
    x, w = operands(rows, 100, 320, bits)
    padded = jnp.pad(x.at[rows // 2].set(0), ((front, behind), (0, 0)))
    got, alone = (np.asarray(native.matmul(a, w)) for a in (padded, x))
    present = np.arange(rows) != rows // 2
    np.testing.assert_array_equal(got[front : front + rows][present], alone[present])
    assert not got[:front].any()
    assert not got[front + rows :].any()
    assert not got[front + rows // 2].any()


@pytest.mark.parametrize("left", ["plain", "normed", "gated"])
@pytest.mark.parametrize("bits", [16, 8])
def test_native_product_skips_padding_rows(bits: int, left: str) -> None:
    x, w = operands(12, 40, 64, bits)
    if isinstance(w, QArray):
        w = replace(w, scales=w.scales.at[0].set(jnp.nan))
    else:
        w = w.at[0].set(jnp.nan)
    x = x.at[:4].set(0).at[-3:].set(0)
    norm = jnp.ones(64, x.dtype)
    rows = {
        "plain": x,
        "normed": DeferredNorm(x, norm, 1e-5),
        "gated": DeferredSwiGLU(jnp.stack([x, x], axis=1)[:, None]),
    }[left]
    got = np.asarray(native.matmul(rows, w))
    assert np.isnan(got[4:-3, 0]).all()
    assert not got[:4].any()
    assert not got[-3:].any()
    assert not np.asarray(native.matmul(jnp.zeros_like(x), w)).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("left", "rows", "bits"), some(product_of(["plain", "normed", "gated"], [1, 3, 17, 70], [16, 8, 4, 3]), 6)
)
def test_native_product_adds_the_residual_after_rounding(rows: int, bits: int, left: str, dtype: jnp.dtype) -> None:
    x, w = operands(rows + 9, 301, 384, bits)
    x = x.at[:4].set(0).at[-5:].set(0)  # padding: what is added to nothing stays
    residual = jnp.asarray(np.random.default_rng(rows).standard_normal((rows + 9, 301)) * 20, dtype)
    lefts = {
        "plain": x,
        "normed": DeferredNorm(x, jnp.ones(384, x.dtype), 1e-5),
        "gated": DeferredSwiGLU(jnp.stack([x, x], axis=1)[:, None]),
    }
    for variant in ("", *library.variants(bits)):
        product = partial(native.matmul, lefts[left], w, dtype=dtype, variant=variant)
        np.testing.assert_array_equal(product(residual), product() + residual)
    together = matmul(lefts[left], w, dtype=dtype, residual=residual)
    np.testing.assert_array_equal(together, matmul(lefts[left], w, dtype=dtype) + residual)


@pytest.mark.parametrize("residual", [jnp.zeros((4, 31), jnp.bfloat16), jnp.zeros((4, 32), jnp.float32)])
def test_native_product_refuses_a_residual_of_another_shape_or_dtype(residual: jax.Array) -> None:
    x, w = operands(4, 32, 32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="residual must have the shape and dtype of the product"):
        jax.block_until_ready(native.matmul(x, w, residual, dtype=jnp.bfloat16))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("rows", "parts", "size"), [(3, 2, 64), (1, 4, 192), (40, 4, 32), (2, 3, 40)])
def test_product_joins_gates_cut_into_parts(rows: int, parts: int, size: int, bits: int) -> None:
    rng = np.random.default_rng(0)
    numbers = jnp.asarray(rng.standard_normal((rows, parts, 2, size)), jnp.bfloat16)
    one_part = numbers.swapaxes(1, 2).reshape(rows, 1, 2, parts * size)
    w = operands(rows, 40, parts * size, bits)[1]
    got, expected = (np.asarray(native.matmul(DeferredSwiGLU(x), w)) for x in (numbers, one_part))
    np.testing.assert_array_equal(got, expected)


def test_native_product_reads_nothing_beyond_its_operands() -> None:
    x, w = operands(17, 40, 48)
    poisoned = jnp.pad(w, ((0, 8), (0, 0)), constant_values=jnp.nan)[:40]
    assert np.isfinite(np.asarray(native.matmul(x, poisoned), np.float32)).all()


def test_unknown_native_variant_is_refused() -> None:
    x, w = operands(4, 32, 32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no variant abacus"):
        jax.block_until_ready(native.matmul(x, w, variant="abacus"))


@pytest.mark.parametrize(("backend", "used"), [("auto", True), ("native", True), ("xla", False)])
@pytest.mark.parametrize("bits", [16, 8, 4, 3])
def test_native_product_is_used_unless_xla_is_chosen(bits: int, backend: KernelBackend, used: bool) -> None:
    x, w = operands(1, 64, 128, bits)
    program = jax.jit(partial(matmul, backend=backend)).lower(x, w).compile().as_text()
    assert (library.MATMUL in program) == used


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_split_over_devices_is_summed_in_float32(bits: int, dtype: jnp.dtype) -> None:
    x, w = operands(4, 64, 256, bits, **({"group": 32} if bits < 16 else {}))
    halves = PartitionSpec(None, "tp")
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))

    def part(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        own = jax.tree.unflatten(jax.tree.structure(w if bits == 16 else replace(w, size=128)), leaves)
        return matmul(x, own, all_reduce=partial(jax.lax.psum, axis_name="tp"), dtype=dtype)

    leaves = jax.tree.leaves(w)
    split = jax.shard_map(
        part, mesh=mesh, in_specs=(halves,) * (1 + len(leaves)), out_specs=PartitionSpec(), check_vma=False
    )
    expected = product(x, w, native.ROUND_X[0] if set(native.ROUND_X) & set(library.variants()) else "")
    got = np.asarray(jax.jit(split)(x, *leaves), np.float64)
    tolerance = 2**-8 if dtype == jnp.bfloat16 else 2e-3
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("bits", [16, 4])
def test_product_on_other_platforms_lowers_to_xla(bits: int) -> None:
    x, w = operands(4, 64, 128, bits)
    assert library.MATMUL not in jax.jit(matmul).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 40])
def test_product_with_quantised_weights_of_several_axes_is_exact(rows: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((rows, 2, 64)), rng.standard_normal((3, 5, 128)).astype(np.float32)
    quantised = jax.tree.map(jnp.asarray, quantize(w, 4))
    y = jax.jit(lambda x, w: matmul(x, w, contract=2))(jnp.asarray(x, dtype), quantised)
    assert y.shape == (rows, 3, 5)
    assert y.dtype == dtype
    expected = np.einsum("rc,abc->rab", x.reshape(rows, -1), np.asarray(quantised.dequantize()))
    tolerance = {2: 2e-2, 4: 1e-4}[jnp.dtype(dtype).itemsize]
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=tolerance * np.abs(expected).max())
