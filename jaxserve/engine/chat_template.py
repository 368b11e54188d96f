"""Chat templates: sandboxed Jinja with the names that Hugging Face defines for templates."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.core.errors import CheckpointError, RequestError
from jaxserve.core.unicode_text import valid_unicode
from jaxserve.engine.chat_messages import Message, checked_messages
from jaxserve.engine.rewritings import REWRITINGS, rewritten
from jaxserve.engine.tool_messages import tools_as_text, with_argument_objects

PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
{{- message['role'] | capitalize }}: {{ message['content'] }}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

VICUNA = """\
{{- bos_token }}
{%- set default = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." %}
{%- set given = messages and messages[0]['role'] == 'system' %}
{{- messages[0]['content'] if given else default }}{{ ' ' }}
{%- for message in messages[1 if given else 0:] %}
{%- if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}
{%- elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] }}{{ eos_token }}
{%- else %}{{ raise_exception('Vicuna knows the roles user and assistant, and system for the first message') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
"""Vicuna 1.1 to 1.5, as FastChat writes it."""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

BUILTIN_TEMPLATES: Mapping[str, str] = {"plain": PLAIN, "vicuna": VICUNA, "chatml": CHATML}

MAX_CACHED_ROLES = 64  # messages of a conversation whose check is cached

RENDERED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})  # parameters of `render`

# Marks the end of a message. The space shows whether the template trims the content of messages.
MARKER = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateRefusal(RequestError):
    """A conversation that a chat template refuses or fails on."""


class ChatTemplate:
    """A template that renders a conversation into a prompt."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ):
        """Compile the template. Raise `CheckpointError` if it is not valid Jinja.

        `special_tokens`: texts of special tokens by names such as "bos_token", which the template may use.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._now = now
        self._template, self._names = self._compiled()
        self.knows_tools = "tools" in self._names
        self._knows_developer = "developer" in source
        self._cached_dropped = lru_cache(maxsize=256)(self._find_dropped)

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and its caller may give, besides messages and tools."""
        return self._names - RENDERED

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation.

        `tools`: functions that the model may call, in OpenAI's form. A template that has no place for tools gets them,
        their calls and their results in the text of messages. `continue_final_message`: the prompt ends inside the last
        message, which the model continues. `variables`: any of the template's own `variables`, e.g. enable_thinking.
        A `developer` message is rendered as a `system` message unless the template itself mentions
        developers. Messages that the template refuses are rewritten if it takes them in other words (`REWRITINGS`).

        Raise `RequestError` if a message is malformed, or the template refuses the messages or leaves one out.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false", field="continue_final_message"
            )
        if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
            raise RequestError("tools must be a list of functions", field="tools", value=tools)
        messages = checked_messages(messages)
        try:
            messages = [self._with_known_role(with_argument_objects(message)) for message in messages]
            if not self.knows_tools:
                messages = tools_as_text(messages, tools)
        except (KeyError, TypeError) as error:
            reason = "tool_calls must be a list of calls with function.name and function.arguments"
            raise RequestError(reason, field="messages") from error
        if tools and self.knows_tools:
            variables["tools"] = tools
        self._check_roles(tuple(str(message.get("role")) for message in messages))

        def prompt(messages: Sequence[Message]) -> str:
            if continue_final_message:
                return self._render_open(messages, variables)
            return self._render(messages, add_generation_prompt, variables)

        return valid_unicode(_as_taken(messages, prompt))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **context)
        except TemplateError as error:  # raised by the template itself, or by the sandbox
            raise TemplateRefusal(f"the chat template refuses these messages: {error}", field="messages") from error
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            reason = f"the chat template fails on these messages: {type(error).__name__}: {error}"
            raise TemplateRefusal(reason, field="messages") from error

    def _render_open(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return the prompt up to the end of the last message's content, as Transformers does.

        The end is found by a marker, because the content itself may occur elsewhere in the prompt.
        """
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise RequestError(
                "continue_final_message needs a last message with text as its content", field="continue_final_message"
            )
        text = self._render([*messages[:-1], {**messages[-1], "content": content + MARKER}], False, variables)
        end = text.rfind(MARKER.rstrip())
        if end < 0 or content.strip() not in text:
            raise RequestError(
                "the chat template changes the text of the last message, so it cannot be continued",
                field="continue_final_message",
            )
        return text[:end] if text.startswith(MARKER, end) else text[:end].rstrip()

    def _with_known_role(self, message: Message) -> Message:
        if message.get("role") == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message

    def _check_roles(self, roles: tuple[str, ...]) -> None:
        """Raise `RequestError` if the template silently leaves out a message of a conversation with these roles."""
        # Long conversations are not cached: clients could fill the memory with them.
        find = self._cached_dropped if len(roles) <= MAX_CACHED_ROLES else self._find_dropped
        position = find(roles)
        if position is not None:
            raise RequestError(
                f"the chat template leaves out message {position} (role {roles[position]!r}), which would never reach"
                " the model; give its text in another role or place",
                field="messages",
                value=roles[position],
            )

    def _find_dropped(self, roles: tuple[str, ...]) -> int | None:
        """Return the position of the first message that the template leaves out, None if it shows all messages.

        The messages that a template shows depend on the roles and their order, so it is rendered with contents that are
        easy to find.
        """
        if "messages" not in self.source:  # a template without messages is a fixed text on purpose
            return None
        marks = [f"MESSAGE{position}TEXT" for position in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = self._render(messages, True, {})
        except RequestError:  # the real conversation is refused as well, or needs variables that are unknown here
            return None
        end = 0
        for position, mark in enumerate(marks):
            # Nearly all templates keep the order of messages. A search from the beginning would take quadratic time.
            begin = text.find(mark, end)
            if begin < 0 and (begin := text.find(mark)) < 0:
                return position
            end = begin + len(mark)
        return None

    def _compiled(self) -> tuple[Template, frozenset[str]]:
        """Return the template, and the names that it reads and does not define itself."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: self._now().strftime(pattern)
        try:
            names = meta.find_undeclared_variables(environment.parse(self.source))
            return environment.from_string(self.source), frozenset(names - environment.globals.keys())
        except TemplateError as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks text for training. It renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration is a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _as_taken(messages: Sequence[Message], prompt: Callable[[Sequence[Message]], str]) -> str:
    """Return the prompt of messages, rewritten in as few ways as possible if the template refuses them as they are.

    Raise the first `TemplateRefusal` if it refuses them in any words.
    """
    try:
        return prompt(messages)
    except TemplateRefusal as refusal:
        try:
            text = prompt(rewritten(messages, REWRITINGS))
        except TemplateRefusal:
            raise refusal from None
    needed = REWRITINGS
    for rewriting in REWRITINGS:
        fewer = tuple(each for each in needed if each is not rewriting)
        with suppress(TemplateRefusal):
            text, needed = prompt(rewritten(messages, fewer)), fewer
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON that is not escaped for HTML, unlike the result of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
