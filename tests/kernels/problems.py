"""Random problems of paged attention, and their answers computed token by token in numpy."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.kernels import AttentionMeta, Pool, storage_dtype


@dataclass(frozen=True)
class Shape:
    """The sizes of an attention problem, by the axis letters of jaxserve.kernels."""

    B: int = 3
    N: int = 2
    Q: int = 8
    K: int = 2
    G: int = 3
    D: int = 64
    S: int = 4
    W: int = 40
    dtype: str = "float32"
    kv_dtype: str | None = None  # of the pool, if not dtype
    window: int | None = None
    zero_kv: int = 0  # of the K kv heads, the last: of zeros, with their query heads, as added for an even split
    zero_q: int = 0  # of the G query heads of each kv head, the last


@dataclass(frozen=True)
class Problem:
    """Inputs of paged_attention.

    Whatever no token may see is NaN: unused pages, the null page, the rest of a page, and what lies before the window.
    """

    q: Array  # [T, K, G, D]
    pool: Pool  # of one segment [P, K, 2, S, R]
    meta: AttentionMeta
    contexts: list[tuple[np.ndarray, np.ndarray]]  # keys and values [length, K, D] of every row, then of every tile


def stored(values: np.ndarray, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [..., R] as they are stored on CPU, and the vectors (f32[..., D]) that they stand for."""
    if dtype != jnp.int8:
        rounded = values.astype(dtype)
        return rounded.view(storage_dtype(dtype, "cpu")), rounded.astype(np.float32)
    scale = np.abs(values).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    codes = np.rint(np.nan_to_num(values / np.where(scale > 0, scale, 1))).astype(np.int8)
    return np.concatenate([codes, scale.view(np.int8)], axis=-1), codes * scale


def make_problem(shape: Shape, seed: int) -> Problem:
    """Return a problem with ragged contexts from one token to the whole table.

    It has one padding row and one padding tile where there are at least two.
    """
    rng, dtype, kv_dtype = np.random.default_rng(seed), jnp.dtype(shape.dtype), jnp.dtype(shape.kv_dtype or shape.dtype)
    s, capacity = shape, shape.W * shape.S
    decode_lengths = rng.integers(1, capacity + 1, s.B)
    tile_lengths = rng.integers(1, s.Q + 1, s.N)
    tile_starts = rng.integers(0, capacity - s.Q + 1, s.N)
    if s.B > 1:
        decode_lengths[rng.integers(s.B)] = 0
    if s.N > 1:
        tile_lengths[rng.integers(s.N)] = 0
    ends = [*decode_lengths, *np.where(tile_lengths > 0, tile_starts + tile_lengths, 0)]
    firsts = [max(0, first + 1 - (s.window or capacity)) for first in (*decode_lengths - 1, *tile_starts)]

    pages = (s.B + s.N) * s.W + 1
    unused = stored(np.full((s.K, 2, s.S, s.D), np.nan, np.float32), kv_dtype)[0]
    pool = np.repeat(unused[None], pages, axis=0)
    tables = np.zeros((s.B + s.N, s.W), np.int32)
    free = rng.permutation(np.arange(1, pages))
    contexts = []
    for table, first, end in zip(tables, firsts, ends, strict=True):
        used, free = np.split(free, [-(-end // s.S)])
        table[: len(used)] = used
        table[len(used) :] = rng.integers(0, pages, s.W - len(used))
        values = rng.normal(size=(2, end, s.K, s.D)).astype(np.float32)
        values[:, :, s.K - s.zero_kv :] = 0
        rows, kv = stored(values, kv_dtype)
        for position in range(first, end):
            pool[table[position // s.S], :, :, position % s.S] = rows[:, position].swapaxes(0, 1)
        contexts.append((kv[0], kv[1]))

    meta = (tables[: s.B], decode_lengths, tables[s.B :], tile_starts, tile_lengths)
    meta = (jnp.asarray(x.astype(np.int32)) for x in meta)
    q = rng.normal(size=(s.B + s.N * s.Q, s.K, s.G, s.D)).astype(dtype)
    q[:, s.K - s.zero_kv :] = 0
    q[:, :, s.G - s.zero_q :] = 0
    return Problem(
        q=jnp.asarray(q),
        pool=(jnp.asarray(pool),),
        meta=AttentionMeta(*meta),
        contexts=contexts,
    )


def in_segments(problem: Problem, *shares: float) -> Problem:
    """Return the problem with its pool cut after these shares of its pages."""
    (pool,) = problem.pool
    ends = [int(share * len(pool)) for share in shares]
    return replace(problem, pool=tuple(pool[a:b] for a, b in zip((0, *ends), (*ends, len(pool)), strict=True)))


def dense_answer(problem: Problem, scale: float, window: int | None) -> np.ndarray:
    """Return attention of every token over its own context in float64, with zeros for padding."""
    meta = problem.meta
    q = np.asarray(problem.q).astype(np.float64)
    out = np.zeros(q.shape)
    rows = len(meta.decode_lengths)
    tokens = (len(q) - rows) // max(1, len(meta.tile_starts))
    places = [(row, row, int(length) - 1) for row, length in enumerate(np.asarray(meta.decode_lengths)) if length]
    for tile, (start, length) in enumerate(np.stack([meta.tile_starts, meta.tile_lengths], axis=1)):
        places += [(rows + tile * tokens + i, rows + tile, int(start) + i) for i in range(int(length))]
    for token, context, position in places:
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        k, v = (x[seen].astype(np.float64) for x in problem.contexts[context])
        scores = scale * np.einsum("kgd,tkd->kgt", q[token], k)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[token] = np.einsum("kgt,tkd->kgd", weights / weights.sum(-1, keepdims=True), v)
    return out
