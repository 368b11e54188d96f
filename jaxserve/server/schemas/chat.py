"""The body of /v1/chat/completions."""

from typing import Annotated, Any

from pydantic import FailFast, Field

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.engine.chat_template import text_of
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.schemas.common import Body, SamplingBody, described
from jaxserve.server.schemas.unsupported import UNSUPPORTED_IN_MESSAGES, check_unsupported

RESERVED_VARIABLES = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


class ChatMessage(Body):
    """One message of a conversation; its content is text, or a list of text parts."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str | list[dict[str, Any]] | None, described("a string or a list of content parts")] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name for it

    def as_dict(self, place: str = "messages") -> dict[str, Any]:
        """The message for the chat template. Raises RequestError, which names the `place`, for images and tools."""
        if self.role in ("tool", "function"):
            raise UnsupportedParameter("tools are not supported yet", field=f"{place}.role", value=self.role)
        check_unsupported(self.model_extra or {}, UNSUPPORTED_IN_MESSAGES, f"{place}.")
        given = {"name": self.name, "reasoning_content": self.reasoning_content or self.reasoning}
        return {"role": self.role, "content": self._text(place)} | {k: v for k, v in given.items() if v is not None}

    def _text(self, place: str) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        with rename_error_fields({"messages.content": f"{place}.content"}):
            return text_of(self.content)


class Conversation(Body):
    """Messages and how the model's chat template renders them."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # this and the next as in chat_template_kwargs, which go first
    reasoning_effort: str | None = None

    def template_variables(self) -> dict[str, Any]:
        """Keyword arguments of `Tokenizer.apply_chat_template`. Raises RequestError for what a client may not set."""
        asked = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        variables = {name: value for name, value in asked.items() if value is not None}
        variables |= self.chat_template_kwargs or {}
        for name in variables:
            if name in RESERVED_VARIABLES or "template" in name or not name.isidentifier():
                raise RequestError(
                    f"chat_template_kwargs may not set {name[:40]!r}", field="chat_template_kwargs", value=name
                )
        return {
            **variables,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


class ChatBody(Conversation, SamplingBody):
    """See OpenAI's reference of chat completions; sampling parameters beyond it as in vLLM."""

    add_special_tokens: bool = False  # the template writes them itself
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """Raises RequestError for what does not fit together or is not served."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", field="top_logprobs", value=self.top_logprobs)

    @property
    def names(self) -> dict[str, str]:
        names = {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to return, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
