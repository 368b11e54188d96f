"""Search for the fastest block sizes of the GPU kernels: `python -m bench.autotune` on a Hopper GPU.

For every kernel, prints the time of each choice at the sizes of an 8B Llama, and finally the entry for
`pallas_kernels/blocks.py`. A choice that the compiler refuses is skipped. `--compile-only` compiles all choices for an
H200 on a machine without a GPU, which shows the choices that fit.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bench.gpu_parts.kernels import (
    Case,
    decode_attention,
    inputs_of,
    prefill_attention,
    program,
    quantised_product,
    seconds_of,
)
from bench.gpu_parts.sizes import REAL
from pallas_kernels import paged_attention, quantized_matmul
from pallas_kernels.blocks import HOPPER, AttentionBlocks, MatmulBlocks, blocks_for
from pallas_kernels.targets import compile_for

Tuned = dict[str, Any]  # fields of DeviceBlocks

ATTENTION = [AttentionBlocks(keys, stages) for keys, stages in product((64, 128), (2, 3, 4))]
FEW = [MatmulBlocks(*sizes) for sizes in product((64, 128), (32,), (2, 3, 4), (4, 8), (32, 64, 128))]
MANY = [MatmulBlocks(*sizes) for sizes in product((64, 128), (64, 128), (2, 3, 4), (1, 2, 4), (32, 64))]
SHARED = [replace(sizes, warpgroups=2) for sizes in MANY if sizes.outs == 128]
MODEL = next(model for model in REAL.models if model.name == "8b")


def searches() -> Iterator[tuple[Case, Callable[..., Array], list[Tuned]]]:
    """Yield a case, its kernel, and the choices to decide between."""
    attention = partial(paged_attention.paged_attention, scale=MODEL.shape.head_dim**-0.5)
    splits = [{"programs": p, "split_keys": k} for p, k in product((1, 2, 4), (64, 128, 256))]
    yield decode_attention(MODEL, 64, 4096, "auto"), attention, [{"decode": sizes} for sizes in ATTENTION]
    yield decode_attention(MODEL, 1, 8192, "auto"), attention, splits
    yield prefill_attention(MODEL, 2048, 64, "auto"), attention, [{"prefill": sizes} for sizes in ATTENTION]
    for field, rows, choices in (("few_rows", 8, FEW), ("many_rows", 64, MANY)):
        for name, out in (("o", 4096), ("gate_up", 28672)):  # the later search overrides the earlier one
            case = quantised_product(f"{name} in int4, {rows} rows", rows, out, 4096, 4, "auto")
            yield case, quantized_matmul.quantized_matmul, [{field: sizes} for sizes in choices]
    others = dict(HOPPER.shared)
    for bits in others:
        case = quantised_product(f"gate_up in int{bits}, 256 rows", 256, 28672, 4096, bits, "auto")
        yield case, quantized_matmul.quantized_matmul, [{"shared": others | {bits: sizes}} for sizes in SHARED]


def main() -> None:
    """Try all choices and print the best of each search."""
    parser = argparse.ArgumentParser(prog="python -m bench.autotune", description=__doc__.splitlines()[0])
    parser.add_argument("--compile-only", action="store_true", help="no GPU: compile every choice for an H200")
    args = parser.parse_args()
    kind = "NVIDIA H200" if args.compile_only else jax.devices()[0].device_kind
    blocks = blocks_for(kind)
    for case, kernel, choices in searches():
        print(f"{case.op}: {case.case}", flush=True)
        inputs = jax.eval_shape(partial(inputs_of, case, REAL)) if args.compile_only else inputs_of(case, REAL)
        tried = [replace(case, call=partial(kernel, blocks=replace(blocks, **choice))) for choice in choices]
        programs = compile_all(tried, inputs, args.compile_only)
        times = {}
        for index, (choice, found) in enumerate(zip(choices, programs, strict=True)):
            if isinstance(found, Exception):
                print(f"{'refused':>12}  {choice}: {str(found).splitlines()[0][:100]}")
            else:
                times[index] = 0.0 if args.compile_only else seconds_of(found, *inputs, REAL)
                print(f"{'fits' if args.compile_only else f'{times[index] * 1e6:.1f} µs':>12}  {choice}", flush=True)
        if not times:
            sys.exit("nothing compiles")
        if not args.compile_only:
            blocks = replace(blocks, **choices[min(times, key=times.__getitem__)])
    if not args.compile_only:
        print(f"{kind!r}: {blocks}")


def compile_all(cases: list[Case], inputs: Any, for_h200: bool) -> list[jax.stages.Compiled | Exception]:
    """Return each case's program, compiled in parallel, or the error that prevented it."""

    def compiled(case: Case) -> jax.stages.Compiled | Exception:
        try:
            if for_h200:
                return compile_for("h200", program(case), *jax.tree.map(as_on_gpu, inputs))
            return program(case).lower(*inputs).compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor() as threads:
        return list(threads.map(compiled, cases))


def as_on_gpu(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return a shape with the dtype that it has on GPU, where pools of 16-bit floats are not stored as integers."""
    return jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16) if shape.dtype == jnp.uint16 else shape


if __name__ == "__main__":
    main()
