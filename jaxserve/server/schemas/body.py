"""The base class of request bodies: strict types, and only fields that are known to be supported or to be harmless."""

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jaxserve.core.errors import UnsupportedParameter
from jaxserve.server.schemas.harmless import HARMLESS
from jaxserve.server.schemas.left_out import LEFT_OUT, LeftOut
from jaxserve.server.schemas.unsupported import UNSUPPORTED, Unsupported, asks_for_nothing, check_unsupported

logger = logging.getLogger(__name__)

# The key of pydantic's validation context that tells whether unknown fields are ignored.
IGNORE_UNKNOWN = "ignore_unknown_fields"
MAX_NAME = 60  # characters of a field's name that messages repeat, and with which other names are compared


def expecting(what: str) -> WrapValidator:
    """Return a validator for a union, whose error says that the field must be `what` instead of naming each branch."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("union", "it must be {what}", {"what": what}) from None

    return WrapValidator(check)


class Body(BaseModel):
    """A request body without type conversions. Fields that it does not define are checked by `check_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    _ignores_unknown: bool = PrivateAttr(False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    def model_post_init(self, context: Any, /) -> None:
        """Remember what the server passes as pydantic's validation context: whether it ignores unknown fields.

        If it replaces what the model cannot read, let `_replace` do so.
        """
        self._ignores_unknown = bool(context and context.get(IGNORE_UNKNOWN))
        if context and (left_out := context.get(LEFT_OUT)) is not None:
            self._replace(left_out)

    def _replace(self, left_out: LeftOut) -> None:
        """Put texts in the place of what the model cannot read. Bodies that may have such content define this."""

    def _leave_out_server_tools(self, kinds: Collection[str | None]) -> None:
        """Drop and log tools of other types than `kinds`, those that a server runs, if unknown fields are ignored."""
        tools = getattr(self, "tools", None)
        if not self._ignores_unknown or not tools:
            return
        kept = [tool for tool in tools if tool.get("type") in kinds]
        if len(kept) < len(tools):
            logger.info("left out %d tools that the client does not run itself", len(tools) - len(kept))
            self.tools = kept

    def check_extra(
        self,
        table: Mapping[str, Unsupported] = UNSUPPORTED,
        harmless: Collection[str] = HARMLESS,
        place: str = "",
    ) -> None:
        """Raise UnsupportedParameter if a field that the body does not define is in `table` or is not `harmless`.

        With --ignore-unknown-fields, ignore and log fields that are neither. `place` is the prefix of a field in the
        error: its parent and a dot. Objects in fields are checked as well. Values that ask for nothing are accepted.
        """
        known = self.__class__.model_fields
        given = self.model_extra or {}
        if not place:
            given = {name: x for name, x in given.items() if name in table or not asks_for_nothing(name, x)}
        ignored = check_fields(given, known, table, harmless, place, ignore_unknown=self._ignores_unknown)
        if ignored and not place:
            names = ", ".join(repr(name[:40]) for name in ignored[:8])
            logger.info("ignored %d unknown fields: %s", len(ignored), names)
        for name in known:
            value = getattr(self, name)
            if isinstance(value, Body):
                value.check_inside(f"{place}{name}.")

    def check_inside(self, place: str) -> None:
        """Raise UnsupportedParameter for a field that this object, which is part of a body, does not have."""
        self.check_extra({}, (), place)


def check_fields(
    given: Mapping[str, Any],
    known: Collection[str],
    table: Mapping[str, Unsupported],
    harmless: Collection[str],
    place: str = "",
    *,
    ignore_unknown: bool = False,
) -> list[str]:
    """Return the names of fields that are neither `known` nor in `table` nor `harmless`, if `ignore_unknown`.

    Otherwise raise UnsupportedParameter for the first of them. Raise it for every field in `table` whose value is not
    neutral.
    """
    check_unsupported(given, table, place)
    unknown = [name for name in given if name not in known and name not in harmless and name not in table]
    if unknown and not ignore_unknown:
        raise _unknown_field(unknown[0], known, place, given[unknown[0]])
    return unknown


def _unknown_field(name: str, known: Collection[str], place: str, value: Any) -> UnsupportedParameter:
    nearest = difflib.get_close_matches(name, sorted(known), n=1) if len(name) <= MAX_NAME else []
    question = f": did you mean {nearest[0]}?" if nearest else ""
    shown = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
    message = f"{place}{shown} is not a known field{question}"
    return UnsupportedParameter(message, field=f"{place}{name}", value=value)
