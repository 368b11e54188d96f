"""A response does not depend on how many tokens of its answer arrive at once."""

import random
from typing import Any

import pytest

from jaxserve.core.request import CompletionOutput, Logprob
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import TokensPrompt
from jaxserve.parsing.formats.hermes import Hermes
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.reasoning import ReasoningFormat
from jaxserve.parsing.tools import Tool, ToolUse
from jaxserve.server.answers.conversation import ConversationJob
from jaxserve.server.answers.generation import Job
from jaxserve.server.responses.events import ResponseEvents
from jaxserve.server.responses.items import Shown
from tests.server.answering import answering, call
from tests.server.test_responses import folded, without_ids

HEAD = {"id": "resp_1", "object": "response", "background": False}
SCRIPT = f"<think>Где it is? 🦊</think>\n\nI lök.\n{call('weather', city='Zürich')}\n{call('weather', city='x')}"
FORM = AnswerFormat(ReasoningFormat("qwen3").section(), Hermes(), ToolUse((Tool("weather"),)))


def new_events(form: AnswerFormat, alternatives: int | None) -> ResponseEvents:
    client = answering("")
    job = Job("r", [TokensPrompt((1, 2, 3))], [SamplingParams()])
    return ResponseEvents(HEAD, ConversationJob(client, job, form), Shown(alternatives), lambda: 7)


def outputs(script: str, sizes: list[int], held: int = 0) -> list[CompletionOutput]:
    """Return the output of an engine whose steps have `sizes` tokens, and which holds back `held` characters of text.

    Engines hold back what may become a stop string.
    """
    tokenizer = answering("").tokenizer
    tokens, stream = tokenizer.encode(script), tokenizer.stream()
    found, text, sent, at = [], "", 0, 0
    while at < len(tokens):
        step = tokens[at : at + sizes[len(found) % len(sizes)]]
        at += len(step)
        text += stream.push(step)
        last = at >= len(tokens)
        end = len(text) if last else max(len(text) - held, sent)
        logprobs = tuple({token: Logprob(-float(token), 1)} for token in step)
        reason = "stop" if last else None
        found.append(CompletionOutput(0, text[sent:end], tuple(step), logprobs=logprobs, finish_reason=reason))
        sent = end
    return found


def run(events: ResponseEvents, steps: list[CompletionOutput]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sent = events.begin()
    for step in steps:
        sent += events.add(step)
    return sent, without_ids(events.response())


@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("alternatives", [None, 1])
def test_response_is_the_same_for_steps_of_any_size(alternatives, held):
    random.seed(1)
    _, expected = run(new_events(FORM, alternatives), outputs(SCRIPT, [10_000]))
    for _ in range(20):
        sizes = [random.randint(1, 12) for _ in range(40)]
        sent, response = run(new_events(FORM, alternatives), outputs(SCRIPT, sizes, held))
        assert response == expected
        completed = [item | {"status": "completed"} for item in folded(sent)]
        assert without_ids(completed) == expected["output"]
    reasoning = SCRIPT.partition("</think>")[0] + "</think>"
    assert expected["usage"]["output_tokens_details"]["reasoning_tokens"] == len(reasoning.encode())
    assert expected["usage"]["output_tokens"] == len(SCRIPT.encode())


def test_answer_without_parsing_takes_steps_as_they_are():
    sent, response = run(new_events(AnswerFormat(), None), outputs("Hello", [2]))
    assert [event["delta"] for event in sent if event["type"].endswith("delta")] == ["He", "ll", "o"]
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_reasoning_that_never_ends_takes_all_tokens():
    form = AnswerFormat(ReasoningFormat("deepseek_r1", always=True).section(begun=True))
    _, response = run(new_events(form, None), outputs("hm, hm", [2]))
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 6
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm, hm"}]


def test_reasoning_that_the_prompt_began_is_counted_to_its_end():
    form = AnswerFormat(ReasoningFormat("qwen3").section(begun=True))
    _, response = run(new_events(form, None), outputs("hm</think>yes", [3]))
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("hm</think>")


def test_text_that_a_stop_string_has_cut_keeps_its_log_probabilities():
    tokenizer = answering("").tokenizer
    logprobs = tuple({token: Logprob(-1.0, 1)} for token in tokenizer.encode("ab STOP"))
    step = CompletionOutput(0, "ab ", tuple(tokenizer.encode("ab STOP")), logprobs=logprobs, finish_reason="stop")
    _, response = run(new_events(AnswerFormat(), 1), [step])
    part = response["output"][0]["content"][0]
    assert part["text"] == "ab "
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", " "]
