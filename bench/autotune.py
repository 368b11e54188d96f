"""Block sizes of the GPU kernels, tried one by one: `python -m bench.autotune` on a Hopper GPU.

Prints, for every kernel, the time of each choice at the sizes of an 8B Llama and then the entry for
`pallas_kernels/blocks.py`. A choice that the compiler refuses is left out. `--compile-only` compiles all of them for an
H200 on a machine without a GPU, and so says which ones fit.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu_parts.kernels import Case, decode_attention, prefill_attention, quantised_product
from bench.gpu_parts.sizes import REAL
from bench.gpu_parts.timing import seconds_per_call
from pallas_kernels import paged_attention, quantized_matmul
from pallas_kernels.blocks import AttentionBlocks, DeviceBlocks, MatmulBlocks, blocks_for
from pallas_kernels.targets import compile_for

Tuned = dict[str, Any]  # fields of DeviceBlocks

ATTENTION = [AttentionBlocks(keys, stages) for keys, stages in product((64, 128), (2, 3, 4))]
MATMUL = [MatmulBlocks(*sizes) for sizes in product((64, 128), (2, 3, 4, 6), (1, 2, 4))]
MODEL = next(model for model in REAL.models if model.name == "8b")


def searches() -> Iterator[tuple[Case, Callable[..., Any], list[Tuned]]]:
    """A case, the kernel, and the choices between which it decides."""
    attention = partial(paged_attention.paged_attention, scale=MODEL.shape.head_dim**-0.5)
    splits = [{"programs": p, "split_keys": k} for p, k in product((1, 2, 4), (64, 128, 256))]
    yield decode_attention(MODEL, 32, 1024, "auto"), attention, [{"decode": sizes} for sizes in ATTENTION]
    yield decode_attention(MODEL, 1, 8192, "auto"), attention, splits
    yield prefill_attention(MODEL, 2048, 64, "auto"), attention, [{"prefill": sizes} for sizes in ATTENTION]
    for field, rows in (("few_rows", 1), ("many_rows", 128)):
        case = quantised_product(f"int4, {rows} rows", rows, 28672, 4096, 4, "auto")
        yield case, quantized_matmul.quantized_matmul, [{field: sizes} for sizes in MATMUL]


def main() -> None:
    """Tries all choices and prints the best of each search."""
    parser = argparse.ArgumentParser(prog="python -m bench.autotune", description=__doc__.splitlines()[0])
    parser.add_argument("--compile-only", action="store_true", help="no GPU: compile every choice for an H200")
    args = parser.parse_args()
    kind = "NVIDIA H200" if args.compile_only else jax.devices()[0].device_kind
    blocks = blocks_for(kind)
    for case, kernel, choices in searches():
        print(f"{case.op}: {case.case}")
        times = {}
        for number, choice in enumerate(choices):
            try:
                times[number] = measure(case, kernel, replace(blocks, **choice), args.compile_only)
                print(f"{'fits' if args.compile_only else f'{times[number] * 1e6:.1f} µs':>12}  {choice}")
            except Exception as error:
                print(f"{'refused':>12}  {choice}: {str(error).splitlines()[0][:100]}")
        if not times:
            sys.exit("nothing compiles")
        if not args.compile_only:
            blocks = replace(blocks, **choices[min(times, key=times.__getitem__)])
    if not args.compile_only:
        print(f"{kind!r}: {blocks}")


def measure(case: Case, kernel: Callable[..., Any], blocks: DeviceBlocks, compile_only: bool) -> float:
    """Seconds of one call; 0 if it is compiled only."""
    call = partial(kernel, blocks=blocks)
    if compile_only:
        compile_for("h200", call, *jax.tree.map(as_on_gpu, jax.eval_shape(case.inputs, jax.random.key(0))))
        return 0.0
    inputs = case.inputs(jax.random.key(0))
    compiled = jax.jit(call)
    return seconds_per_call(lambda: compiled(*inputs), REAL.least_s)


def as_on_gpu(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Where pools of 16-bit floats are not stored as integers."""
    return jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16) if shape.dtype == jnp.uint16 else shape


if __name__ == "__main__":
    main()
