"""Requests that change their instance, or the places of their pages, in the middle of their answers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.build import build
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.loop import StepLoop
from jaxserve.scheduler.partition import SideLimits, partition

OPTIONS = {"load_format": "dummy", "max_num_seqs": 6, "max_num_batched_tokens": 6 + 32, "memory_gb": 8, "kv_pages": 60}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PENALISED = replace(GREEDY, temperature=0.8, seed=3, frequency_penalty=1.5, repetition_penalty=1.3, n=2, logprobs=1)

Move = Callable[[list[StepLoop]], None]


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 499, 33).tolist()
    prompts = [(*shared, *rng.integers(3, 499, 9 * i + 1).tolist()) for i in range(4)]
    return [Request(f"r{i}", prompt, (GREEDY, PENALISED)[i % 2], float(i)) for i, prompt in enumerate(prompts)]


def tokens_with(model: Path, move: Move, every: int, *, dp: int) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each answer, where `move` is called after every so many steps."""
    built = build(EngineConfig(model=model, dp=dp, warmup=False, fuse=False, **OPTIONS))
    loops, found, turn = list(built.instances), {}, 0

    def take(outputs) -> None:
        for output in outputs:
            for answer in output.outputs:
                found.setdefault((output.request_id, answer.index), []).extend(answer.token_ids)

    for i, request in enumerate(requests()):
        loops[i % dp].add(request)
    while not all(loop.idle for loop in loops):
        turn += 1
        for loop in loops:
            take([] if loop.idle else loop.step())
        if turn % every == 0:
            for loop in loops:
                take(loop.drain())
            move(loops)
    assert all(loop.core.scheduler.pages.used == 0 for loop in loops)
    return found


def stay(loops: list[StepLoop]) -> None:
    pass


def swap(loops: list[StepLoop]) -> None:
    """Let two instances exchange all requests, so that they return to a sampler that knew them."""
    states = [loop.core.detach(keep_pages=False) for loop in loops]
    for loop, each in zip(loops, reversed(states), strict=True):
        loop.core.attach(each, None, loop.clock.now())


def order_by_sides(loops: list[StepLoop]) -> None:
    """Move all pages as for a split, and go on with one instance."""
    (loop,) = loops
    core, executor = loop.core, loop.executor
    pool, ids = core.scheduler.pages, core.unfinished
    result = partition(ids, pool, 2, SideLimits(pool.num_pages // 2, 4, core.capacity))
    states = core.detach()
    result.carry_out(pool, ids, lambda moves: executor.shrink_pools(moves, pool.num_pages))
    sides = {request: {page % 2 for s in sequences for page in s.pages} for request, sequences in ids.items()}
    assert all(on <= {result.sides[request]} for request, on in sides.items())
    core.attach(states, lambda page: page, loop.clock.now())


@pytest.mark.parametrize(("move", "dp", "every"), [(swap, 2, 7), (order_by_sides, 1, 3)])
def test_moves_in_the_middle_of_answers_change_no_token(tiny_model: Path, move: Move, dp: int, every: int) -> None:
    assert tokens_with(tiny_model, move, every, dp=dp) == tokens_with(tiny_model, stay, every, dp=dp)
