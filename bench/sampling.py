"""Times of drawing a step's tokens on CPU: `python -m bench.sampling [--vocab N ...] [--rows N ...]`.

Logits f32[R, V] are there; what requests ask for is the same in all rows. The native kernel beside what XLA makes of
sampling/ops.py, which runs with as many threads as the engine leaves it, in turn; medians in ms, dispatch included.
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
from jaxserve.kernels.native import draw as native
from jaxserve.planning.resolve import resolve
from jaxserve.sampling import ops as sampler

SLOTS = 16
ASKED: dict[str, dict[str, float]] = {  # of a row's parameters, by their names in sampler.RowParams
    "greedy": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "top_p and top_k": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "penalised": {"repetition": 1.15},
    "penalised, top_p": {"repetition": 1.15, "temperature": 0.6, "top_p": 0.95},
    "logprobs": {"logprobs": 1},
}
Timed = Callable[[], object]


def parameters(asked: dict[str, float], rows: int, vocab: int) -> np.ndarray:
    """i32[11, R] of rows in the first slots."""
    row = sampler.idle_row(SLOTS, vocab)
    row[sampler.TOP_K] = asked.get("top_k", vocab)
    floats = row[sampler.FLOATS].view(np.float32)
    for place, name in enumerate(sampler.FLOAT_FIELDS):
        floats[place] = asked.get(name, floats[place])
    packed = np.stack([row] * rows, axis=1)
    packed[sampler.SLOT] = np.arange(rows)
    packed[sampler.SEED] = np.random.default_rng(0).integers(1 << 30, size=(2, rows))
    return packed


class Kind:
    """One implementation's executables."""

    def __init__(self, by: sampler.Implementation, top_logprobs: int):
        full = partial(sampler.sample_full, by=by, top_logprobs=top_logprobs)
        self._plain = {False: jax.jit(by.greedy), True: jax.jit(by.random)}
        self._more = {False: jax.jit(by.adjusted, donate_argnums=3), True: jax.jit(full, donate_argnums=3)}

    def timed(self, asked: dict[str, float], logits: Array) -> Timed:
        """What draws the tokens of rows that ask for this."""
        rows, vocab = logits.shape
        least = (logits, parameters(asked, rows, vocab), jnp.zeros(SLOTS + 1, jnp.int32))
        if not {"repetition", "logprobs"} & asked.keys():
            return lambda: self._plain["temperature" in asked](*least)
        history = [sampler.empty_history(SLOTS, vocab)]
        biases = tuple(map(jnp.asarray, sampler.sparse_biases([], rows)))

        def draw() -> Array:
            tokens, _, history[0], *_ = self._more["logprobs" in asked](*least, history[0], *biases)
            return tokens

        return draw


def medians(functions: Sequence[Timed], repeats: int) -> list[float]:
    """Seconds of each, in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repeats + 1):
        for function, measured in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            if turn:  # the first one compiles
                measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in times]


def report(vocabularies: Sequence[int], row_counts: Sequence[int], repeats: int) -> None:
    """Prints both for each case, and the ratio."""
    xla, ours = Kind(sampler.XLA, top_logprobs=20), Kind(sampler.NATIVE, top_logprobs=20)
    for vocab in vocabularies:
        for rows in row_counts:
            logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (rows, vocab)), jnp.float32)
            for name, asked in ASKED.items():
                took, before = medians([kind.timed(asked, logits) for kind in (ours, xla)], repeats)
                times = f"native {1e3 * took:7.3f} XLA {1e3 * before:7.3f} ms, {took / before:4.2f}x"
                print(f"V={vocab:<6} R={rows:<2} {name:17} {times}", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32000, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help=f"at most {SLOTS}")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    resolve(EngineConfig(model=bundled_model_path()))  # XLA has the threads and flags that a server's has
    if not native.supported():
        raise SystemExit("there are no native kernels here")
    report(args.vocab, args.rows, args.repeats)


if __name__ == "__main__":
    main()
