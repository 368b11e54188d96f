"""What the tests of /v1/messages share: scripted answers, a chat template that shows everything, a tool."""

from tests.server.fake import FakeClient, byte_tokenizer

ASK = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Says it.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🦊"}}\n</tool_call>'
INVALID_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich\n🦊"}}\n</tool_call>'
UNENDED_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3'
TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def scripted(script: str = "Hello 🦊", template: str | None = TEMPLATE, **options) -> FakeClient:
    """Return an engine that answers with `script`."""
    return FakeClient(script, **{"max_model_len": 8192, "tokenizer": byte_tokenizer(template), **options})
