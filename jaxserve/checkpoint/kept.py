"""What a server has kept about a model that nobody prepared: layers in fewer bits, and what they lose.

A folder `background` beside the prepared variants of a model. If the model's folder cannot be written to, it is in the
user's cache folder, where only the folders of the `MAX_MODELS` models that were used last stay. It holds a
`VariantStore`, and files of those who measure.

What is kept is made without being asked for, and never needed: what cannot be read, or was made of other weights, is
ignored.
"""

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.checkpoint.variants import FOLDER, VariantStore
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.core.files import read_json_object, write_file
from jaxserve.models import abstract_block
from jaxserve.quantization import QArray

log = logging.getLogger(__name__)

BACKGROUND = "background"
MODELS = "models"  # the folder of all models in the user's cache folder of jaxserve
MAX_MODELS = 4
SUMS = "checksums.json"


def kept_folder(model: Path, cache: Path | None) -> Path | None:
    """Return the folder for what is kept about a model. `cache` is the user's cache folder of jaxserve.

    It is beside the model if that can be written to, and None if neither can.
    """
    beside = model / FOLDER / BACKGROUND
    if os.access(next(path for path in (beside, *beside.parents) if path.exists()), os.W_OK):
        return beside
    if cache is None:
        return None
    path = model.resolve()
    return cache / MODELS / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"


def make_room(folder: Path) -> None:
    """Delete the folders of other models in the user's cache folder that were not used for longest."""
    if folder.parent.name != MODELS:
        return
    others = sorted((path for path in folder.parent.iterdir() if path != folder), key=lambda path: path.stat().st_mtime)
    for path in others[: max(0, len(others) - MAX_MODELS + 1)]:
        shutil.rmtree(path, ignore_errors=True)


def write_sums(folder: Path, precision: str) -> None:
    """Keep checksums of a precision's files, which are complete."""
    path = folder / SUMS
    sums = _read_sums(path) | {precision: _sums(folder / precision)}
    write_file(path, json.dumps(sums))


def _read_sums(path: Path) -> dict[str, dict[str, int]]:
    try:
        return read_json_object(path, missing_ok=True)
    except CheckpointError:
        return {}


def _sums(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): zlib.crc32(file.read_bytes()) for file in files}


def _layout(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes and dtypes of all arrays."""
    return {name: jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), x) for name, x in parameters.items()}


def _expected(model: ModelConfig, block_id: str, precision: str) -> dict[str, Any]:
    """Return the shapes and dtypes of a block's parameters that are rounded while they are loaded."""
    variables = abstract_block(model, block_id, precision)[1]
    return _layout({name: variable.get_value() for name, variable in variables.items()})


@dataclass(frozen=True)
class KeptLayers:
    """A source of parameters: a checkpoint, with layers that were kept instead of rounded ones.

    A kept layer has the same memory layout as a rounded one, so that it takes its place in every program. Layers that
    somebody has prepared, or that the checkpoint has in this precision, come first.
    """

    checkpoint: Checkpoint
    folder: Path | None
    wanted: tuple[str, ...]  # precisions in which kept layers are used

    def variant(
        self,
        block_id: str,
        precision: str,
        padded: ModelConfig | None = None,
        between: Callable[[], None] | None = None,
    ) -> Mapping[str, np.ndarray | QArray]:
        """Return a block's parameters in a precision, as `Checkpoint.variant` does."""
        checkpoint = self.checkpoint
        if is_layer(block_id) and precision in self.precisions and checkpoint.is_rounded(block_id, precision):
            assert self.store is not None
            try:
                layer = self.store.layer(layer_index(block_id), precision)
            except CheckpointError as error:
                log.warning("%s is rounded to %s, because it cannot be read: %s", block_id, precision, error)
            else:
                if _layout(layer) == _expected(padded or checkpoint.config, block_id, precision):
                    return layer
        return checkpoint.variant(block_id, precision, padded, between)

    def remember(self, block_id: str | None = None) -> None:
        """Check from now on that tensors are unchanged, as `Checkpoint.remember` does."""
        self.checkpoint.remember(block_id)

    def method(self, block_id: str, precision: str) -> str:
        """Return how the layer that `variant` returns was quantised, as `Checkpoint.method` does."""
        kept = precision in self.precisions and self.checkpoint.is_rounded(block_id, precision)
        return self.store.method(precision).name if kept and self.store else self.checkpoint.method(block_id, precision)

    @cached_property
    def store(self) -> VariantStore | None:
        """The kept layers of these weights, None if there are none."""
        if self.folder is None:
            return None
        try:
            store = VariantStore.open(self.folder)
            store.check(self.checkpoint)
        except CheckpointError:
            return None
        return store

    @cached_property
    def precisions(self) -> tuple[str, ...]:
        """The precisions in which all layers were kept and are what was written."""
        if self.folder is None or self.store is None:
            return ()
        sums = _read_sums(self.folder / SUMS)
        wanted = [name for name in self.wanted if name in self.store.precisions]
        return tuple(name for name in wanted if sums.get(name) == _sums(self.folder / name))
