"""Checkpoints made from a seed: numpy gives the same numbers everywhere, so that no weights need to be stored."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def tensor(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """Return a float32 tensor drawn by RandomState, whose streams numpy has promised never to change."""
    values = np.random.RandomState(zlib.crc32(f"{seed}:{name}".encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.2 * values
    elif name.endswith("bias"):
        values *= 0.3
    elif "embed_tokens" in name:
        values *= 0.3  # small next to what the layers add, or tied models would repeat their last token
    else:
        values *= 1.5 / np.sqrt(shape[-1])
    return values.astype(np.float32)


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], seed: int, shards: int = 1
) -> Path:
    """Write config.json and safetensors in `shards` files, and return their folder."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    names = sorted(shapes)
    if shards == 1:
        save_file({name: tensor(name, shapes[name], seed) for name in names}, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        some = names[shard::shards]
        save_file({name: tensor(name, shapes[name], seed) for name in some}, directory / file)
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
