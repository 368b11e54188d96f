"""An LLM leaves nothing behind: no array on the device, no signal handler, no thread."""

import asyncio
import copy
import gc
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.console import progress
from tests.support.internals import executor_of


def resident() -> int:
    """Return the bytes of all arrays that JAX holds."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_closed_llm_frees_every_array(tiny_model: Path) -> None:
    before = resident()
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=4) as llm:
        held = resident() - before
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=5, repetition_penalty=1.1, logprobs=1), use_tqdm=False)
        assert held > executor_of(llm).pools.nbytes
        assert re.fullmatch(r"<LLM '.+', layers: \d+ \w+, context: [\d,]+ tokens, KV pages: [\d,]+>", repr(llm))
    assert repr(llm).endswith(": closed>")
    assert resident() - before < 4096  # constants of a compiled function or two may stay in JAX's caches


def test_llm_left_by_an_error_frees_every_array(tiny_model: Path) -> None:
    before = resident()
    try:
        with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=4):
            raise KeyError
    except KeyError:
        pass
    assert resident() - before < 4096


def test_llm_changes_no_signal_handler_and_leaves_no_thread(tiny_model: Path) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = set(threading.enumerate())
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=4) as llm:
        llm.generate([[3, 4, 5]], use_tqdm=False)
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("warmup", [False, True])
def test_dropped_llm_frees_every_array_and_its_threads(tiny_model: Path, warmup: bool) -> None:
    before, threads = resident(), set(threading.enumerate())
    llm = LLM(tiny_model, load_format="dummy", warmup=warmup, max_model_len=64, max_num_seqs=2)
    llm.generate([[3, 4, 5]], SamplingParams(max_tokens=5), use_tqdm=False)
    started = set(threading.enumerate()) - threads
    assert any("fuse" in thread.name for thread in started) == warmup
    del llm
    assert resident() - before < 4096
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_two_llms_run_side_by_side(tiny_model: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4}
    with LLM(tiny_model, **options) as one:
        with LLM(tiny_model, **options) as two:
            answers = [llm.generate([[3, 4, 5]], greedy, use_tqdm=False)[0].outputs[0].token_ids for llm in (one, two)]
        assert answers[0] == answers[1]
        assert one.generate([[3, 4, 5]], greedy, use_tqdm=False)[0].outputs[0].token_ids == answers[0]


def in_fork(function: Callable[[], object]) -> str:
    """Return what a fork of this process gets from a function: "done" or the error's text, "" if it never ends."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends the fork
        try:
            function()
            answer = "done"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_forked_process_gets_an_error_instead_of_waiting_for_ever(tiny_model: Path) -> None:
    options = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4}
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(tiny_model, **options) as llm:
        expected = llm.generate([[3, 4, 5]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        stream = llm.stream([3, 4, 5], greedy)
        tokens = next(stream).outputs[0].token_ids
        for call in (
            lambda: llm.generate([[3, 4, 5]], use_tqdm=False),
            lambda: llm.embed([[3, 4, 5]], use_tqdm=False),
            lambda: next(llm.stream([3, 4, 5])),
            lambda: next(stream),
        ):
            assert "EngineForked: the engine runs in the process that opened it" in in_fork(call)
        opening = in_fork(lambda: LLM(tiny_model, **options))
        assert opening.startswith("ConfigError: this process is a fork of one that has opened a model"), opening
        assert in_fork(stream.close) == "done"
        assert in_fork(llm.close) == "done"
        assert tokens + sum((piece.outputs[0].token_ids for piece in stream), ()) == expected

    async def stream_in_fork() -> None:
        async for _ in asynchronous.stream([3, 4, 5]):
            pass

    asynchronous = AsyncLLM(tiny_model, **options)
    assert in_fork(lambda: asyncio.run(stream_in_fork())).startswith("EngineForked: the engine runs in the process")
    asyncio.run(stream_in_fork())
    asyncio.run(asynchronous.close())


def test_llm_is_neither_pickled_nor_copied(tiny_model: Path) -> None:
    with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=4) as llm:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="an LLM cannot be pickled or copied: open the model in each process"):
                attempt(llm)
        assert llm.generate([[3, 4, 5]], use_tqdm=False)


def test_start_shows_its_progress_unless_it_is_told_not_to(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    reported: list[str] = []
    written = []
    for choice in ({}, {"progress": False}, {"progress": lambda doing, done, total: reported.append(doing)}):
        with LLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=4, **choice) as llm:
            written.append(capsys.readouterr().err)
            llm.generate([[3, 4, 5]] * 2, SamplingParams(max_tokens=1), use_tqdm=not choice)
            written.append(capsys.readouterr().err)
    assert "reading weights: 1 of " in written[0]
    assert re.fullmatch(r"requests: 1 of 2, \d+ s left\nrequests: done in \d+ s\n", written[1])
    assert written[2:] == ["", "", "", ""]
    assert "reading weights" in reported


def test_start_in_an_event_loop_shows_its_progress(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)

    async def start(**choice: bool) -> str:
        async with AsyncLLM(tiny_model, load_format="dummy", warmup=False, max_num_seqs=4, **choice) as llm:
            assert repr(llm).startswith("<AsyncLLM '")
            return capsys.readouterr().err

    assert "reading weights: 1 of " in asyncio.run(start())
    assert asyncio.run(start(progress=False)) == ""
