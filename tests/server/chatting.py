"""Servers for tests of the chat page, and functions that use the page as a person does."""

from typing import Any

from tests.server.fake import FakeClient, byte_tokenizer
from tests.server.fake_control import DURING, FakeControl, Time
from tests.server.pages import wait_for_text

# Shows the roles, tools and results that the model is given. It knows tools in Hermes' form, and thinking.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | length }} tools{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %} no thinking"
    "{% else %}<think>\n{% endif %}{% endif %}{# </tool_call> </think> #}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"  # neither tools nor thinking
THOUGHT = "First, a *plan*.\n</think>\n\n"
ANSWER = """## Caches

A **KV cache** keeps `keys` and *values*:

- of each token
  - in each layer

| bits | loss |
|--:|:--|
| 4 | 2 % |

```python
def grow(pages: int) -> int:
    return pages + 1  # one more
```

See [the page](https://example.org/kv)."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
TOOLS = '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'


def talker(script: str = ANSWER, template: str | None = PLAIN, **options: Any) -> FakeClient:
    """Return an engine that answers each prompt with `script`."""
    options.setdefault("control", FakeControl(Time(DURING)))
    options.setdefault("max_model_len", 400_000)
    return FakeClient(script=script, tokenizer=byte_tokenizer(template), **options)


def say(page: Any, text: str) -> None:
    """Write a message and send it."""
    page.locator("#input").fill(text)
    page.keyboard.press("Enter")


def ask(page: Any, text: str = "What is a KV cache?") -> Any:
    """Send a message, wait for the end of the answer, and return the last one."""
    say(page, text)
    wait_for_answer(page)
    return page.locator(".assistant").last


def wait_for_answer(page: Any) -> None:
    """Wait until no answer is in progress."""
    page.wait_for_selector("#messages[aria-busy=false]")


def wait_for_model(page: Any, name: str = "fake") -> None:
    """Wait until the page knows the model's name."""
    wait_for_text(page, "#model-name", f"^{name}$")


def prompts(client: FakeClient) -> list[str]:
    """Return the prompts that the engine was given."""
    return [prompt.text for prompt, *_ in client.seen]
