"""The request bodies of Anthropic's Messages API, and the chat completions that they mean."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.server.messages.errors import ThreadUnsupported
from jaxserve.server.schemas.body import Body
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.common import Priority, Salt
from jaxserve.server.schemas.harmless import HARMLESS_IN_MESSAGES_API, HARMLESS_IN_OUTPUT_CONFIG
from jaxserve.server.schemas.left_out import LeftOut
from jaxserve.server.schemas.message_blocks import Content, Message, chat_messages, num_blocks, readable
from jaxserve.server.schemas.unsupported import Unsupported, unsupported

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BLOCK_SIZE = 32  # how much the translation of a block costs, compared to a character of text
# Templates know OpenAI's efforts.
EFFORTS = {"xhigh": "high", "max": "high"}

# Fields that the model would have to know of, and those of a chat completion that mean the same under another name.
INSTEAD = {
    "stop": ": use stop_sequences",
    "response_format": ": use output_config.format",
    "enable_thinking": ": use thinking",
    "reasoning_effort": ": use output_config.effort",
    "mcp_servers": ": the client must call these tools itself",
    "container": ": this server runs no code",
    "compaction": ": the client must shorten the conversation itself",
}
UNSUPPORTED_IN_MESSAGES_API: Mapping[str, Unsupported] = {
    name: unsupported(name, INSTEAD.get(name, "")) for name in (*ChatBody.model_fields, *INSTEAD)
}


class Thinking(Body):
    """The field for whether the model reasons, and for how long. `display`: "omitted" leaves the text out."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int | None, Field(ge=0)] = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def budget(self) -> int | None:
        """The limit, which only the type "enabled" has."""
        return self.budget_tokens if self.type == "enabled" else None


class ToolChoice(Body):
    """The choice of the tools that the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # with type "tool"
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> str | dict[str, Any]:
        """Return OpenAI's form."""
        if self.type != "tool":
            return TOOL_CHOICES[self.type]
        if self.name is None:
            raise RequestError("tool_choice.name is missing", field="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class OutputFormat(Body):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]  # pydantic has a method `schema`


class OutputConfig(Body):
    """The form of the answer, and how much the model reasons for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None

    def check_inside(self, place: str) -> None:
        """Raise UnsupportedParameter for a field that may have an effect."""
        self.check_extra({}, HARMLESS_IN_OUTPUT_CONFIG, place)


class MessageAsChat(ChatBody):
    """A message to generate as a chat completion. Anthropic lowers max_tokens to what fits, too."""

    clamps_max_tokens: ClassVar[bool] = True


class PromptBody(Body):
    """The fields of which a prompt is made, as /v1/messages/count_tokens takes them."""

    model: str | None = None
    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    system: Content | None = None
    tools: Annotated[list[dict[str, Any]] | None, FailFast()] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its name in the beta
    thread: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Drop tools that the client does not run itself, if the server ignores what it does not know."""
        super().model_post_init(context)
        self._leave_out_server_tools(("custom", None))

    def _replace(self, left_out: LeftOut) -> None:
        self.system = readable(self.system, left_out)

    @property
    def size(self) -> int:
        """Roughly the cost of `chat`, in the unit of `off_loop_if_large`."""
        blocks = num_blocks(self.system) + sum(num_blocks(message.content) for message in self.messages)
        return BLOCK_SIZE * (blocks + len(self.messages) + len(self.tools or ()))

    def chat(self, *, reasons: bool, late_system: bool = True) -> ChatBody:
        """Return the chat completion that asks the same. Raise RequestError, naming the field, if there is none.

        `reasons`: the model does so; for other models any limit on reasoning holds. `late_system`: its chat template
        takes system messages that follow others.
        """
        self.check_extra(UNSUPPORTED_IN_MESSAGES_API, HARMLESS_IN_MESSAGES_API)
        for index, message in enumerate(self.messages):
            message.check_inside(f"messages.{index}.")
        if self.thread is not None:
            raise ThreadUnsupported("thread is not supported: send the whole conversation", field="thread")
        messages = chat_messages(self.system, self.messages, late_system=late_system)
        last = messages[-1]
        continued = last["role"] == "assistant"
        if continued and (last.get("tool_calls") or not last["content"]):
            place = f"messages.{len(self.messages) - 1}"
            raise RequestError(
                f"{place} is the last message and of the assistant, but has no text to be continued or calls a tool: "
                "the results of its calls must follow",
                field=place,
            )
        asked = {
            "messages": messages,
            "continue_final_message": continued,
            "add_generation_prompt": not continued,
            "chat_template_kwargs": self.chat_template_kwargs,
            **self._tools(),
            **self._thinking(reasons),
            **self._output(),
            **self._sampling(),
        }
        return MessageAsChat.model_validate(asked)

    @property
    def client_names(self) -> dict[str, str]:
        """Anthropic's names of fields of a chat completion, where they differ."""
        names = {
            "stop": "stop_sequences",
            "tool_choice.function.name": "tool_choice.name",
            "reasoning.max_tokens": "thinking.budget_tokens",
            "response_format.json_schema.schema": f"{self._format_place}.schema",
        }
        for i in range(len(self.tools or ())):
            names[f"tools.{i}.function.parameters"] = f"tools.{i}.input_schema"
            names |= {f"tools.{i}.function.{name}": f"tools.{i}.{name}" for name in ("name", "description", "strict")}
        return names

    @property
    def _format_place(self) -> str:
        return "output_format" if self.output_format is not None else "output_config.format"

    def _sampling(self) -> dict[str, Any]:
        return {}

    def _tools(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"tools": [_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ())]}
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.for_chat()
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return fields

    def _thinking(self, reasons: bool) -> dict[str, Any]:
        if self.thinking is None:
            return {}
        budget = self.thinking.budget if reasons else None
        return {"enable_thinking": self.thinking.type != "disabled", "thinking_token_budget": budget}

    def _output(self) -> dict[str, Any]:
        config = self.output_config or OutputConfig()
        if config.format is not None and self.output_format is not None:
            raise RequestError(
                "output_format cannot be given together with output_config.format", field="output_format"
            )
        form = config.format or self.output_format
        fields: dict[str, Any] = {"reasoning_effort": EFFORTS.get(config.effort or "", config.effort)}
        if form is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.json_schema}}
        return fields


class MessagesBody(PromptBody):
    """A message to generate, as in Anthropic's API reference."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    priority: Priority = 0
    cache_salt: Salt = None

    @property
    def eager_tools(self) -> frozenset[str]:
        """The names of the tools whose input is streamed before it is known to be valid."""
        return frozenset(tool["name"] for tool in self.tools or () if tool.get("eager_input_streaming") is True)

    @property
    def thinking_display(self) -> str:
        """The way in which the answer shows thinking: "summarized", "omitted" (blocks without text) or "none"."""
        if self.thinking is None:
            return "summarized"
        return "none" if self.thinking.type == "disabled" else self.thinking.display or "summarized"

    def _sampling(self) -> dict[str, Any]:
        names = ("model", "max_tokens", "temperature", "top_k", "top_p", "priority", "cache_salt")
        return {"stop": self.stop_sequences, **{name: getattr(self, name) for name in names}}


def _tool(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return OpenAI's form of a tool. Raise RequestError, naming the field, if it is not one of the client's own."""
    kind = given.get("type") or "custom"
    if kind != "custom":
        raise UnsupportedParameter(
            f"{place}.type is {str(kind)[:40]!r}: only tools of type custom are supported",
            field=f"{place}.type",
            value=kind,
        )
    schema = given.get("input_schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{place}.input_schema must be a JSON schema", field=f"{place}.input_schema", value=schema)
    examples = given.get("input_examples")
    function = {name: given[name] for name in ("name", "description", "strict") if given.get(name) is not None}
    function["parameters"] = {**schema, "examples": examples} if examples else schema
    return {"type": "function", "function": function}
