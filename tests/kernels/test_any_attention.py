"""The reference, XLA's path and all native variants of attention on random shapes."""

from functools import partial

import jax
import numpy as np
from hypothesis import given, settings, strategies as st

from jaxserve.kernels import native, reference, xla_cpu
from tests.kernels.problems import Shape, dense_answer, make_problem
from tests.kernels.test_attention import SCALE, TOLERANCE

# The instruction sets that a machine may have, the best last; and that one without its matrix unit.
NATIVE = ({"max_lanes": 4}, {"max_lanes": 8}, {"matrix_unit": False}, {})
MAX_TOKENS = 300  # of a context


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Return small problems, since compiling costs more than computing."""
    rows = draw(st.integers(0, 4), "decode rows")
    tiles = draw(st.integers(0 if rows else 1, 3), "tiles")
    tokens = draw(st.sampled_from([1, 4, 8, 16, 32]), "tokens of a tile")
    kv_heads = draw(st.integers(1, 4), "kv heads")
    groups = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16]), "query heads of each")
    page = draw(st.sampled_from([1, 4, 8, 16, 32, 64, 128]), "page size")
    capacity = draw(st.integers(tokens, MAX_TOKENS), "longest context")
    return Shape(
        B=rows,
        N=tiles,
        Q=tokens,
        K=kv_heads,
        G=groups,
        D=draw(st.sampled_from([64, 80, 96, 128, 256]), "head_dim"),
        S=page,
        W=-(-capacity // page),
        dtype=draw(st.sampled_from(["float32", "bfloat16"]), "dtype"),
        kv_dtype=draw(st.sampled_from([None, "int8"]), "pool"),
        window=draw(st.none() | st.integers(1, capacity), "window"),
        zero_kv=draw(st.integers(0, kv_heads - 1), "kv heads of zeros"),
        zero_q=draw(st.integers(0, groups - 1), "query heads of zeros"),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=shapes(), seed=st.integers(0, 1000))
def test_every_attention_equals_dense_attention_for_any_shape(shape: Shape, seed: int) -> None:
    problems = [make_problem(shape, seed), make_problem(shape, seed + 1)]
    every = {"reference": reference.paged_attention, "xla": xla_cpu.paged_attention}
    if native.attention.supports(shape.dtype, shape.D, problems[0].pool):
        every |= {f"native {kwargs}": partial(native.paged_attention, **kwargs) for kwargs in NATIVE}

    def outputs(*arguments):
        return {name: one(*arguments, scale=SCALE, window=shape.window) for name, one in every.items()}

    # Each shape is compiled: without optimisation in half the time.
    compiled = jax.jit(outputs, compiler_options={"xla_backend_optimization_level": 0})
    for problem in problems:
        answer = dense_answer(problem, SCALE, shape.window)
        for name, out in compiled(problem.q, problem.pool, problem.meta).items():
            out = np.asarray(out).astype(np.float32)
            np.testing.assert_allclose(out, answer, atol=TOLERANCE[shape.dtype], rtol=0, err_msg=name)
