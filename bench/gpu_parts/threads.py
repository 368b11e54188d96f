"""How many instances one host drives: step loops in threads of one process, all on one device.

Each instance is a small model whose step takes a few milliseconds of the device when several run. The steps of all
threads together should stay as many as one thread's until the device is busy all the time.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_parts import Row
from bench.gpu_parts.engine import finish
from bench.gpu_parts.sizes import Model, Sizes, Threading
from bench.gpu_parts.turns import wait_for_turn
from bench.peers.workload import VOCAB
from jaxserve import LLM, SamplingParams
from jaxserve.core.request import Request
from jaxserve.engine.loop import StepLoop

PROMPT = 64  # tokens
PAGE = 16


def rows(path: Path, model: Model, sizes: Sizes) -> Iterator[Row]:
    """Yield the steps per second of one thread, then of several."""
    threads = sizes.threading
    made = [_loaded(path, model, threads) for _ in range(threads.counts[-1])]
    wait_for_turn()
    loops = [_decoding(llm, number, threads) for number, llm in enumerate(made)]
    for count in threads.counts:
        steps = _steps(loops[:count], threads.seconds)
        yield {
            "case": f"threads, {count} instances",
            "model": model.name,
            "sequences": threads.seqs,
            "steps_s": [round(each / threads.seconds, 1) for each in steps],
            "total_steps_s": sum(steps) / threads.seconds,
        }


def _loaded(path: Path, model: Model, threads: Threading) -> LLM:
    return LLM(
        path,
        load_format="auto" if model.written else "dummy",
        dtype="bfloat16",
        max_model_len=threads.max_len,
        max_num_seqs=threads.seqs,
        max_num_batched_tokens=threads.seqs + threads.seqs * PROMPT,
        page_size=PAGE,
        kv_pages=threads.seqs * -(-threads.max_len // PAGE),
        prefix_caching=False,
    )


def _decoding(llm: LLM, number: int, threads: Threading) -> StepLoop:
    """Return the loop of an engine in which all sequences decode."""
    (loop,) = llm._engine.loops.values()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=threads.max_len - PROMPT, detokenize=False)
    for index in range(threads.seqs):
        prompt = tuple((number * 7919 + index * 104729 + n) % VOCAB for n in range(2, PROMPT + 2))
        loop.core.add(Request(f"{number}-{index}", prompt, params, arrival=loop.clock.now()))
    work = loop.core.schedule(loop.clock.now())
    while work.chunks or len(work.decodes) < threads.seqs:
        finish(loop, work)
        work = loop.core.schedule(loop.clock.now())
    finish(loop, work)
    return loop


def _steps(loops: list[StepLoop], seconds: float) -> list[int]:
    """Return how many steps each loop makes in its own thread."""
    steps, over = [0] * len(loops), threading.Event()

    def run(index: int) -> None:
        while not over.is_set():
            loops[index].step()
            steps[index] += 1
        loops[index].drain()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(loops))]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return steps
