"""Agent and application frameworks use chat completions: text, tools, structured output, streams."""

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download

import instructor
import litellm
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.server.answering import last_prompt

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "How is the weather?"}]


class City(BaseModel):
    """A city."""

    name: str
    people: int


CITY = '{"name": "Zürich", "people": 443000}'

# litellm


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_returns_text_and_calls(serve, provider):
    url, _ = serve(f"I look.\n{CALL}", "plain")
    options = {"model": f"{provider}/fake", "api_base": f"{url}/v1", "api_key": "none"}
    message = litellm.completion(messages=ASK, tools=[TOOL], **options).choices[0].message
    assert message.content == "I look."
    assert message.tool_calls[0].function.name == "weather"
    assert message.tool_calls[0].function.arguments == '{"city": "Zürich"}'
    assert litellm.completion(messages=ASK, **options).choices[0].message.content == "plain"


def test_litellm_stream_adds_up_to_the_answer(serve):
    url, _ = serve(f"<think>why</think>I look.\n{CALL}\n{CALL}")
    options = {"model": "hosted_vllm/fake", "api_base": f"{url}/v1", "api_key": "none"}
    chunks = list(litellm.completion(messages=ASK, tools=[TOOL], stream=True, **options))
    message = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message
    assert message.content == "I look."
    assert message.reasoning_content == "why"
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Zürich"}'] * 2


# langchain-openai


@tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


def langchain(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", model="fake", api_key="none", max_retries=0)


def test_langchain_calls_a_tool_and_returns_its_result(serve):
    url, engine = serve(CALL, "It is sunny.")
    model = langchain(url).bind_tools([weather])
    asked = HumanMessage("How is the weather?")
    answer = model.invoke([asked])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Zürich"})
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.invoke([asked, answer, result]).content == "It is sunny."
    assert "[tool]sunny in Zürich" in last_prompt(engine)


def test_langchain_stream_adds_up_to_calls(serve):
    url, _ = serve(f"I look.\n{CALL}\n{CALL}")
    chunks = list(langchain(url).bind_tools([weather]).stream("How?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessage)
    assert whole.content == "I look."
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Zürich"}] * 2


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_structured_output_is_parsed(serve, method):
    url, _ = serve(CITY)
    assert langchain(url).with_structured_output(City, method=method).invoke("Which?") == City(
        name="Zürich", people=443000
    )


def test_langchain_structured_output_by_function_calling_is_parsed(serve):
    url, _ = serve(f'<tool_call>\n{{"name": "City", "arguments": {CITY}}}\n</tool_call>')
    model = langchain(url).with_structured_output(City, method="function_calling")
    assert model.invoke("Which?").people == 443000


# pydantic-ai


def pydantic_ai(url: str) -> OpenAIChatModel:
    return OpenAIChatModel("fake", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def test_pydantic_ai_agent_works_with_a_tool(serve):
    url, engine = serve(CALL, "It is sunny.")
    agent = Agent(pydantic_ai(url))

    @agent.tool_plain
    def weather(city: str) -> str:
        """Return the weather in a city."""
        return f"sunny in {city}"

    assert agent.run_sync("How is the weather?").output == "It is sunny."
    assert "[tool]sunny in Zürich" in last_prompt(engine)


def test_pydantic_ai_agent_returns_a_model(serve):
    url, _ = serve(f'<tool_call>\n{{"name": "final_result", "arguments": {CITY}}}\n</tool_call>')
    assert Agent(pydantic_ai(url), output_type=City).run_sync("Which?").output.people == 443000


def test_pydantic_ai_agent_asks_again_after_invalid_arguments(serve):
    bad = '<tool_call>\n{"name": "final_result", "arguments": {"name": }}\n</tool_call>'
    url, _ = serve(bad, f'<tool_call>\n{{"name": "final_result", "arguments": {CITY}}}\n</tool_call>')
    assert Agent(pydantic_ai(url), output_type=City).run_sync("Which?").output.people == 443000


def test_pydantic_ai_streams_text(serve):
    url, _ = serve("It is sunny.")

    async def streamed() -> str:
        async with Agent(pydantic_ai(url)).run_stream("How?") as result:
            return await result.get_output()

    assert asyncio.run(streamed()) == "It is sunny."


# instructor


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA])
def test_instructor_returns_a_model(serve, mode):
    call = f'<tool_call>\n{{"name": "City", "arguments": {CITY}}}\n</tool_call>'
    url, _ = serve(call if mode is instructor.Mode.TOOLS else CITY)
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
    assert client.chat.completions.create(model="fake", response_model=City, messages=ASK).people == 443000
