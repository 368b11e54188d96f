"""The JSON files of a model's folder: its configuration, the quantisation of its weights, and sampling defaults."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.folder import check_folder
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError, ConfigError, RequestError
from jaxserve.core.files import read_json_object, token_ids
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.sampling_defaults import MAX_NEW_TOKENS, SAMPLING_DEFAULTS
from jaxserve.models import config_from_hf
from jaxserve.models.registry import is_headless
from jaxserve.quantization.formats import Scheme, read_scheme

log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
# The files in which AutoGPTQ and AutoAWQ put settings that config.json may lack, and the method that each one means.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_configs(directory: Path, config_path: Path) -> tuple[ModelConfig, dict[str, Any], Scheme | None, bool]:
    """Return the configuration, the contents of generation_config.json, the quantisation, and whether no head exists.

    Raise `CheckpointError` naming the file that is at fault.
    """
    if not directory.is_dir() or not config_path.is_file():
        check_folder(directory)
    config, scheme, headless = _read_config(directory, config_path)
    generation_path = directory / GENERATION_CONFIG
    generation = read_json_object(generation_path, missing_ok=True)
    if generation.get("eos_token_id") is not None:
        try:
            eos = token_ids(generation["eos_token_id"])
        except CheckpointError as error:
            raise CheckpointError(f"{generation_path}: {error}") from error
        if set(config.eos_token_ids) - set(eos):
            log.warning(
                "%s: eos_token_id is %s in generation_config.json, which is used, and %s in config.json",
                directory,
                list(eos),
                list(config.eos_token_ids),
            )
        config = replace(config, eos_token_ids=eos)
    return config, generation, scheme, headless


def check_supported(directory: Path) -> None:
    """Raise `CheckpointError` unless the model that the folder's config.json describes is supported."""
    _read_config(directory, directory / "config.json")


def _read_config(directory: Path, config_path: Path) -> tuple[ModelConfig, Scheme | None, bool]:
    hf = read_json_object(config_path)
    try:
        config, headless = config_from_hf(hf), is_headless(hf)
        settings = _quantization_settings(directory, hf)
        return config, read_scheme(settings) if settings else None, headless
    except CheckpointError as error:
        raise CheckpointError(f"{config_path}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{config_path}: has a value of the wrong type ({error})") from error


def _quantization_settings(directory: Path, hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation settings of config.json or of a separate file, or None for full precision."""
    given = hf.get("quantization_config")
    if given is None and hf.get("compression_config"):  # the older name
        given = {"quant_method": "compressed-tensors", **hf["compression_config"]}
    if hf.get("quantization") and not (given or {}).get("quant_method"):
        raise CheckpointError(
            "its weights are quantised by MLX, which is not supported: use the model that they were made from"
        )
    for name, method in QUANTIZATION_FILES.items():
        if not (directory / name).is_file():
            continue
        separate = read_json_object(directory / name)
        if not given:
            return {"quant_method": method, **separate}
        for key in ("bits", "group_size", "sym", "desc_act", "zero_point"):
            if key in given and key in separate and given[key] != separate[key]:
                log.warning(
                    "%s: %s is %r in config.json, which is used, and %r in %s",
                    directory,
                    key,
                    given[key],
                    separate[key],
                    name,
                )
    return given


def generation_settings(source: str | Path, own: Mapping[str, Any], directory: Path) -> tuple[Mapping[str, Any], Path]:
    """Return the contents of the generation_config.json that gives the defaults of sampling, and its folder.

    `source`: the option `generation_config`. `own`: the contents of the model's file in `directory`. Raise
    `ConfigError` if the source has no such file, and `CheckpointError` if it cannot be read.
    """
    if str(source) in ("auto", "vllm"):
        return (own if str(source) == "auto" else {}), directory
    file = Path(source) / GENERATION_CONFIG
    if not file.is_file():
        raise ConfigError(
            f"generation_config is {str(source)!r}: it must be auto, vllm or a folder with a {GENERATION_CONFIG} "
            "(--generation-config)"
        )
    return read_json_object(file), file.parent


def sampling_defaults(generation: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the sampling parameters that a model's generation_config.json sets.

    With `"do_sample": false` the temperature is 0, as in Transformers. A value that no request could have is left out
    with a warning.
    """
    defaults = {name: generation[name] for name in SAMPLING_DEFAULTS if _valid(name, generation, directory)}
    return defaults | {"temperature": 0.0} if generation.get("do_sample") is False else defaults


def default_max_new_tokens(generation: Mapping[str, Any], directory: Path) -> int | None:
    """Return `max_new_tokens`, which limits every answer as in vLLM, or None if generation_config.json lacks it."""
    value = {"max_tokens": generation.get(MAX_NEW_TOKENS)}
    return value["max_tokens"] if _valid("max_tokens", value, directory, MAX_NEW_TOKENS) else None


def _valid(name: str, values: Mapping[str, Any], directory: Path, shown: str | None = None) -> bool:
    value = values.get(name)
    if value is None:
        return False
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        log.warning(
            "%s: %s is %r: it must be %s: it is ignored",
            directory / GENERATION_CONFIG,
            shown or name,
            value,
            error.limit,
        )
        return False
    return True
