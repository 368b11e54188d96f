"""The body of /v1/chat/completions."""

from typing import Annotated, Any

from pydantic import FailFast, Field

from jaxserve.core.errors import RequestError
from jaxserve.engine.chat_template import text_of
from jaxserve.server.schemas.common import Body, SamplingBody

RESERVED_VARIABLES = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


class ChatMessage(Body):
    """One message of a conversation; its content is text, or a list of text parts."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message for the chat template. Raises RequestError for images, audio and the like."""
        extra = self.model_extra or {}
        if self.role in ("tool", "function") or extra.get("tool_calls") or extra.get("function_call"):
            raise RequestError(
                "tools are not supported yet, nor messages with calls", field="messages", value=self.role
            )
        message = {"role": self.role, "content": text_of(self.content)}
        return message if self.name is None else {**message, "name": self.name}


class Conversation(Body):
    """Messages and how the model's chat template renders them."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_variables(self) -> dict[str, Any]:
        """Keyword arguments of `Tokenizer.apply_chat_template`. Raises RequestError for what a client may not set."""
        if self.chat_template is not None:
            raise RequestError("a chat template in a request is not accepted", field="chat_template")
        variables = self.chat_template_kwargs or {}
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
    tool_choice: Any = None
    modalities: list[str] | None = None

    def check(self) -> None:
        """Raises RequestError for what does not fit together or is not served."""
        self.check_stream()
        if self.modalities not in (None, ["text"]):
            raise RequestError("modalities other than text are not supported", field="modalities", limit=["text"])
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice is not supported yet", field="tool_choice")
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
