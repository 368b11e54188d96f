"""The base class of request bodies: strict types, and unknown fields that are checked by name or ignored."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jaxserve.server.schemas.unsupported import UNSUPPORTED, Unsupported, check_unsupported

logger = logging.getLogger(__name__)


def expecting(what: str) -> WrapValidator:
    """Return a validator for a union, whose error says that the field must be `what` instead of naming each branch."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("union", "it must be {what}", {"what": what}) from None

    return WrapValidator(check)


class Body(BaseModel):
    """A request body without type conversions. Unknown fields are ignored and their names logged."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    def check_extra(self, table: Mapping[str, Unsupported] = UNSUPPORTED) -> None:
        """Raise RequestError if an unknown field is in `table`. Log the names of other unknown fields."""
        extra = self.model_extra or {}
        check_unsupported(extra, table)
        if extra:
            logger.info(
                "ignored %d unknown fields: %s", len(extra), ", ".join(repr(name[:40]) for name in [*extra][:8])
            )
