"""jaxserve on one model: through its library as a user calls it, and through the executor alone.

The executor alone is given the same step again and again and waited for once: the device's own time, or that of the
dispatch where this is longer. Everything is measured without the fused tier first, then with it, as time allows: to
fuse a step's shape can take a minute.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from bench.gpu_parts import costs, measure
from bench.gpu_parts.sizes import Model, Sizes
from bench.peers.workload import VOCAB, Prompts
from jaxserve import LLM, SamplingParams
from jaxserve.core.request import Request
from jaxserve.core.work import Work
from jaxserve.engine.loop import StepLoop
from jaxserve.executor.compilation import FUSED_TIER, CompileCounter
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.fused import PATIENCE, FusedTier

REPEATS = 50  # of a step; more than the fused tier's patience


class Jaxserve:
    """A loaded model whose fused tier can be switched on."""

    def __init__(self, path: Path, model: Model, sizes: Sizes):
        self.llm = LLM(
            path,
            load_format="auto" if model.written else "dummy",
            dtype="bfloat16",
            max_model_len=sizes.max_len,
            max_num_seqs=max(model.batches),
            max_num_batched_tokens=sizes.step_tokens + max(model.batches),
            warmup=False,  # only the shapes that are measured
            fuse=False,
        )
        self.rng = np.random.default_rng(1)  # of prompts: all are fresh, so that the prefix cache cannot help
        self.compilations = CompileCounter()
        (self.loop,) = self.llm._engine.instances
        assert isinstance(self.loop.executor, BlockExecutor)
        self.executor = self.loop.executor

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def settle(self) -> bool:
        before = self.compilations.counts[FUSED_TIER]
        self.llm.settle()
        return self.compilations.counts[FUSED_TIER] > before

    def fuse(self) -> None:
        """Mutates: from now on shapes that are used often are fused, as is the default on GPU."""
        self.executor.fuse(FusedTier(self.compilations))


def rows(path: Path, model: Model, sizes: Sizes) -> Iterator[dict]:
    """Loading, then every case without the fused tier, then with it."""
    start = time.perf_counter()
    engine = Jaxserve(path, model, sizes)
    yield {"case": "load", "model": model.name, "seconds": time.perf_counter() - start}
    assert REPEATS > PATIENCE
    for tier in ("block", "fused"):
        if tier == "fused":
            engine.fuse()
        yield from executor_rows(engine, model, sizes, {"model": model.name, "through": "executor", "tier": tier})
        labels = {"model": model.name, "through": "LLM", "tier": tier}
        yield from measure.rows(engine, model, sizes, engine.rng, labels)
    for tier, count in engine.compilations.counts.items():
        yield {"case": f"executables compiled, {tier} tier", "model": model.name, "count": count}
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak:
        yield {"case": "peak memory", "model": model.name, "gigabytes": peak / 1e9}


def executor_rows(engine: Jaxserve, model: Model, sizes: Sizes, labels: dict[str, str]) -> Iterator[dict]:
    """A decode step at each batch, and the largest step of prefill."""
    context = sizes.decode_prompt + 1
    for batch in model.batches:
        seconds, _ = repeated_step(engine, batch, sizes.decode_prompt, sizes.max_len, decode=True)
        cost = costs.decode(model, batch, context).fields
        yield {"case": f"decode, batch {batch}", **labels, "seconds": seconds, "tok_s": batch / seconds, **cost}
    count, length = max(sizes.prefills)
    seconds, tokens = repeated_step(engine, count, length, sizes.max_len, decode=False)
    whole = tokens // length  # sequences that the step takes as a whole
    cost = costs.prefill(model, max(whole, 1), min(tokens, length)).fields
    yield {"case": f"prefill step, {tokens} tokens", **labels, "seconds": seconds, "tok_s": tokens / seconds, **cost}


def repeated_step(engine: Jaxserve, batch: int, length: int, max_len: int, *, decode: bool) -> tuple[float, int]:
    """Seconds of the first step that does nothing but prefill, or decode the whole batch, and its tokens."""
    loop = engine.loop
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_len - length, detokenize=False)
    ids = [f"step-{number}" for number in range(batch)]
    for request_id in ids:
        prompt = tuple(engine.rng.integers(2, VOCAB, length).tolist())
        loop.core.add(Request(request_id, prompt, params, arrival=loop.clock.now()))
    try:
        work = loop.core.begin(loop.clock.now())
        while decode and (work.chunks or len(work.decodes) < batch):
            finish(loop, work)
            work = loop.core.begin(loop.clock.now())
        seconds = repeated(engine, work)
        finish(loop, work)
    finally:
        for request_id in ids:
            loop.core.abort(request_id, now=loop.clock.now())
    return seconds, work.num_tokens


def repeated(engine: Jaxserve, work: Work) -> float:
    """Seconds of one of many executions of the same step; it writes the same values to the same places each time."""
    for _ in range(REPEATS):
        pending = engine.executor.execute(work)
    pending.fetch()
    engine.settle()
    engine.executor.execute(work).fetch()
    start = time.perf_counter()
    for _ in range(REPEATS):
        pending = engine.executor.execute(work)
    pending.fetch()
    return (time.perf_counter() - start) / REPEATS


def finish(loop: StepLoop, work: Work) -> None:
    """Executes a step and takes its tokens in. Mutates."""
    loop.core.finish(work, loop.executor.execute(work).fetch(), loop.clock.now())
