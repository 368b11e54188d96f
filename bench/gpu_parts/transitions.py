"""Changes of the plan while a model serves: layers to fewer bits and back, KV pools that grow and shrink.

Streams decode all the while. Every change is measured from the step log: how long it took, what steps took before and
meanwhile, and how many programs were compiled. Then the streams end, and one greedy answer is compared with that of an
engine that was started with these precisions and never changed.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from bench.gpu_parts.sizes import Model, Sizes
from bench.morph_parts.steady import found_in
from jaxserve import SamplingParams
from jaxserve.build import BuiltEngine, async_engine, build
from jaxserve.control.plan import Plan
from jaxserve.control.plan_yaml import from_yaml, to_yaml
from jaxserve.core.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.step_log import read_log

PROMPT, CHECKED = 64, 48  # tokens of a prompt, and of the answer that is compared
SETTLE_S, LOOK_S = 0.6, 0.02
PATIENCE_S = 60.0
PRECISIONS = ("int8", "int4")


def rows(path: Path, model: Model, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield the start, a row per change, the memory per plan, and the comparison with engines that never changed."""
    changing = sizes.changing
    config = EngineConfig(
        model=path,
        load_format="auto" if model.written else "dummy",
        dtype="bfloat16",
        variants=PRECISIONS,
        policy="manual",
        max_model_len=changing.max_len,
        max_num_seqs=changing.streams,
        max_num_batched_tokens=changing.streams + changing.prefill,
        kv_pages=changing.kv_pages,
        max_kv_pages=changing.max_kv_pages,
        prefix_caching=False,
        fuse=changing.fuse,
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.log"
        start = time.perf_counter()
        phases: list[tuple[str, float]] = []

        def progress(phase: str, done: int, total: int) -> None:
            if not phases or phases[-1][0] != phase:
                phases.append((phase, time.perf_counter() - start))

        built = build(replace(config, step_log=log), controlled=True, progress=progress)
        seconds = time.perf_counter() - start
        yield {"case": "start", "model": model.name, "seconds": seconds, "phases": [list(phase) for phase in phases]}
        found = asyncio.run(_changed(built, changing.layers, changing.rounds))
        yield from found["memory"]
        for change in found_in(read_log(log)):
            yield {"case": "change", "model": model.name} | vars(change) | {"ratio": change.ratio}
        yield {"case": "served", "model": model.name} | found["served"]
    answers = found["answers"]
    for name, precisions in (("at the start", None), ("mixed", _mixed_option(changing.layers[-1]))):
        built = build(replace(config, variants=(), policy="static", layer_precision=precisions, warmup=False))
        expected = asyncio.run(_one_answer(built))
        yield {"case": "tokens", "model": model.name, "plan": name, "equal": answers[name] == expected}
    restored = answers["restored"] == answers["at the start"]
    yield {"case": "tokens", "model": model.name, "plan": "restored", "equal": restored}


def _mixed_option(count: int) -> str:
    """Return the precisions of `_mixed` in the form of the option `layer_precision`."""
    half = max(1, count // 2)
    return f"0-{half - 1}:int8" + (f",{half}-{count - 1}:int4" if count > half else "")


def _mixed(plan: Plan, count: int) -> Plan:
    """Return the plan with the first half of `count` layers in int8 and the second in int4."""
    half = max(1, count // 2)
    return plan.with_precisions("0", {f"layers.{n}": "int8" if n < half else "int4" for n in range(count)})


def _all_in(plan: Plan, count: int, precision: str) -> Plan:
    return plan.with_precisions("0", {f"layers.{n}": precision for n in range(count)})


@asynccontextmanager
async def _serving(built: BuiltEngine) -> AsyncIterator[AsyncEngine]:
    engine = async_engine(built)
    try:
        yield engine
    finally:
        await engine.shutdown()


async def _one_answer(built: BuiltEngine) -> list[int]:
    async with _serving(built) as engine:
        return await _answer(engine, 7, CHECKED)


async def _answer(engine: AsyncEngine, number: int, tokens: int) -> list[int]:
    """Return the greedy tokens for a prompt that differs for each `number`."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    prompt = TokensPrompt(tuple(range(300 + number * PROMPT, 300 + (number + 1) * PROMPT)))
    found: list[int] = []
    async for output in engine.generate(prompt, params):
        found += output.outputs[0].token_ids
    return found


async def _changed(built: BuiltEngine, counts: Sequence[int], times: int) -> dict[str, Any]:
    """Change layers and pools while streams decode, then answer one prompt in each of three plans."""
    memory: list[dict[str, Any]] = []
    answers: dict[str, list[int]] = {}
    async with _serving(built) as engine:
        assert built.control is not None
        full = from_yaml(built.control.plan_yaml())
        largest = counts[-1]

        async def go(plan: Plan, name: str) -> None:
            await _reach(built, plan)
            memory.append({"case": "memory", "plan": name} | _memory(built))

        answers["at the start"] = await _answer(engine, 7, CHECKED)
        memory.append({"case": "memory", "plan": "start"} | _memory(built))
        compiled = dict(built.compilations.counts)
        stop, lengths = asyncio.Event(), list[int]()
        length = built.info.max_model_len - PROMPT
        streams = [asyncio.create_task(_stream(engine, n, length, stop, lengths)) for n in range(_slots(built))]
        await asyncio.sleep(1.0)
        begun = time.perf_counter()
        for _ in range(times):
            for count in counts:
                for precision in PRECISIONS:
                    await go(_all_in(full, count, precision), f"{count} layers {precision}")
                if count == largest:
                    small = _all_in(full, count, PRECISIONS[-1])
                    pages = built.resolved.resources(1.0).kv_capacity(small.instances[0])
                    await go(small.with_kv_pages("0", pages), f"{count} layers {PRECISIONS[-1]}, {pages} pages")
                    await go(small, "pages as at the start")
                await go(full, "full")
        seconds = time.perf_counter() - begun
        stop.set()
        await asyncio.gather(*streams)
        await go(_mixed(full, largest), "mixed")
        answers["mixed"] = await _answer(engine, 7, CHECKED)
        await go(full, "full")
        answers["restored"] = await _answer(engine, 7, CHECKED)
        now = dict(built.compilations.counts)
    served = {
        "seconds": seconds,
        "streams": len(streams),
        "answers": len(lengths),
        "complete": all(found == length for found in lengths),
        "compiled": {str(name): count - compiled.get(name, 0) for name, count in now.items()},
    }
    return {"memory": memory, "answers": answers, "served": served}


def _slots(built: BuiltEngine) -> int:
    return built.resolved.buckets.max_num_seqs


async def _stream(engine: AsyncEngine, number: int, tokens: int, stop: asyncio.Event, lengths: list[int]) -> None:
    """Request one answer after another until `stop`, and wait for the last one."""
    while not stop.is_set():
        lengths.append(len(await _answer(engine, 100 + number, tokens)))


async def _reach(built: BuiltEngine, plan: Plan) -> None:
    """Give the control plane a plan and wait until it is in force. Raise `TimeoutError`."""
    await asyncio.sleep(SETTLE_S)
    assert built.control is not None
    built.control.set_plan(to_yaml(plan))
    deadline = time.monotonic() + PATIENCE_S
    while from_yaml(built.control.plan_yaml()).instances != plan.instances or built.control.status()["busy"]:
        if time.monotonic() > deadline:
            raise TimeoutError(json.dumps(built.control.decisions(3), default=str))
        await asyncio.sleep(LOOK_S)


def _memory(built: BuiltEngine) -> dict[str, Any]:
    """Return the bytes in use that the device reports, and the bytes of the ledger."""
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "in_use": stats.get("bytes_in_use"),
        "peak": stats.get("peak_bytes_in_use"),
        "ledger": dict(built.resolved.ledger.entries),
        "budget": built.resolved.ledger.budget,
    }
