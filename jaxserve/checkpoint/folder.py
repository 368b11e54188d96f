"""The files of a model's folder: which safetensors to read, and advice for a folder without any."""

import logging
import re
from pathlib import Path

from jaxserve.core.errors import CheckpointError
from jaxserve.core.model_files import INDEX_NAME, SHARD, SINGLE_NAME, about_other_weights, safetensors_files

log = logging.getLogger(__name__)

EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"
HUB_PAGE = re.compile(r"(?:https?:/+)?(?:www\.)?(?:huggingface|hf)\.co/([\w.-]+/[\w.-]+)")


def check_folder(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a folder with a config.json, saying what it is instead."""
    if path.suffix == ".gguf" and path.exists():
        raise CheckpointError(f"{path}: GGUF is not supported; a model is a folder with config.json and safetensors")
    if not path.is_dir():
        if path.exists():
            raise CheckpointError(f"{path}: is a file; a model is a folder with config.json and safetensors")
        page = HUB_PAGE.match(str(path))
        if page:
            raise CheckpointError(f"{path} is an address: give the model's name alone, {page[1]}")
        raise CheckpointError(
            f"{path}: no such directory. A model is a folder, or a name on Hugging Face's hub such as {EXAMPLE}"
        )
    if (path / "config.json").is_file():
        return
    message = f"{path / 'config.json'}: missing; a model directory has a config.json"
    if (path / "adapter_config.json").is_file():
        message += (
            ". This is a LoRA adapter, which is not supported: merge it into its base model (merge_and_unload of peft)"
        )
    elif snapshots := sorted(path.glob("snapshots/*/config.json")):
        message += f". This is a folder of Hugging Face's cache; the model is in {snapshots[-1].parent}"
    elif others := _others(path):
        message += f". {others}"
    raise CheckpointError(message)


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a folder without an index: the single one, or all shards.

    Raise `CheckpointError` if there is no such file, or a shard is missing.
    """
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME]
    files = [directory / name for name in safetensors_files(file.name for file in directory.iterdir())]
    shards = {file: match for file in files if (match := SHARD.fullmatch(file.name))}
    if shards:
        _check_complete(directory, shards)
        log.warning("%s: has no %s; the tensors of its %d shards are read", directory, INDEX_NAME, len(shards))
        return list(shards)
    if len(files) == 1:
        return files
    message = f"{directory}: has neither {SINGLE_NAME} nor {INDEX_NAME}"
    if files:
        message += f", and {len(files)} other safetensors files ({files[0].name}, ...) whose order is unknown"
    others = _others(directory)
    raise CheckpointError(f"{message}. {others}" if others else message)


def _check_complete(directory: Path, shards: dict[Path, re.Match[str]]) -> None:
    sets = {(match[1], match[3]) for match in shards.values()}
    if len(sets) > 1:
        names = " and ".join(f"{name}-*-of-{count}" for name, count in sorted(sets))
        raise CheckpointError(
            f"{directory}: has the shards {names} and no {INDEX_NAME}, so it is unknown which to read"
        )
    ((name, count),) = sets
    numbers = {int(match[2]) for match in shards.values()}
    for number in range(1, int(count) + 1):
        if number not in numbers:
            missing = f"{name}-{number:0{len(count)}}-of-{count}.safetensors"
            raise CheckpointError(f"{directory / missing}: shard is missing")


def _others(directory: Path) -> str:
    return about_other_weights([file.name for file in directory.iterdir()])
