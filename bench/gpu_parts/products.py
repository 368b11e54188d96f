"""A layer's products in one precision, compared with float32.

They are cases of `kernels.py`, with more numbers of rows. All programs are compiled in threads before this part's turn.
The weight is made float32 by a program of its own: XLA would try many ways to expand it within a product.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bench.gpu_parts import Row
from bench.gpu_parts.kernels import Case, layer_products, product, program, quantised_product, seconds_of, sets_of
from bench.gpu_parts.sizes import LARGEST, Model, Multiplying, Sizes
from bench.gpu_parts.turns import wait_for_turn
from jaxserve.quantization import QArray

BITS = {"int4": 4, "int8": 8, "bf16": 16}


@dataclass(frozen=True)
class Programs:
    """The compiled programs of a case."""

    inputs: Any  # from a random key
    many: Any  # the product with every set of inputs, so that a call takes longer than its dispatch
    widened: Any  # a weight in float32
    exact: Any  # the product of x and a widened weight


def rows(precision: str, sizes: Sizes) -> Iterator[Row]:
    """Yield the time of every product, and the larger one of the relative errors with its first and last inputs."""
    every = list(cases(BITS[precision], sizes.models[-1], sizes.multiplying))
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(lambda case: compiled_for(case, sizes), every))
    wait_for_turn()
    for case, programs in zip(every, compiled, strict=True):
        inputs = [programs.inputs(key) for key in jax.random.split(jax.random.key(1), sets_of(case, sizes))]
        first, rest = [x for x, _ in inputs], [(w,) for _, w in inputs]
        results = programs.many(first, rest)
        error = max(relative_error(results[i], *inputs[i], programs) for i in (0, -1))
        seconds = seconds_of(programs.many, first, rest, sizes)
        yield {"op": case.op, "case": case.case, **case.cost.fields, "seconds": seconds, "relative_error": error}


def cases(bits: int, model: Model, multiplying: Multiplying) -> Iterator[Case]:
    """Yield the products of a layer's weights by their numbers of rows, the largest weight first."""
    for name, (out, inner) in sorted(layer_products(model).items(), key=lambda item: item[0] != LARGEST):
        for n in multiplying.rows if name == LARGEST else multiplying.other_rows:
            if bits == 16:
                yield product(f"{model.name} {name}, {n} rows", n, out, inner)
            else:
                yield quantised_product(f"{model.name} {name} in int{bits}, {n} rows", n, out, inner, bits, "auto")


def compiled_for(case: Case, sizes: Sizes) -> Programs:
    """Return the programs of a case, compiled for abstract inputs."""
    inputs, key = jax.jit(case.inputs), jax.random.key(1)
    x, w = jax.eval_shape(inputs, key)
    sets = sets_of(case, sizes)
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.shape, w.shape)]
    return Programs(
        inputs.lower(key).compile(),
        program(case).lower([x] * sets, [(w,)] * sets).compile(),
        jax.jit(widened).lower(w).compile(),
        jax.jit(partial(jnp.einsum, "rc,nc->rn", precision="highest")).lower(*wide).compile(),
    )


def widened(w: Array | QArray) -> Array:
    """Return a weight in float32."""
    return w.dequantize(jnp.float32) if isinstance(w, QArray) else w.astype(jnp.float32)


def relative_error(y: Array, x: Array, w: Array | QArray, programs: Programs) -> float:
    """Return the norm of a product's error over the norm of the exact product."""
    exact = programs.exact(x.astype(jnp.float32), programs.widened(w))
    return float(jnp.linalg.norm(y.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
