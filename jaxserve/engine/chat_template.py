"""A model's chat template: sandboxed Jinja with the names that Hugging Face gives to templates."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.core.errors import CheckpointError, RequestError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}

DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{{- message['role'] | capitalize }}: {{ message['content'] }}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


class ChatTemplate:
    """Renders a conversation into a prompt. `special_tokens`: names such as "bos_token" that the template may use."""

    def __init__(
        self,
        source: str = DEFAULT_TEMPLATE,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._now = now

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        `continue_final_message`: the prompt ends inside the last message, so that the model goes on with it.
        `variables` are the template's own, e.g. enable_thinking. Raises RequestError if the template refuses the
        messages, CheckpointError if the template itself is broken.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false", field="continue_final_message"
            )
        messages = [_in_text(message) for message in messages]
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            text = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **context)
        except TemplateError as error:  # also what the template itself raises, and what the sandbox refuses
            raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from error
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            reason = f"the chat template fails on these messages: {type(error).__name__}: {error}"
            raise RequestError(reason, field="messages") from error
        return _cut_after_last_content(text, messages) if continue_final_message else text

    @cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: self._now().strftime(pattern)
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise CheckpointError(f"the model's chat template is not valid Jinja: {error}") from error


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's tokens for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration is a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """A message's content, which may be a list of text parts. Raises RequestError for images, audio and the like."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        match part:
            case {"type": "text", "text": str() as text}:
                texts.append(text)
            case _:
                raise RequestError(
                    "this model reads text only; every part of content must be of type text",
                    field="messages.content",
                    value=part.get("type") if isinstance(part, Mapping) else part,
                    limit="text",
                )
    return "\n".join(texts)


def _in_text(message: Message) -> Message:
    return {**message, "content": text_of(message["content"])} if isinstance(message.get("content"), list) else message


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands in a prompt: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _cut_after_last_content(text: str, messages: Sequence[Message]) -> str:
    content = str(messages[-1].get("content") or "").strip()
    position = text.rfind(content) if content else -1
    if position < 0:
        raise RequestError(
            "the chat template does not show the last message as it stands, so it cannot be continued",
            field="continue_final_message",
        )
    return text[: position + len(content)]
