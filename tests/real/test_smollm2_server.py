"""SmolLM2-135M-Instruct over HTTP: chat, structured output, a tool call, and sensible answers while `morph` decides."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.bench.spawn import spawned
from jaxserve.calibration.own_text import MAX_REPEATED, repeated
from jaxserve.engine.tokenizer import Tokenizer

QUESTIONS = (
    "Why is the sky blue?", "Explain how bread is made.", "Describe the life of a bee.", "What is a democracy?",
    "How do I learn to swim?", "Write a short story about a fox.", "Why do leaves fall in autumn?", "What is music?",
)  # fmt: skip
BURST = 48
START_S, ANSWER_S = 1200, 1200


@pytest.fixture(scope="module")
def url(smollm2: Path) -> Iterator[str]:
    options = ("--policy", "morph", "--memory-gb", "1.5", "--max-model-len", "512")
    with spawned([str(smollm2), *options], timeout_s=START_S) as base:
        yield base


def chat(url: str, question: str, **more: Any) -> dict[str, Any]:
    """Return the answer to a question."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 96} | more
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_chat_answers_a_question(url: str) -> None:
    assert "Berlin" in chat(url, "What is the capital of Germany?")["message"]["content"]


def test_structured_output_fits_its_schema(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}, "inhabitants": {"type": "integer"}},
        "required": ["city", "inhabitants"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = chat(url, "Describe the capital of Germany in JSON.", response_format=wanted)
    found = json.loads(answer["message"]["content"])
    assert found.keys() == {"city", "inhabitants"}
    assert isinstance(found["inhabitants"], int)


def test_tool_call_has_arguments_that_parse(url: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    forced = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(url, "What is the weather in Paris?", tools=[tool], tool_choice=forced)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}


def test_every_answer_in_a_burst_is_sensible(url: str, smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    questions = [QUESTIONS[index % len(QUESTIONS)] for index in range(BURST)]
    with ThreadPoolExecutor(BURST) as pool:
        answers = list(pool.map(lambda question: chat(url, question), questions))
    texts = [answer["message"]["content"] for answer in answers]
    assert all(len(text) > 20 for text in texts)
    loops = [text for text in texts if repeated(tokenizer.encode(text)) > MAX_REPEATED]
    assert len(loops) <= BURST // 10, loops
