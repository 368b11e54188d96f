"""Times of drawing a step's tokens on CPU: `python -m bench.sampling [--vocab N ...] [--rows N ...]`.

Draws from logits f32[R, V] with equal parameters in all rows. The native kernel and XLA's program of sampling/ops.py,
which has as many threads as the engine leaves it, take turns. Figures are medians in ms, dispatch included.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve import EngineConfig
from jaxserve.core.bundled import bundled_model_path
from jaxserve.kernels.native import sampling as native
from jaxserve.planning.resolve import resolve
from jaxserve.sampling import ops as sampler

SLOTS = 16
# Parameters of a row, named as in sampler.RowParams.
PARAMETERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "top_p and top_k": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "penalised": {"repetition": 1.15},
    "penalised, top_p": {"repetition": 1.15, "temperature": 0.6, "top_p": 0.95},
    "logprobs": {"logprobs": 1},
}
Timed = Callable[[], object]


def packed_parameters(chosen: dict[str, float], rows: int, vocab: int) -> np.ndarray:
    """Return the packed parameters i32[11, R] of rows in the first slots."""
    row = sampler.idle_row(SLOTS, vocab)
    row[sampler.TOP_K] = chosen.get("top_k", vocab)
    floats = row[sampler.FLOATS].view(np.float32)
    for place, name in enumerate(sampler.FLOAT_FIELDS):
        floats[place] = chosen.get(name, floats[place])
    packed = np.stack([row] * rows, axis=1)
    packed[sampler.SLOT] = np.arange(rows)
    packed[sampler.SEED] = np.random.default_rng(0).integers(1 << 30, size=(2, rows))
    return packed


class Sampler:
    """The executables of one implementation."""

    def __init__(self, implementation: sampler.Implementation, top_logprobs: int):
        full = partial(sampler.sample_full, implementation=implementation, top_logprobs=top_logprobs)
        self._greedy = jax.jit(implementation.greedy)
        self._random, self._masked = jax.jit(implementation.random), jax.jit(implementation.masked)
        self._more = {False: jax.jit(implementation.adjusted, donate_argnums=3), True: jax.jit(full, donate_argnums=3)}

    def timed(self, chosen: dict[str, float], logits: Array) -> Timed:
        """Return a function that draws the tokens of rows with these parameters."""
        rows, vocab = logits.shape
        inputs = (logits, packed_parameters(chosen, rows, vocab), jnp.zeros(SLOTS + 1, jnp.int32))
        if not {"repetition", "logprobs"} & chosen.keys():
            masked = self._masked if {"top_k", "top_p"} & chosen.keys() else self._random
            plain = masked if "temperature" in chosen else self._greedy
            return lambda: plain(*inputs)
        history = [sampler.empty_history(SLOTS, vocab)]
        biases = tuple(map(jnp.asarray, sampler.sparse_biases([], rows)))

        def draw() -> Array:
            tokens, _, history[0], *_ = self._more["logprobs" in chosen](*inputs, history[0], *biases)
            return tokens

        return draw


def medians(functions: Sequence[Timed], repeats: int) -> list[float]:
    """Return the median seconds of each function; the functions take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, measured in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            if turn:  # the first turn compiles
                measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in times]


def report(vocabularies: Sequence[int], row_counts: Sequence[int], repeats: int) -> None:
    """Print both implementations and their ratio for each case."""
    xla, ours = Sampler(sampler.XLA, top_logprobs=20), Sampler(sampler.NATIVE, top_logprobs=20)
    for vocab in vocabularies:
        for rows in row_counts:
            logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (rows, vocab)), jnp.float32)
            for name, chosen in PARAMETERS.items():
                took, before = medians([kind.timed(chosen, logits) for kind in (ours, xla)], repeats)
                times = f"native {1e3 * took:7.3f} XLA {1e3 * before:7.3f} ms, {took / before:4.2f}x"
                print(f"V={vocab:<6} R={rows:<2} {name:17} {times}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32000, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help=f"at most {SLOTS}")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    resolve(EngineConfig(model=bundled_model_path()))  # sets XLA's threads and flags as in a server
    if not native.supported():
        raise SystemExit("native kernels are not supported on this machine")
    report(args.vocab, args.rows, args.repeats)


if __name__ == "__main__":
    main()
