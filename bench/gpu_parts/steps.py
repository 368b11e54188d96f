"""Steps of the kind that a load consists of: decodes, chunks of prompts, and both in one step.

In bfloat16, block by block, each is measured for what its rows ask of the sampler; then with fused steps, and with the
layers in fewer bits. The simulator's costs follow from such steps. The executor repeats each step alone; the last ones
are dispatched without waiting, so that the time is the device's, or that of the dispatch where it is longer. Both are
measured, because a step that the host dispatches slower than the device computes costs the host's time while serving.

The library has no public access to the executor: this module uses private attributes of it and of its sampler.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bench.gpu_parts import Row
from bench.gpu_parts.engine import Jaxserve, finish
from bench.gpu_parts.layers import copied_layers
from bench.gpu_parts.sizes import Model, Sizes, Stepping
from bench.gpu_parts.turns import wait_for_turn
from bench.peers.workload import VOCAB
from jaxserve import SamplingParams
from jaxserve.core.request import Request
from jaxserve.core.step_shapes import StepShape
from jaxserve.core.work import StepOutput, Work
from jaxserve.engine.loop import StepLoop
from jaxserve.sampling import ops

FULL = "bfloat16"
GREEDY = (0.0, 1.0)  # temperature and top_p
DRAWN = (GREEDY, (1.0, 1.0), (1.0, 0.9))
REPEATS, ROUNDS = 10, 3


def rows(path: Path, model: Model, sizes: Sizes) -> Iterator[Row]:
    """Yield each kind of step in each precision and tier, after compiling all their programs side by side."""
    stepping, start = sizes.stepping, time.perf_counter()
    with copied_layers():
        engine = Jaxserve(
            path, model, sizes, seqs=stepping.seqs, step_tokens=stepping.most_chunk, max_len=stepping.max_len,
            kv_pages=stepping.kv_pages,
        )  # fmt: skip
    yield {"case": "load", "model": model.name, "seconds": time.perf_counter() - start}
    start = time.perf_counter()
    compile_ahead(engine, stepping)
    yield {"case": "compile", "model": model.name, "seconds": time.perf_counter() - start}
    wait_for_turn()
    compiled = sum(engine.compilations.counts.values())
    for precision in (FULL, *stepping.precisions):
        with layers_in(engine, precision):
            for tier, cases in stepping.cases:
                engine.use(tier)
                for decodes, chunk in cases:
                    labels = {"model": model.name, "precision": precision, "tier": tier}
                    for row in measured(engine, decodes, chunk, stepping, each=(precision, tier) == (FULL, "block")):
                        yield labels | row
    late = sum(engine.compilations.counts.values()) - compiled
    yield {"case": "executables compiled between steps", "model": model.name, "count": late}


def layers_in(engine: Jaxserve, precision: str) -> contextlib.AbstractContextManager:
    """Return a context in which the layers have a precision."""
    return engine.layers_in(precision) if precision != FULL else contextlib.nullcontext()


def compile_ahead(engine: Jaxserve, stepping: Stepping) -> None:
    """Compile what the steps need in all precisions and tiers, in as many threads as the engine has for it."""
    wanted = {tier: [shapes(engine, *case, stepping) for case in cases] for tier, cases in stepping.cases}
    passed = {shape for each in wanted.values() for _, others in each for shape in others}
    executor, fused = engine.executor, engine.fused
    engine.use("block")
    for precision in (FULL, *stepping.precisions):
        with layers_in(engine, precision):
            for shape in sorted(passed, key=lambda shape: shape.tokens):
                executor._ahead.compile_step(executor._stages, shape, executor.pools.segments)
            for shape in dict.fromkeys(shape for shape, _ in wanted.get("fused", ())):
                for key, stage in zip(engine.stage_keys(shape), executor._stages, strict=True):
                    program, arguments = executor._outline(stage, shape)
                    fused.compile(key, program, *arguments)
    executor.settle()
    fused.wait()


def shapes(engine: Jaxserve, decodes: int, chunk: int, stepping: Stepping) -> tuple[StepShape, set[StepShape]]:
    """Return the shape of a step, and those of all steps that lead to it and end it, without executing any."""
    of = engine.executor.buckets.of
    passed: set[StepShape] = set()

    def pretend(loop: StepLoop, work: Work) -> None:
        passed.add(of(work))
        tokens = np.zeros(len(work.decodes) + len(work.chunks), np.int32)
        loop.core.update(work, StepOutput(tokens), loop.clock.now())

    with reached(engine, decodes, chunk, stepping, pretend) as work:
        shape = of(work)
    return shape, passed


def measured(engine: Jaxserve, decodes: int, chunk: int, stepping: Stepping, *, each: bool) -> Iterator[Row]:
    """Yield the seconds of a step and those of its dispatch alone, greedy or for `each` way of drawing tokens."""
    with reached(engine, decodes, chunk, stepping, finish) as work:
        if engine.executor._fused is not None:
            assert all(map(engine.fused.find, engine.stage_keys(engine.executor.buckets.of(work)))), "it is fused"
        engine.executor.execute(work).fetch()  # its new sequences bring their sampling parameters
        for temperature, top_p in DRAWN if each else (GREEDY,):
            ask(engine, temperature, top_p)
            seconds, dispatch = repeated(engine, work)
            drawn = f", temperature {temperature:g}, top_p {top_p:g}" if each else ""
            yield {
                "case": f"step, {decodes} decodes, chunk of {chunk}{drawn}",
                "decodes": len(work.decodes),
                "chunk_tokens": work.num_tokens - len(work.decodes),
                "context": stepping.prompt,
                "temperature": temperature,
                "top_p": top_p,
                "seconds": seconds,
                "dispatch_seconds": dispatch,
            }
        ask(engine, *GREEDY)


@contextlib.contextmanager
def reached(
    engine: Jaxserve, decodes: int, chunk: int, stepping: Stepping, run: Callable[[StepLoop, Work], None]
) -> Iterator[Work]:
    """Yield the step in which `decodes` sequences decode and prompts begin with `chunk` tokens together.

    `run` executes the steps before it, and the step itself at the end.
    """
    loop, prompt = engine.loop, stepping.prompt
    answer = stepping.max_len - prompt
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False)
    ids: list[str] = []

    def add(length: int) -> None:
        ids.append(f"step-{len(ids)}")
        tokens = tuple(engine.rng.integers(2, VOCAB, length).tolist())
        loop.core.add(Request(ids[-1], tokens, params, arrival=loop.clock.now()))

    def scheduled() -> Work:
        return loop.core.schedule(loop.clock.now())

    try:
        for _ in range(decodes):
            add(prompt)
        work = scheduled() if decodes else None
        while work is not None and (work.chunks or len(work.decodes) < decodes):
            run(loop, work)
            work = scheduled()
        for begin in range(0, chunk, prompt):
            add(min(prompt, chunk - begin))
        if chunk:
            if work is not None:
                run(loop, work)
            work = scheduled()
        assert work is not None
        yield work
        run(loop, work)
    finally:
        for request_id in ids:
            loop.core.abort(request_id, now=loop.clock.now())


def ask(engine: Jaxserve, temperature: float, top_p: float) -> None:
    """Let the rows of all sequences that have been sampled be sampled so."""
    sampler = engine.executor.sampler
    floats = sampler._rows[:, ops.FLOATS].copy().view(np.float32)
    floats[:-1, ops.FLOAT_FIELDS.index("temperature")] = temperature
    floats[:-1, ops.FLOAT_FIELDS.index("top_p")] = top_p
    sampler._rows[:, ops.FLOATS] = floats.view(np.int32)
    for slots, wanted in ((sampler._random_slots, temperature > 0), (sampler._masked_slots, top_p < 1)):
        slots.clear()
        slots.update(range(sampler.slots) if wanted else ())


def repeated(engine: Jaxserve, work: Work) -> tuple[float, float]:
    """Return the seconds of a step that is repeated, and of its dispatch: medians of a few rounds after a first one."""
    engine.executor.execute(work).fetch()
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            pending = engine.executor.execute(work)
        dispatched = time.perf_counter() - start
        pending.fetch()
        rounds.append(((time.perf_counter() - start) / REPEATS, dispatched / REPEATS))
    seconds, dispatched = zip(*rounds, strict=True)
    return statistics.median(seconds), statistics.median(dispatched)
