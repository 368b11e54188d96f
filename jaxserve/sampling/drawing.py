"""Drawing one token from each row of logits by XLA.

The native kernel native/draw.cc computes the same on a single CPU device. A row's token does not depend on what other
rows ask for, so that programs may leave out what no row asks for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128  # tokens of the vocabulary that one step of a two-level search covers
NO_TOKEN = -1
WEIGHT_BITS = 30  # the bits of a float32 of at most 1, without those that are always 0
DIGIT = 3  # bits of a threshold that one pass over the weights finds, where several sums cost what one costs
PIECES = 64  # parts of a row that are summed apart, so that few rows fill a GPU


class RowParams(NamedTuple):
    """The sampling parameters of a step's rows, [R] each."""

    slot: Array  # i32: index of the token in `newest`; the spare slot for rows that sample nothing
    position: Array  # i32: position of the token to be sampled
    seed: Array  # u32 [R, 2]
    temperature: Array  # f32, 0 = greedy
    top_k: Array  # i32, vocabulary size = off
    top_p: Array  # f32, 1 = off
    min_p: Array  # f32, 0 = off
    presence: Array  # f32
    frequency: Array  # f32
    repetition: Array  # f32


def if_needed(needed: Array, compute: Callable, otherwise: Callable, *operands: Any) -> Any:
    """Return compute(*operands), or on CPU the equal otherwise(*operands) if that is not `needed`.

    Other platforms always compute, because the host would have to wait for the device's value of `needed`.
    """

    def branch(needed: Array, *operands: Any) -> Any:
        return lax.cond(needed, compute, otherwise, *operands)

    return lax.platform_dependent(needed, *operands, cpu=branch, default=lambda _, *operands: compute(*operands))


def checked(tokens: Array, logits: Array) -> Array:
    """Return the tokens i32[R], with NO_TOKEN for rows of logits f32[R, V] with a NaN or an infinite maximum.

    Logits of -infinity are allowed. XLA computes the maximum over blocks once for this function and `most_likely`.
    """
    largest = jnp.max(jnp.max(_blocks(logits, -jnp.inf), axis=-1), axis=-1)
    return jnp.where(jnp.isfinite(largest), tokens, NO_TOKEN)


def most_likely(logits: Array) -> Array:
    """Return the first index i32[R] of the maximum of each row of logits f32[R, V].

    It is found in two levels, the best block and the best token in it, because XLA's CPU backend vectorises the maxima
    of blocks but not an argmax over V.
    """
    blocks = _blocks(logits, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * BLOCK + jnp.argmax(inner, axis=-1)).astype(jnp.int32)


def draw(logits: Array, rows: RowParams, *, masks: bool) -> Array:
    """Return one token per row of logits f32[R, V], i32[R]: random, or the most likely at temperature 0.

    Without `masks`, top_k and top_p are left out, which no row may ask for. Tokens are the same with them.
    """
    random = jnp.any(rows.temperature > 0)
    greedily = lambda logits, _: most_likely(logits)  # noqa: E731
    return if_needed(random, partial(_draw, masks=masks), greedily, logits, rows)


def _draw(logits: Array, rows: RowParams, *, masks: bool) -> Array:
    weights = weights_of(logits, rows)
    if masks:
        filtered = jnp.any((rows.temperature > 0) & ((rows.top_k < logits.shape[1]) | (rows.top_p < 1)))
        masked = lambda weights: top_p_mask(top_k_mask(weights, rows.top_k), rows.top_p)  # noqa: E731
        weights = if_needed(filtered, masked, lambda weights: weights, weights)
    # What follows is compiled alike with and without masks, so that it rounds alike: a row's token does not depend on
    # what other rows ask for.
    weights = lax.optimization_barrier(weights)
    drawn = inverse_transform(weights, jax.vmap(uniform)(rows.seed, rows.position))
    return jnp.where(rows.temperature > 0, drawn, most_likely(logits))


def weights_of(logits: Array, rows: RowParams) -> Array:
    """Return the weights f32[R, V] of tokens after temperature and min_p; the most likely token weighs 1."""
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    weights = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))
    # XLA may round the weight of the most likely token to a little less than 1, and min_p may be 1.
    is_largest = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(is_largest | (weights >= rows.min_p[:, None]), weights, 0.0)


def uniform(seed: Array, position: Array) -> Array:
    """Return the random number f32 in [0, 1) of a seed u32[2] and a position."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def top_k_mask(weights: Array, k: Array) -> Array:
    """Zero all but the k largest of each row of weights f32[R, V], and those equal to the k-th."""
    return _zero_below_threshold(weights, lambda above, _: above.astype(jnp.int32), lambda count: count >= k)


def top_p_mask(weights: Array, p: Array) -> Array:
    """Zero all but the smallest set of largest weights whose share of each row's sum reaches p."""
    enough = p * jnp.sum(weights, axis=-1)
    # At p = 1 rounding must not drop any token.
    is_enough = lambda total: (p < 1) & (total >= enough)  # noqa: E731
    return _zero_below_threshold(weights, lambda above, weights: jnp.where(above, weights, 0.0), is_enough)


def _zero_below_threshold(weights: Array, counted: Callable, is_enough: Callable[[Array], Array]) -> Array:
    """Zero the weights f32[R, V], at most 1, below the largest threshold that leaves enough.

    `is_enough` says whether the sums [..., R] of counted(weights >= threshold, weights) suffice. No sort is needed,
    which is XLA's slowest operation on CPU.
    """
    search = partial(_threshold, counted=counted, is_enough=is_enough)
    by_bits, by_digits = partial(search, digit=1, pieces=1), partial(search, digit=DIGIT, pieces=PIECES)
    threshold = lax.platform_dependent(weights, cpu=by_bits, default=by_digits)
    return jnp.where(_bits(weights) >= threshold[:, None], weights, 0.0)


def _threshold(
    weights: Array, *, counted: Callable, is_enough: Callable[[Array], Array], digit: int, pieces: int
) -> Array:
    """Return the bits i32[R] of the threshold of `_zero_below_threshold`.

    Non-negative floats sort like integers. So the bits are found from the highest on, `digit` of them in each pass over
    the weights, which computes the sums for all values of this digit at once. Rows are summed in `pieces`.
    """
    rows, vocab = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % pieces))).reshape(rows, pieces, -1)
    bits = _bits(weights)

    def narrow(i: int, threshold: Array) -> Array:
        shift = WEIGHT_BITS - digit * (i + 1)
        limits = [threshold | (value << shift) for value in range(1, 1 << digit)]
        terms = tuple(counted(bits >= limit[:, None, None], weights) for limit in limits)
        zeros = tuple(jnp.zeros((), term.dtype) for term in terms)
        sums = lax.reduce(terms, zeros, lambda xs, ys: tuple(map(jnp.add, xs, ys)), (2,))
        value = is_enough(jnp.stack(sums).sum(axis=-1)).sum(axis=0, dtype=jnp.int32)
        return threshold | (value << shift)

    # A loop would launch twice as many kernels on a GPU; many passes of it would make a large program.
    return lax.fori_loop(0, WEIGHT_BITS // digit, narrow, jnp.zeros(rows, jnp.int32), unroll=digit > 1)


def _bits(weights: Array) -> Array:
    return lax.bitcast_convert_type(weights, jnp.int32)


def inverse_transform(weights: Array, uniform: Array) -> Array:
    """Return the token i32[R] at which the running sum of weights f32[R, V] exceeds the share `uniform` f32[R].

    It is found in two levels, because a running sum over the whole vocabulary is slow. A token of weight 0 is never
    drawn.
    """
    blocks = _blocks(weights, 0)
    block, rest = _first_above(jnp.sum(blocks, axis=-1), uniform)
    inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _first_above(inner, rest)
    return block * BLOCK + token


def _first_above(weights: Array, uniform: Array) -> tuple[Array, Array]:
    """Return the index of the first running sum above uniform * total, and the position in that weight, in [0, 1]."""
    sums = jnp.cumsum(weights, axis=-1)
    target = jnp.minimum(uniform, 1 - 1e-6) * sums[:, -1]
    index = jnp.argmax(sums > target[:, None], axis=-1).astype(jnp.int32)
    weight = jnp.take_along_axis(weights, index[:, None], axis=-1)[:, 0]
    below = jnp.take_along_axis(sums, index[:, None], axis=-1)[:, 0] - weight
    return index, jnp.clip((target - below) / weight, 0.0, 1.0)


def _blocks(x: Array, padding: float) -> Array:
    """Return rows [R, V] as blocks [R, ceil(V / BLOCK), BLOCK], the last one padded."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), constant_values=padding).reshape(x.shape[0], -1, BLOCK)
