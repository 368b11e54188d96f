"""Structured output in request bodies: the fields of OpenAI, vLLM, SGLang and llama.cpp, which mean the same."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.core.structured import KINDS, StructuredOutput
from jaxserve.server.schemas.body import Body, check_fields, expecting

# The fields at the top level of a body, with the kinds of `StructuredOutput` that they are.
TOP_LEVEL = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
SCHEMA = expecting("a JSON schema: an object, or its text")


class StructuredBody(Body):
    """The fields that demand a structure of the answer. At most one of them may be given."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Annotated[dict[str, Any] | str | bool | None, SCHEMA] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Annotated[dict[str, Any] | str | bool | None, SCHEMA] = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Annotated[dict[str, Any] | str | None, expecting("an object, or its text")] = None

    @property
    def has_structure(self) -> bool:
        """True if a field demands a structure."""
        return any(getattr(self, name) for name in ("response_format", "structured_outputs", *TOP_LEVEL))

    def structured(self) -> StructuredOutput | None:
        """Return what the answer must be, None for free text.

        Raise RequestError that names the field if it is not valid or if there are several.
        """
        asked = list(self._asked())
        if len(asked) > 1:
            first, second = asked[0].place, asked[1].place
            raise RequestError(f"{second} cannot be given together with {first}", field=second)
        return asked[0] if asked else None

    def _asked(self) -> Iterator[StructuredOutput]:
        if self.response_format:
            yield from _of_response_format(self.response_format)
        if self.structured_outputs:
            yield from _of_structured_outputs(self.structured_outputs)
        for name, kind in TOP_LEVEL.items():
            value = getattr(self, name)
            if value is not None and value not in ("", []):
                yield StructuredOutput(**{kind: value}, place=name)


def _of_response_format(given: Mapping[str, Any]) -> Iterator[StructuredOutput]:
    """Yield what OpenAI's `response_format` demands, nothing for free text."""
    asked = {name: value for name, value in given.items() if value is not None}
    kind = asked.pop("type", "text")
    place = "response_format"
    if kind == "json_schema":
        form = asked.pop("json_schema", None)
        if not isinstance(form, dict) or not isinstance(form.get("schema"), dict | bool):
            raise RequestError(
                "response_format.json_schema.schema must be a JSON schema", field="response_format.json_schema.schema"
            )
        check_fields(form, ("schema", "name", "description", "strict"), {}, (), "response_format.json_schema.")
        strict = form.get("strict")
        if not isinstance(strict, bool | None):
            field = "response_format.json_schema.strict"
            raise RequestError(f"{field} must be true or false", field=field, value=strict)
        yield StructuredOutput(json=form["schema"], strict=bool(strict), place="response_format.json_schema.schema")
    elif kind == "json_object":
        schema = asked.pop("schema", None)  # llama.cpp takes a schema here
        yield (
            StructuredOutput(json_object=True, place=place)
            if schema is None
            else StructuredOutput(json=schema, place="response_format.schema")
        )
    elif kind == "structural_tag":
        yield StructuredOutput(structural_tag=asked, place=place)
        return
    elif kind != "text":
        raise UnsupportedParameter(
            f"response_format.type is {str(kind)[:40]!r}: it must be text, json_object, json_schema or structural_tag",
            field="response_format.type",
            value=kind,
        )
    if asked:
        name = next(iter(asked))
        raise UnsupportedParameter(
            f"response_format of type {kind} has no {name[:40]!r}", field=f"response_format.{name}", value=asked[name]
        )


def _of_structured_outputs(given: Mapping[str, Any]) -> Iterator[StructuredOutput]:
    """Yield what vLLM's `structured_outputs` demands, nothing if all its fields have their defaults."""
    given = {name: value for name, value in given.items() if value is not None}
    asked = {name: value for name, value in given.items() if value is not False or name == "json"}
    place = "structured_outputs"
    unknown = sorted(asked.keys() - set(KINDS))
    if unknown:
        name = f"{place}.{unknown[0][:40]}"
        raise UnsupportedParameter(f"{name} is not supported", field=name, value=asked[unknown[0]])
    if asked:
        yield StructuredOutput(**asked, place=f"{place}.{next(iter(asked))}" if len(asked) == 1 else place)
