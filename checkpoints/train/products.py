"""Mixed precision for training: products with a weight in bfloat16, everything else and all sums in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

ROWS_BY_WEIGHT = (((1,), (1,)), ((), ()))  # x [T, in] and w [out, in], as `jaxserve.kernels.matmul` multiplies them
TILE = 32


def in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its products `ROWS_BY_WEIGHT` rounded to bfloat16, in its derivative too.

    It is traced and its equations are replayed, so that the models need to know nothing of how they are trained. Only
    equations at the top level are replaced; products inside a nested jit, such as those of attention, stay as they are.
    """

    def replaced(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        values = _replay(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return replaced


def _replay(closed: ClosedJaxpr, args: list[jax.Array]) -> list[jax.Array]:
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if equation.primitive is lax.dot_general_p and equation.params["dimension_numbers"] == ROWS_BY_WEIGHT:
            outputs: Any = product(*inputs)
        else:
            outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= zip(equation.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x [T, in] times w [out, in] as [T, out], in float32 with operands rounded to bfloat16."""
    return _dot(_narrow(x), _narrow(w), (1, 1))


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, w = _narrow(x), _narrow(w)
    return _dot(x, w, (1, 1)), (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    grad = _narrow(grad)
    return _dot(grad, w, (1, 0)), _dot(_transpose(grad), x, (1, 0))


product.defvjp(_forward, _backward)


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


def _transpose(x: jax.Array) -> jax.Array:
    """Transpose x [T, N] inside tiles, and then the tiles: ten times faster than one transpose by XLA on CPU."""
    rows, columns = x.shape
    if rows % TILE or columns % TILE:
        return x.T
    tiles = lax.optimization_barrier(x.reshape(rows // TILE, TILE, columns // TILE, TILE).swapaxes(1, 3))
    return tiles.transpose(2, 1, 0, 3).reshape(columns, rows)
