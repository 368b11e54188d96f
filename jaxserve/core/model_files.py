"""The files of a model, in a folder or a repository: which of them are read, and advice about the others."""

import re
from collections.abc import Collection, Iterable

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Prefixes of files whose tensors have other names than the model's.
OTHER_NAMES = ("consolidated", "adapter_model")


def safetensors_files(names: Iterable[str]) -> list[str]:
    """Return the names of the files that may hold the model's weights, sorted."""
    return sorted(name for name in names if name.endswith(".safetensors") and not name.startswith(OTHER_NAMES))


def about_other_weights(names: Collection[str]) -> str:
    """Return a sentence about weights in formats that cannot be read, "" if none of these files has any."""
    names = sorted(names)
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return f"{pickles[0]} is a pickle, which is never loaded: convert it to safetensors"
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"{ggufs[0]} is GGUF, which is not supported: use the model's safetensors"
    if foreign := [name for name in names if name.startswith("consolidated")]:
        return f"{foreign[0]} is in the format of the model's authors: use its safetensors in Hugging Face's format"
    if adapters := [name for name in names if name.startswith("adapter_")]:
        return f"{adapters[0]} belongs to a LoRA adapter: merge it into its base model (merge_and_unload of peft)"
    return ""
