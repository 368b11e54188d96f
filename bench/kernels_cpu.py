"""Times of the CPU kernels, per layer: `python -m bench.kernels_cpu`.

Measures three parts, of which `--only` selects one:

- matmul: products with weights. With few rows they are compared with the rate at which memory can be read. XLA's own
  products of bfloat16 and int8 numbers (int32 sums, unscaled) serve as a reference. `--group` and `--zero-points`
  choose the format of quantised weights;
- attention: attention with its KV write, for decode batches and prefill, with the shapes of the 160M and 1.1B models,
  on the native and the XLA path, with a KV cache in bfloat16 and in int8. `--segments` divides the pools;
- kv_write: the KV write alone at two pool sizes, which takes equally long if it happens in place.
"""

import argparse
import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bench import bandwidth
from bench.bandwidth import Bandwidth
from jaxserve.kernels import AttentionMeta, Pool, kv_pool, kv_write, matmul, native, page_bytes, xla_cpu
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import packed_bytes
from jaxserve.quantization.rounding import GROUP, GROUPS

PAGE_SIZE, HEAD_DIM, KV_HEADS = 16, 64, 4
HEADS_PER_KV = {"160M": 3, "1.1B": 8}
KV_DTYPES = ("bfloat16", "int8")
DECODES = [(1, 128), (1, 1024), (8, 256), (32, 256), (1, 16384), (8, 8192)]  # rows, context
TILES = [32, 64, 128]  # tokens of a prefill tile; 512 tokens in all


WEIGHTS = {"160M": [(1280, 768), (4096, 768), (768, 2048)], "1.1B": [(2560, 2048), (11264, 2048), (2048, 5632)]}
HEAD = (32000, 2048)
SHAPES = [*(shape for shapes in WEIGHTS.values() for shape in shapes), HEAD]
XLA_INT8 = "xla, int8"
ROWS = [1, 2, 4, 8, 16, 32, 512]
MEMORY_BOUND_ROWS = 32  # up to this number, a product mostly reads its weight
INT8_ROWS = (32, 512)  # of XLA's int8 product
THREADS = 2
WORKING_SET = THREADS * bandwidth.SIZE  # bytes of weights multiplied in turn, as many as bench.bandwidth reads


@dataclass(frozen=True)
class Format:
    """The number format of a weight."""

    bits: int
    group: int = GROUP  # inputs that share a scale; 0: all inputs of an output
    zero_points: bool = False


def random_weight(out: int, inner: int, form: Format) -> Array | QArray:
    """Return a weight with arbitrary values."""
    rng = np.random.default_rng(0)
    if form.bits == 16:
        return jnp.asarray(rng.standard_normal((out, inner), np.float32), jnp.bfloat16)
    group = form.group or inner
    assert inner % group == 0, "groups do not divide the inputs"
    codes = jnp.asarray(rng.integers(0, 256, (out, packed_bytes(form.bits, inner)), np.uint8))
    scales = jnp.ones((out, inner // group), jnp.bfloat16)
    zeros = jnp.asarray(rng.integers(-2, 3, scales.shape), jnp.bfloat16) if form.zero_points else None
    return QArray(codes, scales, zeros, form.bits, inner)


def random_int8(out: int, inner: int) -> Array:
    """Return a random weight of all int8 numbers, as XLA's product takes it."""
    return jnp.asarray(np.random.default_rng(0).integers(-128, 128, (out, inner), np.int8))


def working_set(w: Array | QArray) -> list[Array | QArray]:
    """Return a weight and as many copies of it as fill the working set."""
    return [w, *(jax.tree.map(jnp.copy, w) for _ in range(WORKING_SET // w.nbytes))]


def time_matmul(product: Callable, rows: int, weights: Sequence[Array | QArray], repeats: int) -> list[float]:
    """Compile a product and return the seconds of its calls, which use the weights in turn."""
    first = weights[0]
    dtype = jnp.int8 if isinstance(first, Array) and first.dtype == jnp.int8 else jnp.bfloat16
    x = jnp.ones((rows, first.shape[1]), dtype)
    step = jax.jit(product)
    jax.block_until_ready(step(x, weights[0]))
    times = []
    for i in range(max(repeats, 2 * len(weights))):
        start = time.perf_counter()
        jax.block_until_ready(step(x, weights[i % len(weights)]))
        times.append(time.perf_counter() - start)
    return times


def matmul_line(times: Sequence[float], rows: int, w: Array | QArray, memory: Bandwidth | None) -> str:
    """Return minimum and median of the times, and rates at the median.

    With few rows the rate is also given as a share of the memory bandwidth.
    """
    least, median = min(times), statistics.median(times)
    line = (
        f"{1e3 * least:8.3f} {1e3 * median:8.3f} ms {1e-9 * w.nbytes / median:6.1f} GB/s "
        f"{2e-9 * rows * w.shape[0] * w.shape[1] / median:6.0f} GFLOP/s"
    )
    if memory is None or rows > MEMORY_BOUND_ROWS:
        return line
    return f"{line} {memory.share(w.nbytes, median):5.0%} of the bandwidth"


def xla_dot(x: Array, w: Array) -> Array:
    """Return XLA's own product, for comparison."""
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def xla_int8_dot(x: Array, w: Array) -> Array:
    """Return XLA's int32 product of int8 numbers, the unscaled part of a product with quantised codes."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def read_memory() -> Bandwidth | None:
    """Print and return the memory bandwidth, or None if its loop cannot be compiled."""
    try:
        found = bandwidth.measure(THREADS)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the memory bandwidth was not measured: {error}")
        return None
    print(bandwidth.sentence(found, THREADS))
    return found


def report_matmul(
    repeats: int,
    group: int = GROUP,
    zero_points: bool = False,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    row_counts: Sequence[int] = ROWS,
) -> None:
    """Print the products of every shape, number of rows and precision: minimum and median of the times, and rates."""
    memory = read_memory()
    size = f"groups of {group}" if group else "one group for each output"
    print(f"weights in 8, 4 and 3 bits: {size}, {'with zeros' if zero_points else 'symmetric'}")
    for out, inner in shapes:
        forms = {f"{bits} bits": Format(bits, group, zero_points) for bits in (16, 8, 4, 3)}
        weights = {name: working_set(random_weight(out, inner, form)) for name, form in forms.items()}
        paths = {name: (matmul, weights[name]) for name in forms} if native.targets() else {}
        paths["xla, 16 bits"] = (xla_dot, weights["16 bits"])
        paths[XLA_INT8] = (xla_int8_dot, working_set(random_int8(out, inner)))
        for rows in row_counts:
            for name, (product, copies) in paths.items():
                if name != XLA_INT8 or rows in INT8_ROWS:
                    times = time_matmul(product, rows, copies, repeats)
                    line = matmul_line(times, rows, copies[0], memory)
                    print(f"{out:5} x {inner:4} rows={rows:<3} {name:12} {line}", flush=True)
    read_memory()  # once more, because the speed of a shared machine changes


def decode_meta(rows: int, context: int, pages: int, width: int) -> AttentionMeta:
    """Return the metadata of rows with equal contexts, on pages scattered over the pool."""
    used = -(-context // PAGE_SIZE)
    table = np.zeros((rows, width), np.int32)
    table[:, :used] = 1 + np.random.default_rng(0).permutation(pages - 1)[: rows * used].reshape(rows, used)
    none = np.zeros(0, np.int32)
    return AttentionMeta(table, np.full(rows, context, np.int32), none.reshape(0, width), none, none)


def prefill_meta(tile: int, tokens: int, pages: int, width: int) -> AttentionMeta:
    """Return the metadata of one sequence of `tokens` tokens, from its beginning."""
    n, none = tokens // tile, np.zeros(0, np.int32)
    table = np.tile(1 + np.random.default_rng(0).permutation(pages - 1)[:width].astype(np.int32), (n, 1))
    starts = np.arange(n, dtype=np.int32) * tile
    return AttentionMeta(none.reshape(0, width), none, table, starts, np.full(n, tile, np.int32))


def slots(meta: AttentionMeta) -> np.ndarray:
    """Return the pool slots that the tokens of the step are written to."""
    rows = np.arange(len(meta.decode_lengths))
    last = meta.decode_lengths - 1
    decode = meta.decode_pages[rows, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    position = np.arange(meta.tile_lengths.sum())
    table = meta.tile_pages[0] if len(meta.tile_pages) else np.zeros(1, np.int32)
    return np.concatenate([decode, table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE]).astype(np.int32)


def milliseconds(step: Callable[[Pool], Pool], pool: Pool, repeats: int) -> tuple[float, float]:
    """Return minimum and median (ms) of a step that takes the pool and returns it."""
    pool = jax.block_until_ready(step(pool))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        pool = jax.block_until_ready(step(pool))
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), float(np.median(times))


def time_attention(
    attention: Callable, meta: AttentionMeta, kv_dtype: str, groups: int, segments: Sequence[int], repeats: int
) -> tuple[float, float]:
    """Return minimum and median (ms) of one layer's KV write and attention."""
    where = jnp.asarray(slots(meta))
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(len(where), KV_HEADS, groups, HEAD_DIM)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(len(where), KV_HEADS, HEAD_DIM)), jnp.bfloat16)
    meta = jax.tree.map(jnp.asarray, meta)

    @partial(jax.jit, donate_argnums=0)
    def layer(pool: Pool, q: Array, k: Array, where: Array, meta: AttentionMeta) -> tuple[Pool, Array]:
        pool = kv_write(pool, k, k, where)
        return pool, attention(q, pool, meta, scale=HEAD_DIM**-0.5)

    pool = tuple(part for pages in segments for part in kv_pool(pages, KV_HEADS, PAGE_SIZE, HEAD_DIM, kv_dtype))
    ones = jnp.ones((sum(segments) * PAGE_SIZE, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    pool = kv_write(pool, ones, ones, jnp.arange(len(ones)))
    return milliseconds(lambda pool: layer(pool, q, k, where, meta)[0], pool, repeats)


def report_attention(repeats: int, segments: Sequence[int], width: int, kv_dtypes: Sequence[str]) -> None:
    """Print decode and prefill for every model, path and KV cache, with the rate at which decode reads."""
    paths, pages = {"native": native.paged_attention} if native.targets() else {}, sum(segments)
    paths["xla"] = xla_cpu.paged_attention
    print(f"jax {jax.__version__}, {platform.machine()}; minimum and median of {repeats} in ms, one layer, bfloat16")
    for (model, groups), (path, attention), kv in itertools.product(HEADS_PER_KV.items(), paths.items(), kv_dtypes):
        timed = partial(time_attention, attention, kv_dtype=kv, groups=groups, segments=segments, repeats=repeats)
        for rows, context in DECODES:
            least, median = timed(decode_meta(rows, context, pages, width))
            rate = 1e-6 * rows * context / PAGE_SIZE * page_bytes(KV_HEADS, PAGE_SIZE, HEAD_DIM, kv, "cpu") / least
            case = f"decode  B={rows:<3} context={context:<5}"
            print(f"{model} {path:6} {kv:8} {case} {least:7.3f} {median:7.3f} {rate:5.1f} GB/s", flush=True)
        for tile in TILES:
            least, median = timed(prefill_meta(tile, 512, pages, width))
            print(f"{model} {path:6} {kv:8} prefill T=512 tile={tile:<6}   {least:7.3f} {median:7.3f}", flush=True)


def report_kv_write(repeats: int, kv_dtypes: Sequence[str]) -> None:
    """Print the KV write alone, into a small and a large pool. For floats the native path is XLA's too."""
    for kv, megabytes, path in itertools.product(kv_dtypes, (8, 1024), ("native", "xla")):
        write = jax.jit(partial(kv_write, backend=path), donate_argnums=0)
        pages = (megabytes << 20) // page_bytes(KV_HEADS, PAGE_SIZE, HEAD_DIM, kv, "cpu")
        pool = kv_pool(pages, KV_HEADS, PAGE_SIZE, HEAD_DIM, kv)
        for tokens in (1, 32, 512):
            k, where = jnp.ones((tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16), jnp.arange(tokens) + PAGE_SIZE
            least, median = milliseconds(partial(write, k=k, v=k, slots=where), (pool[0] + 0,), repeats)
            times = f"{least:7.3f} {median:7.3f}"
            print(f"kv_write {path:6} {kv:8} {tokens:3} tokens, pool of {megabytes:4} MB {times}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--pages", type=int, default=4608)
    parser.add_argument("--segments", type=int, default=1, help="equal segments of attention's pools")
    parser.add_argument("--width", type=int, default=1024, help="pages per page table")
    parser.add_argument("--only", choices=["matmul", "attention", "kv_write"], help="measure one part alone")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, help="measure one KV cache alone")
    parser.add_argument(
        "--group", type=int, default=GROUP, choices=(0, *GROUPS), help="inputs that share a scale; 0: all inputs"
    )
    parser.add_argument("--zero-points", action="store_true", help="quantise with zero points")
    args = parser.parse_args()
    kv_dtypes = [args.kv_cache_dtype] if args.kv_cache_dtype else KV_DTYPES
    if args.only in (None, "matmul"):
        report_matmul(args.repeats, args.group, args.zero_points)
    if args.only in (None, "attention"):
        segments = [args.pages // args.segments] * args.segments
        report_attention(args.repeats, segments, args.width, kv_dtypes)
    if args.only in (None, "kv_write"):
        report_kv_write(args.repeats, kv_dtypes)


if __name__ == "__main__":
    main()
