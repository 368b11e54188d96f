"""The Codex command line: its requests, which are streamed, with tools, and nothing kept; and itself, if installed."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

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
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


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


@pytest.mark.skipif(shutil.which("codex") is None, reason="Codex is not installed: npm install -g @openai/codex")
def test_codex_itself_runs_a_command_and_answers(tmp_path):
    manual = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    configuration = re.findall(r"^```toml\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)[0]
    fake = Scripted(f"{REASONING}I look.{call('exec_command', cmd='echo from the tool')}", "All done.")
    fake.info = replace(fake.info, max_model_len=1_000_000)
    with serving(fake) as address:
        configuration = configuration.replace('"NAME"', '"fake"').replace("http://127.0.0.1:8000", address.url)
        (tmp_path / "config.toml").write_text(configuration)
        command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        done = subprocess.run(
            [*command, "-C", str(tmp_path), "Say hello"],
            env={**os.environ, "CODEX_HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "All done."
    assert "from the tool" in fake.seen[-1][0].text.partition("[tool]")[2]
