"""Hundreds of schemas: an answer follows its schema whatever the model would say, or the schema is refused."""

import json

import jsonschema
import pytest

from jaxserve import LLM, RequestError, SamplingParams, StructuredOutput
from jaxserve.engine.client import TextPrompt
from tests.structured.schemas import Schema, schemas
from tests.support.internals import engine_of

ALL = list(schemas())
UNSUPPORTED = {"uniqueItems", "contains", "not", "propertyNames", "dependentRequired", "if"}  # by llguidance
MOST_TOKENS = 200


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, Schema, str, str]]:
    """Return (keyword, schema, text, finish reason) for each schema, and for refused ones "" and why they are."""
    found, params = [], []
    with LLM(max_num_seqs=32, max_model_len=256, memory_gb=3, warmup=False) as llm:
        for number, (keyword, schema) in enumerate(ALL):
            structured = StructuredOutput(json=schema, strict=True)
            try:
                engine_of(llm).request(TextPrompt("x"), SamplingParams(structured=structured))
            except RequestError as error:
                found.append((keyword, schema, "", str(error)))
                continue
            params.append((keyword, schema, SamplingParams(seed=number, max_tokens=MOST_TOKENS, structured=structured)))
        outputs = llm.generate(["value = "] * len(params), [each for *_, each in params], use_tqdm=False)
    for (keyword, schema, _), output in zip(params, outputs, strict=True):
        (answer,) = output.outputs
        found.append((keyword, schema, answer.text, str(answer.finish_reason)))
    return found


def test_there_are_hundreds_of_schemas() -> None:
    assert len(ALL) >= 300
    for _, schema in ALL:
        jsonschema.Draft202012Validator.check_schema(schema)


def test_only_known_keywords_are_refused_and_named(answers) -> None:
    refused = [(keyword, reason) for keyword, _, text, reason in answers if not text]
    assert {keyword for keyword, _ in refused} <= UNSUPPORTED
    for keyword, reason in refused:
        assert f"'{keyword}' is not supported (#/" in reason


def test_every_whole_answer_is_valid(answers) -> None:
    # Python's dates and times are fewer than those of RFC 3339, which has a year 0 and leap seconds.
    formats = [name for name in jsonschema.FormatChecker.checkers if name not in ("date", "time", "date-time")]
    checker, wrong = jsonschema.FormatChecker(formats), []
    for keyword, schema, text, reason in answers:
        if text and reason == "stop":
            try:
                jsonschema.validate(json.loads(text), schema, format_checker=checker)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append((keyword, schema, text, str(error).splitlines()[0]))
    assert wrong == []


def test_most_answers_end_before_their_limit(answers) -> None:
    whole = [reason for *_, text, reason in answers if text]
    assert set(whole) <= {"stop", "length"}
    assert whole.count("stop") > 0.8 * len(whole)
