"""Masking of keys, tokens and passwords in the commands and configurations that results contain."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_NAME = r"(?:keys?|secret|password|token|authorization|headers?)"
_OPTION = re.compile(rf"--?(?:[\w-]*[-_])?{_NAME}", re.IGNORECASE)
_KEY = re.compile(rf"(?:\w*[-_])?{_NAME}", re.IGNORECASE)
_INSIDE = (
    re.compile(rf"(--?(?:[\w-]*[-_])?{_NAME}(?:=|\s+))[^\s'\"]+", re.IGNORECASE),  # options within one argument
    re.compile(rf"(\b(?:\w*_)?{_NAME}=)[^\s'\"]+", re.IGNORECASE),  # environment variables, URL parameters
    re.compile(rf"([\"'](?:\w*[-_])?{_NAME}[\"']\s*:\s*[\"'])[^\"']*", re.IGNORECASE),  # JSON
    re.compile(r"(\bBearer\s+)[^\s'\"]+", re.IGNORECASE),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),  # http://user:password@host
)


def masked_command(command: Sequence[str]) -> list[str]:
    """Return the arguments with the values of options like --api-key masked, also inside quoted arguments."""
    masked: list[str] = []
    secret_follows = False
    for argument in command:
        masked.append(MASK if secret_follows else masked_text(argument))
        secret_follows = not secret_follows and _OPTION.fullmatch(argument) is not None
    return masked


def masked(value: Any) -> Any:
    """Return a configuration of mappings, lists and text, masked by the names of keys and by patterns in text."""
    if isinstance(value, Mapping):
        return {key: MASK if item and _KEY.fullmatch(str(key)) else masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """Return text with *** in place of what follows `--api-key`, `API_KEY=`, `"api_key":`, `Bearer` or `//user:`."""
    for pattern in _INSIDE:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def without_key(text: str, key: str | None) -> str:
    """Return text with *** in place of a known key, which a server may repeat in an error."""
    return text.replace(key, MASK) if key else text
