"""Agents of the openai-agents package, whose default model uses the Responses API."""

import asyncio

import openai
import pytest

from tests.server.answering import REASONING, Scripted, call
from tests.server.serving import serving

agents = pytest.importorskip("agents")

SCRIPTS = (f"{REASONING}{call('weather', city='Zürich')}", "It is sunny in Zürich.")


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"Sun in {city}."


def new_agent(url: str, **options):
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    model = agents.OpenAIResponsesModel(model="fake", openai_client=client)
    tools = [agents.function_tool(weather)]
    return agents.Agent(name="guide", instructions="Be brief.", model=model, tools=tools, **options)


def check_conversation(fake: Scripted) -> None:
    (first, *_), (second, *_) = fake.seen
    assert "[tools]" in first.text
    assert first.text.endswith("[system]Be brief.\n[user]Weather in Zürich?\n[assistant]")
    assert second.text.endswith(
        "[user]Weather in Zürich?\n[assistant]<think>Where is it?</think>"
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
        "[tool]Sun in Zürich.\n[assistant]"
    )


def test_agent_calls_a_tool_and_answers():
    fake = Scripted(*SCRIPTS)

    async def main() -> str:
        result = await agents.Runner.run(new_agent(address.url), "Weather in Zürich?")
        return result.final_output

    with serving(fake) as address:
        assert asyncio.run(main()) == SCRIPTS[1]
    check_conversation(fake)


def test_agent_streams_its_answer():
    fake = Scripted(*SCRIPTS)

    async def main() -> tuple[str, str, list[str]]:
        result = agents.Runner.run_streamed(new_agent(address.url), "Weather in Zürich?")
        text, items = "", []
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
            elif event.type == "run_item_stream_event":
                items.append(event.name)
        return result.final_output, text, items

    with serving(fake) as address:
        final, text, items = asyncio.run(main())
    assert final == text == SCRIPTS[1]
    assert items == ["reasoning_item_created", "tool_called", "tool_output", "message_output_created"]
    check_conversation(fake)


def test_agent_continues_the_responses_that_the_server_keeps():
    fake = Scripted("Hello.", "You said hi.")

    async def main() -> None:
        agent = new_agent(address.url)
        first = await agents.Runner.run(agent, "hi", auto_previous_response_id=True)
        await agents.Runner.run(agent, "What did I say?", previous_response_id=first.last_response_id)

    with serving(fake) as address:
        asyncio.run(main())
    assert fake.seen[-1][0].text.endswith(
        "[system]Be brief.\n[user]hi\n[assistant]Hello.\n[user]What did I say?\n[assistant]"
    )
