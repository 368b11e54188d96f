"""A fake engine with a chat template that shows reasoning and tools, and the texts of answers with both."""

import json
from collections.abc import AsyncGenerator
from typing import Any

from jaxserve.core.request import RequestOutput
from jaxserve.engine.tokenizer import Tokenizer
from tests.server.fake import END, FakeClient, byte_tokenizer

TEMPLATE = """\
{%- if tools %}{{ '[tools]' + (tools | tojson) + '\\n' }}{% endif %}
{%- for message in messages %}
{{- '[' + message.role + ']' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

REASONING = "<think>\nWhere is it?\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    """Return the text of a call."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def tool(name: str, **fields: Any) -> dict[str, Any]:
    """Return a function tool of the Responses API that takes one text."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "name": name, "parameters": parameters, **fields}


class Scripted(FakeClient):
    """A fake engine that answers one request after the other with the next of several scripts."""

    def __init__(self, *scripts: str):
        super().__init__(tokenizer=answering("").tokenizer, max_model_len=100_000)
        self.scripts = list(scripts)

    def generate(self, *args: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        self.script = self.scripts.pop(0)
        return super().generate(*args, **options)


def answering(script: str, **options: Any) -> FakeClient:
    """Return an engine that answers with `script`, whose model has a chat template for reasoning and tools."""
    tokenizer = Tokenizer(byte_tokenizer()._tokenizer, special_tokens={"eos_token": END}, chat_template=TEMPLATE)
    return FakeClient(script=script, tokenizer=tokenizer, **{"max_model_len": 8192, **options})


def last_prompt(fake: FakeClient) -> str:
    """Return the prompt that the engine got last."""
    text = fake.seen[-1][0].text
    assert text is not None
    return text
