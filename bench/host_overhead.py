"""Host work per decode step: what Python does between two steps, at a full batch.

The engine's own order is kept: step n+1 is begun and dispatched, then step n's tokens are fetched and taken in. The
model has the layers of a real one and tiny matrices, so that the device's threads hardly compete for the cores.

    begin     core.begin: admission, batching, paging
    pack      the step's inputs as one vector
    dispatch  executor.execute without packing: one call per block, grows with the number of layers
    finish    core.finish: tokens, stops, text, telemetry, outputs

Host work is begin + pack + finish; dispatch is shown beside it. Waiting for the device counts nowhere.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.checkpoints import Shape, hf_config, write_tokenizer
from jaxserve import EngineConfig, SamplingParams
from jaxserve.bench.environment import describe
from jaxserve.core.request import Request
from jaxserve.core.work import PendingStep, Work
from jaxserve.engine.loop import StepLoop
from jaxserve.executor.batch import pack
from jaxserve.factory import build

PROMPT = 32  # tokens
WARM_STEPS = 20  # decode steps before the measured ones


def main() -> None:
    """Prints the medians in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    times = measure(args.batch, args.layers, args.steps)
    work = [sum(parts) for parts in zip(times["begin"], times["pack"], times["finish"], strict=True)]
    print(f"batch {args.batch}, {args.layers} layers, {args.steps} decode steps, microseconds")
    for name, values in (*times.items(), ("host work = begin + pack + finish", work)):
        ordered = sorted(values)
        tenth = ordered[len(ordered) * 9 // 10]
        print(f"  {name:34} median {statistics.median(values) * 1e6:7.0f}   p90 {tenth * 1e6:7.0f}")
    for key, value in describe().items():
        print(f"- {key}: {value}")


def measure(batch: int, layers: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each part in each measured step."""
    length = PROMPT + WARM_STEPS + steps + 8
    with tempfile.TemporaryDirectory() as folder:
        config = hf_config(Shape(hidden=64, layers=layers, heads=4, kv_heads=2, intermediate=128))
        (Path(folder) / "config.json").write_text(json.dumps(config))
        write_tokenizer(Path(folder))
        built = build(
            EngineConfig(
                model=folder, load_format="dummy", max_num_seqs=batch, max_model_len=length, memory_gb=2, warmup=False
            )
        )
    try:
        return _decode(built.instances[0], batch, steps)
    finally:
        built.close()


def _decode(loop: StepLoop, batch: int, steps: int) -> dict[str, list[float]]:
    core, executor = loop.core, loop.executor
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=WARM_STEPS + steps + 4)
    for number in range(batch):
        prompt = tuple(range(number + 2, number + 2 + PROMPT))
        core.add(Request(f"request-{number}", prompt, params, arrival=loop.clock.now()))
    times: dict[str, list[float]] = {"begin": [], "pack": [], "dispatch": [], "finish": []}
    before: tuple[Work, PendingStep] | None = None
    full = 0  # decode steps at the whole batch so far
    while full < WARM_STEPS + steps:
        work, begin = _timed(core.begin, loop.clock.now())
        shape = executor.buckets.of(work)
        _, packing = _timed(pack, work, shape, executor.table.rows, executor.page_size)
        pending, execute = _timed(executor.execute, work)
        finish = 0.0
        if before is not None:
            done, on_device = before
            output = on_device.fetch()
            _, finish = _timed(core.finish, done, output, loop.clock.now())
        before = (work, pending)
        full += len(work.decodes) == batch
        if full > WARM_STEPS:
            for name, seconds in zip(times, (begin, packing, execute - packing, finish), strict=True):
                times[name].append(seconds)
    return times


def _timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call(*args)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
