"""Resolution of a YAML file and command-line options to an `EngineConfig` and a `ServerSettings`."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jaxserve.core.bundled import config_names, config_path
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_yaml, read_text
from jaxserve.core.keywords import nearest
from jaxserve.core.options import options_of
from jaxserve.core.other_values import VALUES
from jaxserve.core.vllm_options import COMMAND_LINE
from jaxserve.server.settings import ServerSettings

RENAMED = {
    field.key: field.name
    for kind in (EngineConfig, ServerSettings)
    for field in options_of(kind)
    if field.key != field.name
}
KEYS = {name: key for key, name in RENAMED.items()}
ENGINE_KEYS = frozenset(field.name for field in fields(EngineConfig))
SERVER_KEYS = frozenset(field.name for field in fields(ServerSettings))
KNOWN = ENGINE_KEYS | SERVER_KEYS

# What a value must be, by the first word of pydantic's types of errors.
MUST_BE = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text: put it between quotes",
    "literal": "{expected}",
    "tuple": "a text, or a list of texts",
    "path": "a path",
}

log = logging.getLogger(__name__)


def read_config(path_or_name: str | Path) -> dict[str, Any]:
    """Return the options (names with underscores) in a YAML file, given by path or by its name in configs/serve.

    Raise ConfigError if the file cannot be read or is not a mapping of options.
    """
    file = config_path("serve", path_or_name)
    if file is None:
        known = ", ".join(config_names("serve"))
        raise ConfigError(f"no file {str(path_or_name)!r}: give a YAML file or one of {known} (--config)")
    value = parse_yaml(read_text(file), file)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{file} must be a mapping of options to values")
    named: dict[str, Any] = {}
    for key, entry in value.items():
        for name, meant in _translated(key, entry, f" in {file}").items():
            if name in named:
                raise ConfigError(f"option {name!r} is given twice in {file}")
            named[name] = meant
    return named


def resolve(from_file: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[EngineConfig, ServerSettings]:
    """Return both configurations. Options `given` on the command line (not None) override the file.

    Raise ConfigError, naming the option, if an option is unknown or has the wrong type.
    """
    chosen = dict(from_file)
    for key, value in given.items():
        chosen |= {} if value is None else _translated(key, value)
    for key in RENAMED.values():
        if isinstance(chosen.get(key), str | int | float):
            chosen[key] = [chosen[key]]
        if isinstance(chosen.get(key), list):
            chosen[key] = tuple(chosen[key])
    engine = {key: value for key, value in chosen.items() if key in ENGINE_KEYS}
    if chosen.get("served_model_names"):
        engine["served_model_name"] = chosen["served_model_names"][0]
    server = {key: value for key, value in chosen.items() if key in SERVER_KEYS}
    return _validated(EngineConfig, engine), _validated(ServerSettings, server)


def _translated(key: str, value: Any, where: str = "") -> dict[str, Any]:
    """Return an option by its field's name, in our spelling; {} for one of another engine that has no effect here.

    Raise ConfigError, with the reason or the most similar option, if it is unknown.
    """
    name = key.replace("-", "_")
    name = RENAMED.get(name, name)
    negated = name not in KNOWN and name.startswith("no_") and isinstance(value, bool)
    if negated:
        name, value = name.removeprefix("no_"), not value
    other = COMMAND_LINE.get(name)
    if name not in KNOWN and other is not None and other.same:
        if other.value is not None:
            return {other.same: other.value} if value else {}
        name = other.same
    if name in KNOWN:
        return {name: VALUES[name](value) if name in VALUES else value}
    if other is None:
        known = {each.replace("_", "-") for each in KNOWN | RENAMED.keys()}
        raise ConfigError(f"unknown option {key!r}{where}{nearest(name.replace('_', '-'), known)}")
    if other.ignored or other.accepts(value):
        if not other.accepts(value):
            log.warning("option %r%s has no effect: %s", key, where, other.reason)
        return {}
    raise ConfigError(f"unknown option {key!r}{where}: {other.reason}")


def _validated(kind: type, values: dict[str, Any]) -> Any:
    """Return a dataclass with checked types. Fields of type Path or float accept what YAML writes for them."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        option = KEYS.get(field, field).replace("_", "-")
        must_be = MUST_BE.get(str(first["type"]).split("_")[0])
        if must_be is None:
            raise ConfigError(f"option {option!r}: {first['msg']}") from error
        given = "" if "key" in field else f" is {first['input']!r}: it"  # keys are not for the log
        raise ConfigError(f"option {option!r}{given} must be {must_be.format(**first.get('ctx', {}))}") from error
