"""The request bodies of /v1/score and /v1/rerank."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import FailFast, Field, WithJsonSchema

from jaxserve.core.errors import RequestError
from jaxserve.server.schemas.body import Body, expecting
from jaxserve.server.schemas.other import EmbeddedBody
from jaxserve.server.schemas.prompts import PROMPT_SCHEMA, parse_prompts
from jaxserve.server.schemas.unsupported import UNSUPPORTED_IN_DOCUMENTS, UNSUPPORTED_IN_SCORING, check_unsupported

# The two sides of a score, under the names that they have in vLLM.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

Texts = Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
Side = tuple[str, list[str | tuple[int, ...]]]  # the name of its field, and its prompts


class ScoreBody(EmbeddedBody):
    """Pairs of texts to compare, as in vLLM: one with one, one with each of several, or several with as many."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None

    def sides(self, max_prompts: int) -> tuple[Side, Side]:
        """Return both sides of the pairs. Raise RequestError if a field or the number of texts is not allowed."""
        self.check_extra(UNSUPPORTED_IN_SCORING)
        given = tuple(name for names in SIDES for name in names if getattr(self, name) is not None)
        if (names := tuple(dict.fromkeys(given))) not in SIDES:
            known = ", or ".join(" and ".join(pair) for pair in SIDES)
            got = " and ".join(names) or "none of them"
            raise RequestError(f"give {known}: the body has {got}", field="text_1", value=got, limit=known)
        left, right = (parse_prompts(getattr(self, name), name, max_prompts) for name in names)
        if len(left) not in (1, len(right)):
            raise RequestError(
                f"{names[0]} has {len(left)} entries and {names[1]} has {len(right)}: {names[0]} must have one entry, "
                f"or as many as {names[1]}",
                field=names[0],
                value=len(left),
                limit=len(right),
            )
        return (names[0], left), (names[1], right)


class Document(Body):
    """A text with further fields, which are returned with it."""

    text: str

    def check_inside(self, place: str) -> None:
        """Raise UnsupportedParameter for content that is not text. Any other field is allowed."""
        check_unsupported(self.model_extra or {}, UNSUPPORTED_IN_DOCUMENTS, place)

    def as_dict(self) -> dict[str, Any]:
        """Return the document as it was given."""
        return {"text": self.text, **(self.model_extra or {})}


Text = Annotated[str | Document, expecting("a string or an object with text")]


class RerankBody(EmbeddedBody):
    """Documents to rank by their similarity to a query, as in the APIs of Jina and Cohere.

    `top_n`: the number of results, 0 for all. `return_documents`: None means the endpoint's default.
    `max_tokens_per_doc`: the number of a document's first tokens that are read, None for all.
    """

    query: Text
    documents: Annotated[list[Text], FailFast()]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1)] = None

    def check(self) -> None:
        """Raise RequestError if a field, or a field of a document, is not supported."""
        self.check_extra(UNSUPPORTED_IN_SCORING)
        for index, document in enumerate(self.documents):
            if isinstance(document, Document):
                document.check_inside(f"documents.{index}.")


def texts_of(documents: Sequence[str | Document]) -> list[str]:
    """Return the texts of documents."""
    return [document if isinstance(document, str) else document.text for document in documents]
