"""One burst with the KV pages of before and of after a drop of layers, to compare with its simulation.

An instance that shares its layers with another one keeps half of them, and the memory of the other half becomes KV
pages. What this is worth in a burst is the gain that the simulator promises of dropped layers. Both engines run on one
device, one after the other. `python -m bench.gpu_parts.bursts trace.csv [--tiny]` writes the arrivals for `jaxserve sim
--trace`.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.gpu_parts import Row
from bench.gpu_parts.sizes import REAL, TINY, Bursting, Model, Sizes
from bench.gpu_parts.turns import wait_for_turn
from bench.peers.workload import VOCAB

PERCENTILES = (50, 95, 99)
SEED = 5
PAGE = 16  # tokens
WARM_UP_GAP = 0.15  # s between the requests before the burst, which use programs for the first time


def arrivals(bursting: Bursting) -> NDArray[np.float64]:
    """Return seconds, prompt tokens and answer tokens [n, 3]: a light load, an overload, and the light load again.

    Lengths are log-normal with the means of BurstGPT.
    """
    rng, times, begin = np.random.default_rng(SEED), [], 0.0
    for seconds, rate in bursting.phases:
        times.append(np.sort(rng.uniform(begin, begin + seconds, rng.poisson(rate * seconds))))
        begin += seconds
    count = sum(map(len, times))
    prompt, answer = (
        np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).astype(int), 8, longest)
        for mean, sigma, longest in bursting.lengths
    )
    return np.stack([np.concatenate(times), prompt, answer], axis=1)


def rows(path: Path, model: Model, sizes: Sizes) -> Iterator[Row]:
    """Yield the latencies of the burst for each number of pages, and what was compiled meanwhile."""
    from bench.gpu_parts.layers import copied_layers
    from jaxserve.build import build
    from jaxserve.core.config import EngineConfig

    bursting = sizes.bursting

    def config(pages: int) -> EngineConfig:
        return EngineConfig(
            model=path,
            load_format="auto" if model.written else "dummy",
            dtype="bfloat16",
            max_model_len=bursting.max_len,
            max_num_seqs=bursting.seqs,
            max_num_batched_tokens=bursting.seqs + bursting.prefill,
            page_size=PAGE,
            kv_pages=pages,
            prefix_caching=False,
        )

    start = time.perf_counter()
    with copied_layers():
        engines = [build(config(pages)) for pages in bursting.kv_pages]
    yield {"case": "start", "model": model.name, "engines": len(engines), "seconds": time.perf_counter() - start}
    wait_for_turn()
    for built, pages in zip(engines, bursting.kv_pages, strict=True):
        before = sum(built.compilations.counts.values())
        row = asyncio.run(_served(built, arrivals(bursting)))
        compiled = sum(built.compilations.counts.values()) - before
        yield {"case": f"burst, {pages} pages", "model": model.name, "kv_pages": pages, **row, "compiled": compiled}


async def _served(built, requests: NDArray[np.float64]) -> Row:
    """Return the latencies of requests that arrive at their times."""
    from jaxserve.build import async_engine

    engine = async_engine(built)
    try:
        warm = requests[:20].copy()
        warm[:, 0] = WARM_UP_GAP * np.arange(len(warm))
        await _all(engine, warm)
        found = await _all(engine, requests)
        preempted = engine.snapshot().preemptions
    finally:
        await engine.shutdown()
    ttft, tpot, late, complete = (np.array(column) for column in zip(*found, strict=True))
    figures = {
        f"{name}_p{percent}": float(np.percentile(values, percent))
        for name, values in (("ttft", ttft), ("tpot", tpot))
        for percent in PERCENTILES
    }
    return {
        "requests": len(found),
        "complete": bool(complete.all()),
        **figures,
        "preempted": preempted,
        "latest_start": float(late.max()),
    }


async def _all(engine, requests: NDArray[np.float64]) -> list[tuple[float, float, float, bool]]:
    """Return TTFT, time per further token and delay of the start (s), and whether the answer is complete."""
    began = time.perf_counter()
    return await asyncio.gather(
        *(_one(engine, number, began + when, int(prompt), int(answer)) for number, (when, prompt, answer) in
          enumerate(requests))
    )  # fmt: skip


async def _one(engine, number: int, due: float, prompt: int, answer: int) -> tuple[float, float, float, bool]:
    from jaxserve import SamplingParams
    from jaxserve.engine.client import TokensPrompt

    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    late, first, count = time.perf_counter() - due, 0.0, 0
    tokens = tuple(np.random.default_rng([number, prompt]).integers(2, VOCAB, prompt).tolist())
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False)
    async for output in engine.generate(TokensPrompt(tokens), params):
        count += len(output.outputs[0].token_ids)
        first = first or time.perf_counter()
    end = time.perf_counter()
    return first - due, (end - first) / max(count - 1, 1), late, count == answer


def main() -> None:
    """Write the arrivals as a trace."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    lines = ["arrival_s,input_tokens,output_tokens"]
    for when, prompt, answer in arrivals((TINY if args.tiny else REAL).bursting):
        lines.append(f"{when:.4f},{prompt:.0f},{answer:.0f}")
    args.file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
