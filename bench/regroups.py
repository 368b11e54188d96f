"""How long a merge and a split keep the requests of a serving engine waiting, at once and layer by layer.

    python -m bench.regroups [--model 160m] [--rounds N] [--streams N] [--tokens N] [--out FILE]

Two instances on virtual devices of the CPU decode all streams, merge, and split again. Measured are the whole change
and the longest gap between two tokens of a stream in it, beside the usual gap; the table has medians. The links here
are the memory of one machine. Needs an otherwise idle machine.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.peers.checkpoints import SHAPES, ensure_checkpoint
from jaxserve import SamplingParams
from jaxserve.bench.environment import describe_environment
from jaxserve.build import BuiltEngine, async_engine, build
from jaxserve.control.regrouping import Regrouping
from jaxserve.core.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt

WAYS = {"at once": lambda *_: False, "layer by layer": lambda *_: True}
SETTLED_S = 0.5  # before each change
SECONDS = 120.0  # for a change
ANSWER = 1500  # tokens, after which a stream begins again


class Streams:
    """Requests that decode without end, and the times of their tokens."""

    def __init__(self, engine: AsyncEngine, count: int, prompt_tokens: int):
        self._engine = engine
        self.times: list[list[float]] = [[] for _ in range(count)]
        self._tasks = [asyncio.create_task(self._ask(number, prompt_tokens)) for number in range(count)]

    async def _ask(self, number: int, prompt_tokens: int) -> None:
        prompt = TokensPrompt(tuple(5 + (number + index) % 400 for index in range(prompt_tokens)))
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        while True:
            async for _ in self._engine.generate(prompt, params):
                self.times[number].append(time.perf_counter())

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the gaps (s) between tokens of a stream, of those that overlap an interval."""
        return [
            after - before
            for times in self.times
            for before, after in pairwise(times)
            if before < end and after > begin
        ]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


async def changed(built: BuiltEngine, streams: Streams, change: Callable[[], object], count: int) -> tuple[float, ...]:
    """Make a change, after which there are `count` instances. Return its seconds, the longest gap, and a usual one."""
    await asyncio.sleep(SETTLED_S)
    begin = time.perf_counter()
    usual = statistics.median(streams.gaps(begin - SETTLED_S, begin))
    change()
    while (left := SECONDS - (time.perf_counter() - begin)) > 0:
        await asyncio.sleep(0.005)
        if len(built.in_force.plan.instances) == count and not built.control.status()["busy"]:
            break
    assert left > 0, built.control.status()["note"]
    end = time.perf_counter()
    await asyncio.sleep(SETTLED_S)
    return end - begin, max(streams.gaps(begin, end)), usual


async def measured(built: BuiltEngine, rounds: int, count: int, prompt_tokens: int) -> list[str]:
    """Return the rows of the table."""
    engine, found = async_engine(built), {}
    await asyncio.to_thread(built.warm.wait)
    compiled = dict(built.compilations.counts)
    streams = Streams(engine, count, prompt_tokens)
    names = lambda: [instance.name for instance in built.in_force.plan.instances]  # noqa: E731
    for number in range(rounds + 1):
        for way, gradual in WAYS.items():
            Regrouping.gradual = gradual
            for what, left in (("merge", 1), ("split", 2)):
                figures = await changed(built, streams, lambda w=what: built.control.edit_plan(w, names()), left)
                if number:  # the first time does what is done once
                    found.setdefault((what, way), []).append(figures)
    streams.stop()
    assert built.compilations.counts == compiled, "programs were compiled"
    await engine.shutdown()
    rows = []
    for (what, way), each in sorted(found.items()):
        seconds, gap, usual = (1e3 * statistics.median(values) for values in zip(*each, strict=True))
        rows.append(f"| {what} | {way} | {seconds:.0f} | {gap:.1f} | {usual:.1f} | {gap / usual:.1f} |")
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="160m", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    config = EngineConfig(
        model=ensure_checkpoint(options.model, Path.home() / ".cache" / "jaxserve" / "bench"),
        dp=2,
        max_tp=2,
        virtual_devices=2,
        memory_gb=6,
        max_num_seqs=options.streams,
        max_num_batched_tokens=options.streams + 64,
        max_model_len=2048,
        policy="manual",
        variants=("bfloat16",),
    )
    built = build(config, controlled=True)
    rows = asyncio.run(measured(built, options.rounds, options.streams, options.tokens))
    head = ["| change | way | ms in all | longest gap, ms | usual gap, ms | in usual gaps |"]
    lines = [f"# Merges and splits of {options.model}, two virtual devices", "", json.dumps(describe_environment()), ""]
    text = "\n".join([*lines, *head, "| --- | --- | ---: | ---: | ---: | ---: |", *rows]) + "\n"
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
