"""The local files of models that are given by their names on a hub, checked before their weights are downloaded."""

from dataclasses import replace
from pathlib import Path

from jaxserve.checkpoint.configs import check_supported
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.options import check_ranges
from jaxserve.core.progress import Progress, ignore_progress
from jaxserve.hub import Need, fetch, hub_name


def local_folder(source: str | Path, progress: Progress = ignore_progress) -> Path:
    """Return a model's folder: that of the cache, downloaded if need be, if `source` is a name on a hub.

    Raise `CheckpointError` or `ConfigError` if the model cannot be had, or is not supported.
    """
    name = hub_name(source)
    return Path(source) if name is None else fetch(name, check=check_supported, progress=progress).folder


def with_local_files(config: EngineConfig, progress: Progress = ignore_progress) -> EngineConfig:
    """Return the configuration with folders in place of names on a hub, and without the token.

    Raise as `local_folder`, and `ConfigError` for a revision of a model that is a folder.
    """
    check_ranges(config)
    return replace(
        config,
        model=_local_model(config, progress),
        tokenizer=_local_tokenizer(config, progress),
        revision=None,
        download_dir=None,
        hf_token=None,
    )


def _local_model(config: EngineConfig, progress: Progress) -> str | Path | None:
    if config.model is None:
        if config.revision is not None:
            raise ConfigError(f"revision is {config.revision!r}, but no model is given: the bundled one has none")
        return None
    if not str(config.model).strip():
        raise ConfigError(
            f"model is {str(config.model)!r}: give a folder or a name, or leave it out for the bundled model"
        )
    name = hub_name(config.model, config.revision)
    if name is None:
        return config.model
    dummy = config.load_format == "dummy"
    return fetch(
        name,
        Need.SMALL if dummy else Need.ALL,
        download_dir=config.download_dir,
        token=config.hf_token,
        check=check_supported,
        progress=progress,
    ).folder


def _local_tokenizer(config: EngineConfig, progress: Progress) -> str | Path | None:
    name = None if config.tokenizer is None else hub_name(config.tokenizer)
    if name is None:
        return config.tokenizer
    return fetch(
        name, Need.TOKENIZER, download_dir=config.download_dir, token=config.hf_token, progress=progress
    ).folder
