"""The programs that draw tokens, compared with thresholds that are found bit by bit."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bench.gpu_parts import Row
from bench.gpu_parts.sizes import Sizes
from bench.gpu_parts.timing import seconds_per_call
from bench.gpu_parts.turns import wait_for_turn
from jaxserve.sampling import drawing, ops

ASKED: dict[str, list[dict[str, float]]] = {
    "greedy": [{}],
    "random": [{"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.05}],
    "masked": [{"temperature": 1.0, **more} for more in ({}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 50})],
    "bisected": [{"temperature": 1.0, "top_p": 0.9}],
}
OFF = {"top_p": 1.0, "repetition": 1.0}  # the other parameters are 0
SETS = 3  # of logits, which take turns


def rows(sizes: Sizes) -> Iterator[Row]:
    """Yield the times of each program, and how many tokens differ from those by bisection.

    Each call is a program of its own, as in a step: what the device does in less time than a dispatch takes as long as
    a dispatch.
    """
    vocab = sizes.drawing.vocab
    kinds = {
        "greedy": ops.sample_greedy,
        "random": ops.sample_random,
        "masked": ops.sample_masked,
        "bisected": bisected,
    }

    def compiled(kind: str, rows: int) -> Any:
        shapes = ((rows, vocab), jnp.float32), ((ops.NUM_FIELDS, rows), jnp.int32), ((rows + 1,), jnp.int32)
        return jax.jit(kinds[kind]).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()

    keys = [(kind, rows) for rows in sizes.drawing.rows for kind in kinds]
    with ThreadPoolExecutor() as threads:
        programs = dict(zip(keys, threads.map(lambda key: compiled(*key), keys), strict=True))
    wait_for_turn()
    for kind, count in keys:
        run, reference = programs[kind, count], programs["bisected", count]
        logits = [3 * jax.random.normal(key, (count, vocab)) for key in jax.random.split(jax.random.key(count), SETS)]
        for asks in ASKED[kind]:
            packed, poisoned = packed_rows(count, vocab, asks), jnp.full(count + 1, -7, jnp.int32)
            inputs = [(one, packed, poisoned) for one in logits]
            differ, turns = sum(different(run, reference, *one) for one in inputs), cycle(inputs)
            seconds = seconds_per_call(lambda run=run, turns=turns: run(*next(turns)), sizes.min_round_s)
            case = ", ".join([f"{kind}, {count} rows", *(f"{name} {value:g}" for name, value in asks.items())])
            yield {"case": case, "rows": count, **asks, "seconds": seconds, "different": differ, "of": SETS * count}


def packed_rows(rows: int, vocab: int, asks: dict[str, float]) -> Array:
    """Return the packed parameters i32[11, R] of rows with their own seeds."""
    rng = np.random.default_rng(rows)
    packed = np.stack([ops.idle_row(rows, vocab)] * rows, axis=1)
    packed[ops.SLOT], packed[ops.SEED] = np.arange(rows), rng.integers(-(2**31), 2**31, (2, rows))
    packed[ops.TOP_K] = asks.get("top_k", vocab)
    floats = packed[ops.FLOATS].view(np.float32)
    for place, name in enumerate(ops.FLOAT_FIELDS):
        floats[place] = asks.get(name, OFF.get(name, 0.0))
    return jnp.asarray(packed)


def different(run: Callable, reference: Callable, *inputs: Any) -> int:
    """Return how many tokens are not those of the reference, or not where the next step reads them."""
    tokens, newest = map(np.asarray, run(*inputs))
    return int(((tokens != np.asarray(reference(*inputs)[0])) | (newest[:-1] != tokens)).sum())


def bisected(logits: Array, packed: Array, newest: Array) -> tuple[Array, Array]:
    """Sample as `sample_masked` does, with thresholds whose bits are found one by one."""

    def mask(weights: Array, enough: Callable[[Array], Array]) -> Array:
        bits = lax.bitcast_convert_type(weights, jnp.int32)

        def narrow(i: Array, threshold: Array) -> Array:
            candidate = threshold | (1 << (30 - i))
            return jnp.where(enough(bits >= candidate[:, None]), candidate, threshold)

        threshold = lax.fori_loop(0, 31, narrow, jnp.zeros(len(weights), jnp.int32))
        return jnp.where(bits >= threshold[:, None], weights, 0.0)

    rows = ops.unpack_rows(packed)
    weights = mask(drawing.weights_of(logits, rows), lambda above: above.sum(axis=-1) >= rows.top_k)
    share = rows.top_p * weights.sum(axis=-1)
    weights = mask(weights, lambda above: (rows.top_p < 1) & (jnp.where(above, weights, 0.0).sum(axis=-1) >= share))
    drawn = drawing.inverse_transform(weights, jax.vmap(drawing.uniform)(rows.seed, rows.position))
    tokens = jnp.where(rows.temperature > 0, drawn, drawing.most_likely(logits))
    return drawing.checked(tokens, logits), newest.at[rows.slot].set(tokens)
