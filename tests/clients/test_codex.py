"""Requests in the form in which the Codex command line sends them: streamed, with tools, and nothing kept."""

import json
from typing import Any

import httpx

from tests.server.answering import REASONING, Scripted, call
from tests.server.serving import serving

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
}
SERVER = {"type": "namespace", "name": "mcp__docs__", "description": "", "tools": [{**SHELL, "name": "search"}]}


def text(role: str, content: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": content}]}


def turn(url: str, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send a turn, and return the items that Codex adds to its history: those of `response.output_item.done`."""
    body = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "input": history,
        "tools": [SHELL, PATCH, SERVER],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    answer = httpx.post(f"{url}/v1/responses", json=body, headers={"accept": "text/event-stream"})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    assert set(events[-1]["response"]["usage"]) >= {"input_tokens", "output_tokens", "total_tokens"}
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for item in items:  # Codex sends neither the status nor, if it is sealed, the text of reasoning
        del item["status"]
        if item["type"] == "reasoning":
            del item["content"]
    return items


def test_codex_calls_tools_over_several_turns():
    patch = "*** Begin Patch\n"
    fake = Scripted(
        f"{REASONING}{call('shell', command=['ls'])}",
        call("apply_patch", input=patch),
        call("mcp__docs__search", command=["jax"]),
        "Done.",
    )
    history = [
        text("developer", "<permissions>read only</permissions>"),
        text("user", "<environment_context>x</environment_context>"),
        text("user", "List the files."),
    ]
    with serving(fake) as address:
        reasoning, shell = turn(address.url, history)
        assert (shell["name"], json.loads(shell["arguments"])) == ("shell", {"command": ["ls"]})
        output = {"type": "function_call_output", "call_id": shell["call_id"], "output": "a.py"}
        history += [reasoning, shell, output]
        (custom,) = turn(address.url, history)
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", patch)
        output = {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "ok"}
        history += [custom, output]
        (search,) = turn(address.url, history)
        assert (search["namespace"], search["name"]) == ("mcp__docs__", "search")
        parts = [{"type": "input_text", "text": "found"}]
        history += [search, {"type": "function_call_output", "call_id": search["call_id"], "output": parts}]
        (message,) = turn(address.url, history)
    assert message["content"][0]["text"] == "Done."
    prompt = fake.seen[-1][0].text
    assert prompt[prompt.index("[system]") :] == (
        "[system]You are a coding agent.\n\n<permissions>read only</permissions>\n"
        "[user]<environment_context>x</environment_context>\n[user]List the files.\n"
        "[assistant]<think>Where is it?</think>"
        '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>\n'
        "[tool]a.py\n"
        '[assistant]<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n"}}</tool_call>\n'
        "[tool]ok\n"
        '[assistant]<tool_call>{"name": "mcp__docs__search", "arguments": {"command": ["jax"]}}</tool_call>\n'
        "[tool]found\n[assistant]"
    )
