"""An instance of several stages computes several steps at once, and gives the answers of an instance of one stage."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core.request import RequestOutput
from jaxserve.core.structured import StructuredOutput
from jaxserve.engine.client import TokensPrompt
from tests.support.internals import core_of, engine_of, executor_of, instances_of
from tests.support.slow_stages import SlowStages
from tests.support.thorough import some

OPTIONS = {"dtype": "float32", "warmup": False, "memory_gb": 4, "max_num_seqs": 6, "max_num_batched_tokens": 134}
# Pages for about three of the sequences below at once.
FEW_PAGES = {"kv_pages": 24, "max_model_len": 256}
PROMPT = "def fibonacci(n):\n"
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(5, 2000, 30 + 23 * i).tolist() for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, n=3, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, stop=["\n\n"], max_tokens=40),
    SamplingParams(temperature=0, bad_words=["return n"], max_tokens=24, ignore_eos=True),
]
GRAMMARS = [
    SamplingParams(temperature=0, max_tokens=24, structured=StructuredOutput(regex=r"[a-z]{3} = \[(\d, ){4}\d\]")),
    SamplingParams(temperature=1, seed=1, max_tokens=24, structured=StructuredOutput(choice=["one two", "three four"])),
]


def ask(llm: LLM) -> list[RequestOutput]:
    """Return the answers to prompts of several kinds at once, of which some begin alike."""
    prompts = [*TOKENS, *[PROMPT] * (len(PARAMS) + len(GRAMMARS)), TOKENS[-1], TOKENS[-1] + [7, 8, 9]]
    return llm.generate(prompts, [*PARAMS, *PARAMS, *GRAMMARS, PARAMS[0], PARAMS[1]], use_tqdm=False)


def check_equal(answers: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for answer, other in zip(answers, expected, strict=True):
        for one, two in zip(answer.outputs, other.outputs, strict=True):
            assert one.token_ids == two.token_ids
            assert (one.text, one.finish_reason, one.stop_reason) == (two.text, two.finish_reason, two.stop_reason)
            assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=1e-3)
        for mine, theirs in zip(answer.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (mine or {}).keys() == (theirs or {}).keys()


@pytest.fixture(scope="module")
def expected() -> list[list[RequestOutput]]:
    """Return the answers of one stage, the second time from the prefix cache and with other seeds."""
    with LLM(**OPTIONS) as llm:
        return [ask(llm), ask(llm)]


@pytest.mark.parametrize(
    "options",
    some([{"pp": 3, "microbatches": "tokens", **FEW_PAGES}, {"pp": 2}], 1),
    ids=lambda options: "-".join(map(str, options)),
)
def test_stages_give_the_answers_of_one(expected: list[list[RequestOutput]], options: dict) -> None:
    with LLM(**OPTIONS, **options) as llm:
        for answers in expected:
            check_equal(ask(llm), answers)
        scheduler = core_of(llm).scheduler
        assert scheduler.prefix_hits > 0
        assert (scheduler.num_preemptions > 0) == ("kv_pages" in options)
        assert scheduler.pages.used == 0


def overlapping(tiny_model: Path, **options: bool) -> float:
    """Return the share of steps that begin on the first stage before the step before them has left the second."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [[5 + i] * 20 for i in range(6)]
    with LLM(tiny_model, load_format="dummy", pp=2, **OPTIONS, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        slow = SlowStages(executor_of(llm), seconds=0.005)
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert [a.outputs[0].token_ids for a in answers] == [e.outputs[0].token_ids for e in expected]
    first, second = slow.intervals[0], slow.intervals[1]
    assert len(first) == len(second) >= 16
    begun = [after.start < before.end for (_, after), before in zip(pairwise(first), second, strict=False)]
    assert all(one.end <= other.start for one, other in zip(first, second, strict=True)), "stages go in order"
    return sum(begun) / len(begun)  # 1 but for the first steps and the last ones


def test_stages_compute_different_steps_at_once(tiny_model: Path) -> None:
    assert overlapping(tiny_model) > 0.5


def test_without_overlap_a_step_begins_when_the_one_before_has_ended(tiny_model: Path) -> None:
    assert overlapping(tiny_model, overlap=False) == 0


def test_aborts_with_steps_in_flight_leave_the_others_alone(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=16, ignore_eos=True)
    prompts = [TokensPrompt(tuple([5 + i] * (20 + 9 * i))) for i in range(6)]
    with LLM(tiny_model, load_format="dummy", pp=2, **OPTIONS) as llm:
        engine, (steps,) = engine_of(llm), instances_of(llm)
        answers: dict[str, tuple[int, ...]] = {}
        for aborted in (False, True):
            ids = [engine.add(prompt, params) for prompt in prompts]
            for number in range(1000):
                if engine.idle:
                    break
                if aborted and number in (4, 9, 13):
                    assert steps.in_flight
                    engine.abort(ids[number % 6])
                for output in engine.step():
                    answers[output.request_id] = answers.get(output.request_id, ()) + output.outputs[0].token_ids
            if not aborted:
                expected = [answers[request_id] for request_id in ids]
        kept = [number for number in range(6) if number not in (4, 3, 1)]
        assert [answers[ids[number]] for number in kept] == [expected[number] for number in kept]
        assert steps.core.scheduler.pages.used == 0


def test_a_drained_instance_has_all_tokens_and_can_give_its_requests_away(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(tiny_model, load_format="dummy", pp=2, **OPTIONS) as llm:
        (expected,) = llm.generate([[7] * 20], params, use_tqdm=False)
        engine, (steps,) = engine_of(llm), instances_of(llm)
        request_id = engine.add(TokensPrompt((7,) * 20), params)
        tokens: tuple[int, ...] = ()
        ended: list[int] = []
        for number in range(1000):
            if engine.idle:
                break
            outputs = engine.step()
            if number == 9:
                steps.after_dispatched(lambda: ended.append(1))
                outputs += steps.drain()
                assert ended
                assert not steps.in_flight
                states = steps.core.detach([request_id], keep_pages=False)
                steps.core.attach(states, None, steps.clock.now())
            tokens += tuple(token for output in outputs for token in output.outputs[0].token_ids)
        assert tokens == expected.outputs[0].token_ids
