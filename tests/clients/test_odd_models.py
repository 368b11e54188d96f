"""Models with types of all kinds get through the frameworks, as structured output and as tools."""

import asyncio
import json
from datetime import datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.structured.compiler import LLGrammarCompiler
from tests.server.answering import call as call_of

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
agents = pytest.importorskip("agents")
pydantic_ai = pytest.importorskip("pydantic_ai")
langchain_openai = pytest.importorskip("langchain_openai")

INT64 = 2**63


class Color(Enum):
    """A color."""

    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    """A cat."""

    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    """A dog."""

    kind: Literal["dog"] = "dog"
    tricks: list[list[str]] = []


class Odd(BaseModel):
    """All kinds of types."""

    path: Path
    names: set[str]
    counts: dict[Color, int]
    data: bytes
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    number: Annotated[int, Field(ge=-INT64, le=INT64 - 1)]
    price: Decimal
    at: datetime
    id: UUID
    note: str | None = None


VALUE = {
    "path": "/a/b",
    "names": ["x"],
    "counts": {"red": 1},
    "data": "abc",
    "pet": {"kind": "cat", "lives": 3},
    "number": 5,
    "price": "1.5",
    "at": "2024-01-01T00:00:00Z",
    "id": "3fa85f64-5717-4562-b3fc-2c963f66afa6",
    "note": None,
}
TEXT = json.dumps(VALUE)
ODD = Odd.model_validate(VALUE)
ASK = [{"role": "user", "content": "Which?"}]


def call(name: str) -> str:
    return call_of(name, **VALUE)


@pytest.fixture(scope="module")
def compiler() -> LLGrammarCompiler:
    tokenizer = Tokenizer.load(bundled_model_path())
    return LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)


@pytest.fixture
def check(compiler: LLGrammarCompiler):
    """Return a function that compiles what the last request of an engine demands, as a real engine would."""

    def compiled(engine) -> None:
        structured = engine.seen[-1][1].structured
        if structured is not None:
            compiler.compile(structured)

    return compiled


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA])
def test_instructor(serve, check, mode):
    url, engine = serve(call("Odd") if mode is instructor.Mode.TOOLS else TEXT)
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    found = client.chat.completions.create(model="fake", response_model=Odd, messages=ASK)
    assert found.model_dump() == ODD.model_dump()  # its class is derived from the model
    check(engine)


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_langchain(serve, check, method):
    url, engine = serve(call("Odd") if method == "function_calling" else TEXT)
    model = langchain_openai.ChatOpenAI(base_url=f"{url}/v1", model="fake", api_key="none", max_retries=0)
    # LangChain asks strictly for a model, and a set cannot be held strictly. For a schema it does not.
    asked = Odd if method != "json_schema" else Odd.model_json_schema() | {"title": "Odd"}
    found = model.with_structured_output(asked, method=method).invoke("Which?")
    assert Odd.model_validate(found) == ODD
    check(engine)


@pytest.mark.parametrize("form", [pydantic_ai.ToolOutput, pydantic_ai.NativeOutput, pydantic_ai.PromptedOutput])
def test_pydantic_ai(serve, check, form):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    url, engine = serve(call("final_result") if form is pydantic_ai.ToolOutput else TEXT)
    model = OpenAIChatModel("fake", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    assert pydantic_ai.Agent(model, output_type=form(Odd)).run_sync("Which?").output == ODD
    check(engine)


def test_openai_agents(serve, check):
    url, engine = serve(call_of("keep", odd=VALUE), TEXT)
    agents.set_tracing_disabled(True)
    kept = []

    def keep(odd: Odd) -> str:
        """Keep it."""
        kept.append(odd)
        return "kept"

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    agent = agents.Agent(
        name="guide",
        model=agents.OpenAIResponsesModel(model="fake", openai_client=client),
        tools=[agents.function_tool(keep, strict_mode=False)],
        output_type=agents.AgentOutputSchema(Odd, strict_json_schema=False),
    )
    assert asyncio.run(agents.Runner.run(agent, "Which?")).final_output == ODD
    assert kept == [ODD]
    check(engine)
