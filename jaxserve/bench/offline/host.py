"""Host work per decode step: what Python does between two steps, at a full batch.

The engine's own order is kept: step n+1 is begun and dispatched, then step n's tokens are fetched and taken in. The
model has the layers of a real one and tiny matrices, so that the device's threads hardly compete for the cores.

    begin     core.begin: admission, batching, paging
    pack      the step's inputs as one vector
    dispatch  executor.execute without packing: one call per block, grows with the number of layers
    finish    core.finish: tokens, stops, text, telemetry, outputs

Host work is begin + pack + finish; dispatch is shown beside it. Waiting for the device counts nowhere.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.offline.options import HostOptions, Row
from jaxserve.bench.offline.steps import quantile, scaled
from jaxserve.build import build
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.work import PendingStep, Work
from jaxserve.engine.loop import StepLoop
from jaxserve.executor.batch import pack

PROMPT = 32  # tokens
WARM_STEPS = 20  # decode steps before the measured ones
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def host_work(options: HostOptions) -> Iterator[Row]:
    """One row for each part of a step, and one for the host work as a whole, in microseconds."""
    times = measure(options)
    whole = [sum(parts) for parts in zip(times["begin"], times["pack"], times["finish"], strict=True)]
    for part, seconds in (*times.items(), ("host work = begin + pack + finish", whole)):
        yield {
            "part": part,
            "median_us": scaled(quantile(seconds, 0.5), 1e6, 0),
            "p90_us": scaled(quantile(seconds, 0.9), 1e6, 0),
        }


def measure(options: HostOptions) -> dict[str, list[float]]:
    """Seconds of each part in each measured step."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), options.layers)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_num_seqs=options.batch,
            max_model_len=PROMPT + WARM_STEPS + options.steps + 8,
            memory_gb=2,
            warmup=False,
            fuse=False,
        )
        built = build(config)
    try:
        return _decode(built.instances[0], options.batch, options.steps)
    finally:
        built.close()


def write_tiny_model(folder: Path, layers: int) -> None:
    """The bundled model's configuration with so many layers of tiny matrices, and its tokenizer.

    Raises `CheckpointError` where there is no bundled model.
    """
    bundled = bundled_model_path()
    config = json.loads((bundled / "config.json").read_text())
    config |= TINY | {"num_hidden_layers": layers, "max_position_embeddings": 1 << 16}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(bundled / "tokenizer.json", folder)


def _decode(loop: StepLoop, batch: int, steps: int) -> dict[str, list[float]]:
    core, executor = loop.core, loop.executor
    clock = loop.clock

    def timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        start = clock.now()
        result = call(*args)
        return result, clock.now() - start

    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=WARM_STEPS + steps + 4)
    for number in range(batch):
        prompt = tuple(range(number + 2, number + 2 + PROMPT))
        core.add(Request(f"request-{number}", prompt, params, arrival=clock.now()))
    times: dict[str, list[float]] = {"begin": [], "pack": [], "dispatch": [], "finish": []}
    before: tuple[Work, PendingStep] | None = None
    full = 0  # decode steps at the whole batch so far
    while full < WARM_STEPS + steps:
        work, begin = timed(core.begin, clock.now())
        shape = executor.buckets.of(work)
        _, packing = timed(pack, work, shape, executor.table.rows, executor.page_size)
        pending, execute = timed(executor.execute, work)
        finish = 0.0
        if before is not None:
            done, on_device = before
            output = on_device.fetch()
            _, finish = timed(core.finish, done, output, clock.now())
        before = (work, pending)
        full += len(work.decodes) == batch
        if full > WARM_STEPS:
            for name, seconds in zip(times, (begin, packing, execute - packing, finish), strict=True):
                times[name].append(seconds)
    return times
