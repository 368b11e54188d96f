"""Interrupts and threads: exceptions at any instruction of a call, and calls of other threads, harm no LLM."""

import asyncio
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, EngineFailed, EngineStopped, RequestError, SamplingParams
from jaxserve.engine.prompts import as_prompt, as_prompts
from tests.support.internals import assert_no_request_left, call_thread_of, instances_of, requests_in

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 36, "warmup": False}
OPTIONS |= {"max_model_len": 256, "kv_pages": 60}
PATIENCE = 60  # seconds


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(3, 499, length).tolist()


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


class Interrupts:
    """A handler that raises KeyboardInterrupt in the main thread while a function runs.

    It does so up to `most` times in a row.
    """

    def __init__(self) -> None:
        self.left = 0
        self.raised = 0

    def during(self, function: Callable[[], object], delay: float, most: int) -> None:
        try:
            try:
                self.left = most
                signal.setitimer(signal.ITIMER_REAL, delay, delay / 4)
                function()
            finally:  # more of them may come in here
                self.left = 0
        except KeyboardInterrupt:
            pass
        self.left = 0

    def __call__(self, *_: object) -> None:
        if self.left:
            self.left -= 1
            self.raised += 1
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    before, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook

    def ignore_interrupts(unraisable: Any) -> None:
        """Report all errors of the garbage collector but interrupts, because a second one would break pytest's hook."""
        if unraisable.exc_type is not KeyboardInterrupt:
            hook(unraisable)

    sys.unraisablehook = ignore_interrupts
    try:
        yield handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def test_interrupts_at_random_moments_leave_the_engine_unchanged(llm: LLM) -> None:
    prompts = [prompt(seed) for seed in range(3)]
    demanding = SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.2, logprobs=1, n=2)
    calls = [
        lambda: tokens(llm, prompts),
        lambda: tokens(llm, prompts, demanding),
        lambda: list(llm.stream(prompts[0], GREEDY)),
        lambda: llm.embed(prompts, use_tqdm=False),
    ]
    before = tokens(llm, prompts)
    rng = random.Random(1)
    with interrupts() as handler:
        for number in range(400):
            handler.during(calls[number % 4], rng.uniform(1e-4, 8e-3), most=1 + number % 3)
        assert handler.raised > 300
    gc.collect()
    assert tokens(llm, prompts) == before
    assert_no_request_left(llm)


def test_ctrl_c_ends_a_call_and_its_requests(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    stream = llm.stream(prompt(1), endless)
    with interrupts() as handler:
        for _ in range(3):
            next(stream)
        handler.during(lambda: tokens(llm, [prompt(2)] * 4, endless), 0.01, most=1)
        assert handler.raised == 1
        assert next(stream).outputs[0].token_ids
        stream.close()
        assert_no_request_left(llm)


def test_dropped_call_ends_its_requests(llm: LLM) -> None:
    call = call_thread_of(llm).call([(each, GREEDY) for each in as_prompts([prompt(4), prompt(5)])], stream=True)
    next(call)
    del call
    tokens(llm, [prompt(3)])  # the thread has seen it
    assert_no_request_left(llm)


def test_stream_computes_only_the_pieces_that_are_read(llm: LLM) -> None:
    (steps,) = instances_of(llm)
    with closing(llm.stream(prompt(1), SamplingParams(max_tokens=200, ignore_eos=True))) as stream:
        for _ in range(3):
            next(stream)
        assert steps.core.snapshot.generated_tokens
        (state,) = requests_in(steps.core).values()
        assert len(state.sequences[0].tokens) - 20 <= 4
    assert_no_request_left(llm)


def test_calls_from_several_threads_get_their_own_answers(llm: LLM) -> None:
    prompts = [prompt(seed, 5 + 3 * seed) for seed in range(12)]
    expected = [tokens(llm, [each])[0] for each in prompts]

    def generate(number: int) -> tuple[int, ...]:
        return tokens(llm, [prompts[number]])[0]

    def stream(number: int) -> tuple[int, ...]:
        return sum((piece.outputs[0].token_ids for piece in llm.stream(prompts[number], GREEDY)), ())

    with ThreadPoolExecutor(8) as pool:
        asked = [(function, number) for number in range(12) for function in (generate, stream, generate)]
        answers = [pool.submit(*each) for each in asked]
        embedding = pool.submit(llm.embed, prompts[0], use_tqdm=False)
        assert [answer.result(PATIENCE) for answer in answers] == [expected[number] for _, number in asked]
        assert np.linalg.norm(embedding.result(PATIENCE)[0]) == pytest.approx(1, abs=1e-5)
    assert_no_request_left(llm)


def test_refused_request_of_one_thread_does_not_affect_the_others(llm: LLM) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = [pool.submit(tokens, llm, [prompt(seed)]) for seed in range(4)]
        bad = pool.submit(tokens, llm, [prompt(1), [500]])
        with pytest.raises(RequestError, match="500"):
            bad.result(PATIENCE)
        assert all(len(answer.result(PATIENCE)[0]) == 12 for answer in good)
    assert_no_request_left(llm)


def test_calls_from_an_event_loops_executor_are_answered(llm: LLM) -> None:
    async def main() -> list[list[tuple[int, ...]]]:
        return await asyncio.gather(*(asyncio.to_thread(tokens, llm, [prompt(seed)]) for seed in range(6)))

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == [tokens(llm, [prompt(seed)]) for seed in range(6)]


def test_prompts_beyond_the_queues_token_limit_wait_their_turn(tiny_model: Path) -> None:
    with LLM(tiny_model, **OPTIONS, max_queued_tokens=50) as llm:
        assert len(tokens(llm, [prompt(seed) for seed in range(12)])) == 12


def test_close_ends_the_calls_of_other_threads(tiny_model: Path) -> None:
    threads = set(threading.enumerate())
    llm = LLM(tiny_model, **OPTIONS)
    started = threading.Event()

    def stream() -> None:
        for _ in llm.stream(prompt(1), SamplingParams(max_tokens=200, ignore_eos=True)):
            started.set()

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream)
        assert started.wait(PATIENCE)
        llm.close()
        with pytest.raises(EngineStopped):
            running.result(PATIENCE)
    llm.close()
    assert set(threading.enumerate()) <= threads
    with pytest.raises(EngineStopped):  # also in a call that had found it open
        next(call_thread_of(llm).call([(as_prompt(prompt(1)), GREEDY)]))


def test_failed_step_is_reported_by_every_later_call(tiny_model: Path) -> None:
    with LLM(tiny_model, **OPTIONS) as llm:
        (steps,) = instances_of(llm)
        execute, steps.executor.execute = steps.executor.execute, lambda work: [][work.step]
        with pytest.raises(EngineFailed, match=r"opened again: IndexError: list index") as caught:
            tokens(llm, [prompt(1)])
        assert isinstance(caught.value.__cause__, IndexError)
        steps.executor.execute = execute
        with pytest.raises(EngineFailed, match="opened again"):
            next(llm.stream(prompt(1), GREEDY))
