"""The request body of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.core.template_variables import OPTIONAL_VARIABLES, is_reserved
from jaxserve.engine.chat_messages import silent_content, text_of
from jaxserve.server.schemas.body import Body, check_fields, expecting
from jaxserve.server.schemas.common import SamplingBody, ThinkingBudget
from jaxserve.server.schemas.harmless import HARMLESS_IN_MESSAGES, HARMLESS_IN_PARTS
from jaxserve.server.schemas.left_out import HINT, LeftOut
from jaxserve.server.schemas.tools import ToolsBody, checked_calls, readable_call
from jaxserve.server.schemas.unsupported import UNSUPPORTED_IN_MESSAGES

PARTS = ("text", "refusal")
# Fields of a message with media, and the type of a part for each.
MEDIA_OF_MESSAGES = {"audio": "audio", "images": "image", "videos": "video"}


class ChatMessage(Body):
    """One message of a conversation. Its content is a text or a list of text parts.

    `refusal`: what an assistant said instead of its content.
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str | list[dict[str, Any]] | None, expecting("a string or a list of content parts")] = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # alias of reasoning_content
    tool_calls: list[dict[str, Any]] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a message with role tool: the call that it answers

    def _replace(self, left_out: LeftOut) -> None:
        self.content = left_out.parts(self.content, PARTS)
        extra = self.model_extra or {}
        for name, kind in MEDIA_OF_MESSAGES.items():
            given = extra.pop(name, None) or []
            media = [{"type": kind, kind: each} for each in (given if isinstance(given, list) else [given])]
            own = [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content or []
            self.content = [*own, *left_out.parts(media, ())] if media else self.content
        if self.tool_calls is not None:
            self.tool_calls = [readable_call(call) for call in self.tool_calls]

    def as_dict(self, place: str = "messages") -> dict[str, Any]:
        """Return the message for the chat template.

        Raise RequestError, naming `place`, if it has images, or no content although its role needs some.
        """
        if self.role == "function":
            raise UnsupportedParameter(
                "the role function is not supported: use tool_calls and the role tool",
                field=f"{place}.role",
                value=self.role,
            )
        self.check_extra(UNSUPPORTED_IN_MESSAGES, HARMLESS_IN_MESSAGES, f"{place}.")
        given = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": checked_calls(self.tool_calls or (), f"{place}.tool_calls") or None,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": self._text(place)} | {k: v for k, v in given.items() if v is not None}

    def _text(self, place: str) -> str:
        if self.content is None:
            return silent_content(self.role, self.refusal, place)
        if not isinstance(self.content, list):
            return self.content or self.refusal or ""
        try:
            text = text_of(self.content, f"{place}.content")
        except RequestError as error:
            error.args = (f"{error} ({HINT})",)
            raise
        for index, part in enumerate(self.content):
            where = f"{place}.content.{index}."
            check_fields(part, ("type", *PARTS), {}, HARMLESS_IN_PARTS, where, ignore_unknown=self._ignores_unknown)
        return text


class Conversation(ToolsBody):
    """Messages, and options of the chat template that renders them."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    # Variables of the chat template, which chat_template_kwargs overrides.
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    def opening(self) -> str | None:
        """Return the beginning of the answer if the last message is to be continued, else None."""
        if not self.continue_final_message:
            return None
        return text_of(self.messages[-1].content or "")

    def template_variables(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `Tokenizer.conversation_text`.

        `defaults`: variables that the request may set otherwise. Raise RequestError if the client sets a variable that
        it may not set.
        """
        asked = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        variables = {name: value for name, value in asked.items() if value is not None}
        variables |= self.chat_template_kwargs or {}
        for name in variables:
            if is_reserved(name):
                raise RequestError(
                    f"chat_template_kwargs may not set {name[:40]!r}", field="chat_template_kwargs", value=name
                )
        return {
            **defaults,
            **variables,
            "tools": self.template_tools(),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    def optional_variables(self) -> frozenset[str]:
        """Return the variables that may be ignored if the template does not read them."""
        return OPTIONAL_VARIABLES | ((self.chat_template_kwargs or {}).keys() if self._ignores_unknown else set())


class ChatBody(Conversation, SamplingBody):
    """A chat completion as in OpenAI's API reference, with vLLM's additional sampling parameters."""

    clamps_max_tokens: ClassVar[bool] = False  # max_tokens is lowered if it does not fit after the prompt

    add_special_tokens: bool = False  # the chat template writes them
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool = True
    thinking_token_budget: ThinkingBudget = None

    def check(self) -> None:
        """Raise RequestError if fields contradict each other or are not supported."""
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", field="top_logprobs", value=self.top_logprobs)

    @property
    def client_names(self) -> dict[str, str]:
        """Names that the client uses for parameters of the engine, where they differ."""
        names = {"logprobs": "top_logprobs", "reasoning.max_tokens": "thinking_token_budget"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to return per token, or None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate. max_completion_tokens overrides max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
