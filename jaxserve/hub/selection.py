"""The choice of a repository's files that a model needs. All others, such as pickles, are never downloaded."""

from collections.abc import Collection, Iterable
from enum import Enum
from fnmatch import fnmatchcase

from jaxserve.core.model_files import INDEX_NAME, SHARD, SINGLE_NAME, safetensors_files

CONFIG = "config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model")
# All but the weights.
SMALL = (
    CONFIG,
    "generation_config.json",
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "quantize_config.json",
    "quant_config.json",
    INDEX_NAME,
)


class Need(Enum):
    """The part of a model that is needed: its config.json, its tokenizer, all but its weights, or everything."""

    CONFIG = "config"
    TOKENIZER = "tokenizer"
    SMALL = "small"
    ALL = "all"


def small_files(names: Iterable[str], need: Need) -> list[str]:
    """Return the files other than weights that are needed, of those that a repository has."""
    patterns = (CONFIG,) if need is Need.CONFIG else SMALL
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def weight_files(names: Collection[str], indexed: Iterable[str] | None) -> list[str]:
    """Return the files with the weights, of those that a repository has. `indexed`: those that its index names.

    Without an index it is the single file, or else every safetensors file at the top of the repository.
    """
    if indexed is not None:
        return sorted(set(indexed))
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    return safetensors_files(name for name in names if "/" not in name)


def missing_weights(present: Collection[str], indexed: Iterable[str] | None) -> list[str]:
    """Return the files with weights that a folder lacks, as far as its own files tell."""
    wanted = weight_files(present, indexed)
    missing = [name for name in wanted if name not in present]
    for match in filter(None, map(SHARD.fullmatch, wanted)):
        shards = (f"{match[1]}-{n:0{len(match[2])}}-of-{match[3]}.safetensors" for n in range(1, int(match[3]) + 1))
        missing += [name for name in shards if name not in present]
    return sorted(set(missing)) if wanted else [SINGLE_NAME]
