"""The request bodies of /v1/embeddings, /tokenize and /detokenize, and what all bodies of embedded texts have."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, WithJsonSchema

from jaxserve.core.errors import RequestError
from jaxserve.server.schemas.body import Body
from jaxserve.server.schemas.chat import ChatMessage, Conversation
from jaxserve.server.schemas.common import Priority, SamplingBody
from jaxserve.server.schemas.harmless import HARMLESS
from jaxserve.server.schemas.prompts import PROMPT_SCHEMA
from jaxserve.server.schemas.tools import ToolsBody
from jaxserve.server.schemas.unsupported import (
    UNSUPPORTED,
    UNSUPPORTED_IN_DETOKENIZE,
    UNSUPPORTED_IN_TOKENIZE,
    check_unsupported,
)

# Tokens do not depend on how an answer is sampled: clients may send the body of a generation to count its tokens.
HARMLESS_IN_TOKENIZE = HARMLESS | SamplingBody.model_fields.keys() | UNSUPPORTED.keys() | {"max_tokens", "logprobs"}


class EmbeddedBody(Body):
    """The fields of all bodies whose texts are embedded."""

    model: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None  # None: True for texts, False for messages
    priority: Priority = 0
    truncate_prompt_tokens: int | None = None


class EmbeddingBody(EmbeddedBody, Conversation):
    """Inputs to embed, as in OpenAI's API reference, or as in vLLM a conversation.

    `dimensions`: the number of the first values of an embedding to return, scaled to length 1 again.
    """

    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = None
    messages: Annotated[list[ChatMessage], FailFast()] = []  # noqa: RUF012 - pydantic copies defaults
    add_generation_prompt: bool = False
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def check(self, hidden_size: int) -> None:
        """Raise RequestError if a field is not supported, or `dimensions` is not between 1 and `hidden_size`."""
        self.check_extra()
        of_others = ToolsBody if self.messages else Conversation
        given = self.model_fields_set & of_others.model_fields.keys()
        check_unsupported({name: getattr(self, name) for name in sorted(given)}, UNSUPPORTED)
        if (self.input is None) == (not self.messages):
            error = RequestError("give either input or messages, not both or none", field="input")
            error.code = None if self.messages else "missing_required_parameter"
            raise error
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            raise RequestError(
                f"dimensions is {self.dimensions}: it must be from 1 to {hidden_size}, the length of the model's "
                "embeddings",
                field="dimensions",
                value=self.dimensions,
                limit=hidden_size if self.dimensions > 0 else 1,
            )


class TokenizeBody(Conversation):
    """A prompt or messages to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FailFast()] = []  # noqa: RUF012 - pydantic copies defaults
    add_special_tokens: bool | None = None  # None: True for a prompt, False for messages
    return_token_strs: bool = False

    def check(self) -> None:
        """Raise RequestError unless exactly one of prompt and messages is given."""
        self.check_extra(UNSUPPORTED_IN_TOKENIZE, HARMLESS_IN_TOKENIZE)
        if (self.prompt is None) == (not self.messages):
            raise RequestError("give either prompt or messages, not both or none", field="prompt")


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]

    def check(self) -> None:
        """Raise UnsupportedParameter if a field is not supported."""
        self.check_extra(UNSUPPORTED_IN_DETOKENIZE)
