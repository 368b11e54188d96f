"""Every operation of `jaxserve.kernels` at the sizes of the models, each with its floor.

One program calls an operation on several sets of inputs, so that it takes longer than a dispatch and no cache holds
what it reads. Pools are donated, as in the engine.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.gpu_parts import Row
from bench.gpu_parts.ceilings import random
from bench.gpu_parts.costs import WORD, Cost, attended_pairs
from bench.gpu_parts.sizes import LARGEST, Model, Sizes
from bench.gpu_parts.timing import seconds_per_call, timed_row
from jaxserve.core.config import KernelBackend
from jaxserve.core.kv_layout import GROWTH_SEGMENTS
from jaxserve.kernels import AttentionMeta, Pool, grouped_matmul, kv_pool, kv_write, matmul, page_bytes, paged_attention
from jaxserve.kernels.backend import uses_pallas
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import packed_bytes

PAGE = 16  # tokens
MAX_SETS = 16
GROUP = 128  # inputs that share a scale
# XLA is measured with the first number of rows, and with the second and larger ones: it always writes the weight in
# bfloat16.
XLA_ROWS = (1, 32)

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One operation at one size. With `donate`, its first input is replaced by its result."""

    op: str
    case: str
    inputs: Callable[[Array], Inputs]  # from a random key
    call: Callable[..., Array]
    cost: Cost
    donate: bool = False


def rows(sizes: Sizes) -> Iterator[Row]:
    """Yield a row for every case. A case that fails reports its error, and the next one follows."""
    for case in cases(sizes):
        labels = {"op": case.op, "case": case.case, **case.cost.fields}
        yield timed_row(labels, lambda case=case: measure(case, sizes))


def measure(case: Case, sizes: Sizes) -> float:
    """Return the seconds of one call of the operation."""
    first, rest = inputs_of(case, sizes)
    return seconds_of(program(case), first, rest, sizes, donate=case.donate)


def inputs_of(case: Case, sizes: Sizes) -> tuple[list[Any], list[Inputs]]:
    """Return enough sets of inputs that no cache holds them: first inputs, and the remaining ones."""
    inputs = [case.inputs(key) for key in jax.random.split(jax.random.key(1), sets_of(case, sizes))]
    return [i[0] for i in inputs], [i[1:] for i in inputs]


def sets_of(case: Case, sizes: Sizes) -> int:
    """Return how many sets of inputs no cache holds."""
    return min(max(math.ceil(sizes.rotate_bytes / max(case.cost.bytes, 1)), 1), MAX_SETS)


def program(case: Case) -> jax.stages.Wrapped:
    """Return a program that calls the operation on several sets of inputs."""
    operation = jax.jit(case.call)  # traces and lowers a kernel once instead of for every set

    def many(first: list[Any], rest: list[Inputs]) -> list[Array]:
        return [operation(one, *others) for one, others in zip(first, rest, strict=True)]

    return jax.jit(many, donate_argnums=0 if case.donate else ())


def seconds_of(
    many: Callable[..., list[Array]], first: list[Any], rest: list[Inputs], sizes: Sizes, *, donate: bool = False
) -> float:
    """Return the seconds per call of the operation that a program calls on all sets."""

    def call() -> list[Array]:
        nonlocal first
        results = many(first, rest)
        if donate:
            first = results
        return results

    return seconds_per_call(call, sizes.min_round_s) / len(rest)


def cases(sizes: Sizes, backends: tuple[KernelBackend, ...] | None = None) -> Iterator[Case]:
    """Yield all cases: the engine's kernels first, the widest model before others, and XLA's kernels last.

    `backends` is by default that of `choices`.
    """
    first, *others = backends or choices()
    models = sizes.models[::-1]
    for model in models:
        yield from quantised(model, first)
        yield from attention(model, sizes, first)
        yield from matmuls(model)
    for model in models:
        for tokens in sizes.write_tokens:
            yield write(model, tokens)
    for n in sizes.expert_rows:
        yield experts(sizes, n)
    for gpu in others:
        for model in models:
            yield from quantised(model, gpu)
            yield from attention(model, sizes, gpu)


def attention(model: Model, sizes: Sizes, gpu: KernelBackend) -> Iterator[Case]:
    """Yield decode at every batch size, from a pool in segments, from a pool in int8, and prefill."""
    for n, context in model.decodes:
        yield decode_attention(model, n, context, gpu)
    yield decode_attention(model, *model.decodes[-1], gpu, segments=1 + GROWTH_SEGMENTS)
    yield decode_attention(model, *model.decodes[-1], gpu, kv_dtype="int8")
    yield prefill_attention(model, sizes.prefill_tokens, sizes.tile, gpu)


def choices() -> tuple[KernelBackend, ...]:
    """Return the engine's own choice of kernels, and XLA if that is different."""
    return ("auto", "xla") if uses_pallas("auto") else ("auto",)


def name_of(case: str, gpu: KernelBackend) -> str:
    """Return the name of a case, with the backend if it was forced."""
    return f"{case}, by XLA" if gpu == "xla" else case


def layer_products(model: Model) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a layer's weights."""
    s = model.shape
    return {
        "qkv": ((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        "o": (s.hidden, s.heads * s.head_dim),
        LARGEST: (2 * s.intermediate, s.hidden),
        "down": (s.hidden, s.intermediate),
    }


def matmuls(model: Model) -> Iterator[Case]:
    """Yield the products of a layer, and of the head for as many rows as are sampled at once."""
    weights = {**layer_products(model), "head": (model.shape.vocab, model.shape.hidden)}
    rows = dict.fromkeys(weights, model.kernel_rows)
    rows[LARGEST] = tuple(sorted({*model.kernel_rows, *model.quantised_rows}))
    for name, (out, inner) in weights.items():
        for n in rows[name]:
            if name != "head" or n <= max(model.batches):
                yield product(f"{model.name} {name}, {n} rows", n, out, inner)


def product(name: str, n: int, out: int, inner: int) -> Case:
    """Return the product of [n, inner] and [out, inner]."""

    def inputs(key: Array) -> Inputs:
        one, other = jax.random.split(key)
        return random(one, (n, inner), jnp.bfloat16), random(other, (out, inner), jnp.bfloat16)

    cost = Cost(WORD * (n * inner + out * inner + n * out), 2 * n * out * inner)
    return Case("matmul", name, inputs, matmul, cost)


def quantised(model: Model, gpu: KernelBackend) -> Iterator[Case]:
    """Yield the layer's largest product with a quantised weight, and all of its products in 4 bits."""
    weights = layer_products(model)
    few, many = XLA_ROWS
    for bits in (4, 8):
        for name, shape in weights.items():
            rows = model.quantised_rows if name == LARGEST else model.layer_rows if bits == 4 else ()
            for n in rows:
                if gpu != "xla" or (name == LARGEST and (n == few or n >= many)):
                    label = name_of(f"{model.name} {name} in int{bits}, {n} rows", gpu)
                    yield quantised_product(label, n, *shape, bits, gpu)


def quantised_product(name: str, n: int, out: int, inner: int, bits: int, gpu: KernelBackend) -> Case:
    """Return the product of [n, inner] and a quantised [out, inner] whose codes are equally likely."""
    groups = -(-inner // GROUP)

    def inputs(key: Array) -> Inputs:
        one, other, third = jax.random.split(key, 3)
        codes = jax.random.randint(other, (out, packed_bytes(bits, inner)), 0, 256, jnp.uint8)
        w = QArray(codes, random(third, (out, groups), jnp.bfloat16), None, bits, inner)
        return random(one, (n, inner), jnp.bfloat16), w

    weight = out * (packed_bytes(bits, inner) + WORD * groups)
    cost = Cost(WORD * (n * inner + n * out) + weight, 2 * n * out * inner)
    return Case("matmul", name, inputs, partial(matmul, backend=gpu), cost)


def experts(sizes: Sizes, n: int) -> Case:
    """Return a product of rows that are spread evenly over the experts; each expert with rows reads its weights."""
    count, intermediate, hidden = sizes.experts
    out = 2 * intermediate
    counts = np.full(count, n // count, np.int32)
    counts[: n % count] += 1

    def inputs(key: Array) -> Inputs:
        one, other = jax.random.split(key)
        x, w = random(one, (n, hidden), jnp.bfloat16), random(other, (count, out, hidden), jnp.bfloat16)
        return x, w, jnp.asarray(counts)

    read = int((counts > 0).sum()) * out * hidden
    cost = Cost(WORD * (n * hidden + read + n * out), 2 * n * out * hidden)
    return Case("grouped_matmul", f"{count} experts, {n} rows", inputs, grouped_matmul, cost)


def decode_attention(
    model: Model, n: int, context: int, gpu: KernelBackend, segments: int = 1, kv_dtype: str = "bfloat16"
) -> Case:
    """Return decode attention of n sequences whose pages are scattered over a pool of one or more segments."""
    s = model.shape
    width = -(-context // PAGE)
    none = np.zeros(0, np.int32)

    def inputs(key: Array) -> Inputs:
        table = 1 + np.random.default_rng(0).permutation(n * width).astype(np.int32).reshape(n, width)
        meta = AttentionMeta(table, np.full(n, context, np.int32), none.reshape(0, width), none, none)
        q, (pool,), meta = attention_inputs(key, model, n, n * width, meta, kv_dtype)
        return q, tuple(jnp.array_split(pool, segments)), meta

    flops = 4 * n * context * s.heads * s.head_dim
    moved = n * context * page_bytes(s.kv_heads, 1, s.head_dim, kv_dtype, "gpu") + WORD * 2 * n * s.heads * s.head_dim
    call = partial(paged_attention, scale=s.head_dim**-0.5, backend=gpu)
    form = (f", pool in {segments}" if segments > 1 else "") + (f", {kv_dtype}" if kv_dtype == "int8" else "")
    name = name_of(f"{model.name} decode, {n} x {context}{form}", gpu)
    return Case("paged_attention", name, inputs, call, Cost(moved, flops))


def prefill_attention(model: Model, tokens: int, tile: int, gpu: KernelBackend) -> Case:
    """Return attention of all tokens of one sequence, tile by tile."""
    s = model.shape
    width, tiles = -(-tokens // PAGE), -(-tokens // tile)
    none = np.zeros(0, np.int32)

    def inputs(key: Array) -> Inputs:
        pages = 1 + np.random.default_rng(0).permutation(width).astype(np.int32)
        starts = np.arange(tiles, dtype=np.int32) * tile
        full = np.full(tiles, tile, np.int32)
        meta = AttentionMeta(none.reshape(0, width), none, np.tile(pages, (tiles, 1)), starts, full)
        return attention_inputs(key, model, tiles * tile, width, meta)

    flops = 4 * attended_pairs(tokens) * s.heads * s.head_dim
    moved = tokens * 2 * s.kv_heads * s.head_dim + 2 * tokens * s.heads * s.head_dim
    call = partial(paged_attention, scale=s.head_dim**-0.5, backend=gpu)
    name = name_of(f"{model.name} prefill, {tokens} tokens", gpu)
    return Case("paged_attention", name, inputs, call, Cost(WORD * moved, flops))


def attention_inputs(
    key: Array, model: Model, tokens: int, pages: int, meta: AttentionMeta, kv_dtype: str = "bfloat16"
) -> Inputs:
    """Return queries, a full pool and the metadata."""
    s = model.shape
    for_q, for_pool = jax.random.split(key)
    q = random(for_q, (tokens, s.kv_heads, s.heads // s.kv_heads, s.head_dim), jnp.bfloat16)
    return q, filled_pool(for_pool, model, pages, kv_dtype), jax.tree.map(jnp.asarray, meta)


def filled_pool(key: Array, model: Model, pages: int, kv_dtype: str) -> Pool:
    """Return a pool of random values, null page included."""
    s = model.shape
    pool = kv_pool(pages + 1, s.kv_heads, PAGE, s.head_dim, kv_dtype)
    k, v = (random(k, ((pages + 1) * PAGE, s.kv_heads, s.head_dim), jnp.bfloat16) for k in jax.random.split(key))
    return jax.jit(kv_write, donate_argnums=0)(pool, k, v, jnp.arange((pages + 1) * PAGE))


def write(model: Model, tokens: int) -> Case:
    """Return the write of a step's keys and values into a pool that is a hundred times as large."""
    s = model.shape

    def inputs(key: Array) -> Inputs:
        k, v = (random(one, (tokens, s.kv_heads, s.head_dim), jnp.bfloat16) for one in jax.random.split(key))
        pool = kv_pool(100 * -(-tokens // PAGE) + 1, s.kv_heads, PAGE, s.head_dim, jnp.bfloat16)
        slots = np.random.default_rng(0).permutation(np.arange(PAGE, pool[0].shape[0] * PAGE, dtype=np.int32))[:tokens]
        return pool, k, v, jnp.asarray(slots)

    moved = 2 * 2 * tokens * s.kv_heads * s.head_dim  # keys and values, read and written
    return Case("kv_write", f"{model.name}, {tokens} tokens", inputs, kv_write, Cost(WORD * moved, 0), donate=True)
