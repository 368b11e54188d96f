"""The request body of /v1/responses, and what it asks of chat completions."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.server.errors import rename_field, rename_max_tokens
from jaxserve.server.http.offload import MAX_INLINE_SIZE
from jaxserve.server.schemas.body import Body, expecting
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.common import Priority, Salt, SamplingFields, ThinkingBudget
from jaxserve.server.schemas.left_out import LeftOut
from jaxserve.server.schemas.response_items import Item, messages_of, readable_item
from jaxserve.server.schemas.response_tools import KINDS, ClientTool, chat_tool_choice, client_tools
from jaxserve.server.schemas.tools import ToolChoice
from jaxserve.server.schemas.unsupported import UNSUPPORTED_IN_RESPONSES

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
# Details of items that no answer of this server has.
OTHER_INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
INCLUDABLE = (LOGPROBS, SEALED_REASONING, *OTHER_INCLUDABLE)
# Fields that chat completions have under the same name.
SHARED = (
    *SamplingFields.model_fields,
    *("model", "parallel_tool_calls", "structured_outputs", "chat_template_kwargs", "enable_thinking"),
    *("thinking_token_budget", "priority", "cache_salt"),
)
# Fields that the response repeats as they were given, with the values for those that were not.
REPEATED = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "user": None,
    "tools": [],
    "tool_choice": "auto",
    "metadata": {},
}
# The names of fields of chat completions, where those of the Responses API differ.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "reasoning.max_tokens": "thinking_token_budget",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
    "tool_choice.function.name": "tool_choice.name",
}

# The same for fields whose parts are named, and which messages about other fields mention.
NAMES_OF_PARTS = {"response_format.json_schema": "text.format", "response_format": "text.format"}

MetadataText = Annotated[str, Field(max_length=512)]


class Reasoning(Body):
    """The field that says how the model reasons. A summary cannot be asked for: the reasoning itself is returned."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the former name of summary

    def check_inside(self, place: str) -> None:
        """Raise UnsupportedParameter for a field that has an effect."""
        self.check_extra(UNSUPPORTED_IN_RESPONSES, (), place)


class TextOptions(Body):
    """The field that says what form the text has."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def response_format(self) -> dict[str, Any] | None:
        """Return the format in the form of chat completions."""
        given = self.format
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


class ResponsesBody(SamplingFields):
    """A response as in OpenAI's API reference, with vLLM's additional sampling parameters."""

    model: str | None = None
    input: Annotated[str | list[dict[str, Any]] | None, expecting("a string or a list of items")] = None
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(max_length=128)] = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    store: bool = True
    background: bool = False
    include: list[str] | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None  # of tools that a server runs itself
    tools: Annotated[list[dict[str, Any]] | None, FailFast()] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], MetadataText] | None, Field(max_length=16)] = None
    user: MetadataText | None = None
    safety_identifier: MetadataText | None = None
    prompt_cache_key: MetadataText | None = None
    prompt_cache_retention: MetadataText | None = None
    service_tier: MetadataText | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: ThinkingBudget = None
    priority: Priority = 0
    cache_salt: Salt = None

    def model_post_init(self, context: Any, /) -> None:
        """Drop tools that the client does not run itself, if the server ignores what it does not know."""
        super().model_post_init(context)
        self._leave_out_server_tools(KINDS)

    def _replace(self, left_out: LeftOut) -> None:
        if isinstance(self.input, list):
            self.input = [readable_item(item, left_out) for item in self.input]

    def check(self) -> None:
        """Raise RequestError if fields contradict each other or are not supported."""
        self.check_extra(UNSUPPORTED_IN_RESPONSES)
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise RequestError(
                    f"include has {name[:64]!r}: choose from {', '.join(INCLUDABLE)}", field="include", value=name
                )
        if self.background and not self.store:
            raise RequestError("background needs store to be true", field="background", value=True)
        if any((self.stream_options or {}).values()) and not self.stream:
            raise RequestError("stream_options needs stream to be true", field="stream_options")
        if self.input is None and self.previous_response_id is None:
            error = RequestError("input is missing", field="input")
            error.code = "missing_required_parameter"
            raise error
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise UnsupportedParameter(
                "text.verbosity is not supported: this model has one verbosity",
                field="text.verbosity",
                value=self.text.verbosity,
            )

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to return per token, or None for no log-probabilities."""
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in (self.include or ()) else None

    @property
    def effort(self) -> str | None:
        """The effort with which the model reasons, None for the default of the chat template."""
        return None if self.reasoning is None else self.reasoning.effort

    def client_tools(self) -> list[ClientTool]:
        """Return the tools. Raise RequestError if a tool is not supported."""
        return client_tools(self.tools or ())

    def items(self) -> list[Item]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        return [*(self.input or ())]

    def chat_body(self, items: Iterable[tuple[str, Item]]) -> ChatBody:
        """Return the chat completion that answers items, with their places for errors.

        Raise RequestError if an item, a tool or `tool_choice` is not valid.
        """
        asked = {name: value for name in SHARED if (value := getattr(self, name)) is not None}
        asked["messages"] = messages_of(items, self.instructions)
        if not asked["messages"]:
            raise RequestError("input is empty, and so is the conversation", field="input")
        asked["tools"] = [tool.for_chat() for tool in self.client_tools()]
        asked["tool_choice"] = None if self.tool_choice is None else chat_tool_choice(self.tool_choice)
        asked["response_format"] = None if self.text is None else self.text.response_format()
        asked["max_tokens"] = self.max_output_tokens
        asked["logprobs"], asked["top_logprobs"] = self.num_logprobs is not None, self.num_logprobs
        asked["reasoning_effort"] = self.effort
        if self.effort == "none":
            asked.setdefault("enable_thinking", False)
        return ChatBody.model_validate(asked)

    @property
    def repeated_size(self) -> int:
        """Roughly the characters of JSON of `repeated`. Tools and formats count as large."""
        large = self.tools or (self.text and self.text.format)
        return MAX_INLINE_SIZE + 1 if large else len(self.instructions or "")

    def repeated(self) -> dict[str, Any]:
        """Return the fields of the response that repeat those of the body."""
        given = {
            name: default if getattr(self, name) is None else getattr(self, name) for name, default in REPEATED.items()
        }
        return {
            **given,
            "background": self.background,
            "store": self.store,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.effort, "summary": self.reasoning.summary if self.reasoning else None},
            "service_tier": "default",
            "text": {"format": (self.text and self.text.format) or {"type": "text"}, "verbosity": "medium"},
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation,
        }


@contextlib.contextmanager
def responses_names(body: ResponsesBody) -> Iterator[None]:
    """Give fields in RequestErrors that leave the block their names in the Responses API."""
    try:
        yield
    except RequestError as error:
        message, field = str(error), error.field or ""
        for name, own in NAMES_OF_PARTS.items():
            message, field = message.replace(name, own), field.replace(name, own)
        error.args, error.field = (message,), field or None
        rename_max_tokens(error, NAMES["max_tokens"])
        if found := re.match(r"tools\.(\d+)\.function", field):
            place = body.client_tools()[int(found[1])].place
            rename_field(error, place + field.removeprefix(found[0]))
        elif field in NAMES:
            rename_field(error, NAMES[field])
        raise
