"""A checkpoint directory as a configuration and blocks that are read one at a time."""

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxserve.checkpoint.configs import read_configs
from jaxserve.checkpoint.folder import check_folder
from jaxserve.checkpoint.imported import ImportedStore
from jaxserve.checkpoint.mapping import Target, numpy_dtype, pack_block, stacked_name, tensor_shapes
from jaxserve.checkpoint.reconcile import reconcile_head, warn_of_unused
from jaxserve.checkpoint.rounding import round_block
from jaxserve.checkpoint.safetensors import SafetensorsStore, StoredTensor
from jaxserve.checkpoint.values import check_values
from jaxserve.checkpoint.variants import FOLDER, MANIFEST, VariantStore, fitted
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.config import DType, ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.quantization import QArray

log = logging.getLogger(__name__)

DUMMY_STDDEV = 0.02
DUMMY_PERIOD = 1_000_003  # numbers drawn; prime, so that rows of a tensor that repeats them differ

LoadFormat = Literal["auto", "safetensors", "dummy"]


class TensorStore(Protocol):
    """Tensors by their name in the checkpoint."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, which must have this shape; raises `CheckpointError` naming the file and the tensor."""
        ...

    def stored(self, name: str, shape: tuple[int, ...]) -> Sequence[np.ndarray | StoredTensor]:
        """What is stored of the tensor, unread if it is in a file. Raises `CheckpointError` as `get`."""
        ...

    def remember(self) -> None:
        """From now on a tensor must be the same at every reading, or reading it raises `CheckpointError`. Mutates."""
        ...


class DummyStore:
    """Every tensor that is asked for: random normal, the same in each run; norms are ones. Experts are not stacked."""

    def __contains__(self, name: str) -> bool:
        return False

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """float32 of the given shape; depends on the name alone."""
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        size = math.prod(shape)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values = rng.standard_normal(min(size, DUMMY_PERIOD), np.float32) * np.float32(DUMMY_STDDEV)
        return np.resize(values, shape)

    def stored(self, name: str, shape: tuple[int, ...]) -> list[np.ndarray]:
        """What there is of a weight: the tensor."""
        return [self.get(name, shape)]

    def remember(self) -> None:
        """Does nothing: a tensor is the same each time."""


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. `generation` is its generation_config.json, {} where there is none.

    `prepared`: the variants of its layers in the folder's `variants`, if there are any.
    """

    path: Path
    config: ModelConfig
    generation: dict[str, Any]
    store: TensorStore
    prepared: VariantStore | None = None

    def in_dtype(self, dtype: DType) -> "Checkpoint":
        """Return the same checkpoint with its tensors cast to `dtype` as they are read."""
        return replace(self, config=replace(self.config, dtype=dtype))

    def variant(
        self,
        block_id: str,
        precision: str,
        padded: ModelConfig | None = None,
        between: Callable[[], None] | None = None,
    ) -> dict[str, np.ndarray | QArray]:
        """A block's parameters in a precision, in the layout of `block`; `between` as there, in full precision.

        A quantised layer is as the checkpoint stores it, or as it was prepared (`jaxserve quantize`), or rounded to the
        nearest: the first of these that there is. What was prepared is not used where `padded` pads the weights or
        cuts their groups. Other blocks are always rounded.
        """
        config, padded = self.config, padded or self.config
        if precision not in BITS:
            return {**self.block(block_id, padded, between)}
        if not is_layer(block_id):
            return round_block(padded, block_id, self.block(block_id, padded), precision)
        if isinstance(self.store, ImportedStore) and precision == self.precision(block_id):
            return self.store.block(config, padded, block_id)
        if self.prepared is not None and precision in self.prepared.precisions:
            variant = fitted(self.prepared.layer(layer_index(block_id), precision), config, padded)
            if variant is not None:
                return variant
            log.warning(
                "%s in %s is rounded to the nearest: what was prepared cannot be split (tp)", block_id, precision
            )
        return round_block(padded, block_id, self.block(block_id, padded), precision)

    def remember(self, block_id: str) -> None:
        """Has a block's tensors be the same whenever they are read again, or reading them raise `CheckpointError`.

        Reads those of them that have not been read since `remember` was first called. Mutates.
        """
        self.store.remember()
        shapes = tensor_shapes(self.config, block_id, stacked_experts=stacked_name(block_id) in self.store)
        for name, shape in shapes.items():
            for tensor in self.store.stored(name, shape):
                if isinstance(tensor, StoredTensor) and not tensor.is_remembered:
                    tensor.read()

    def forget(self, block_id: str, precision: str) -> None:
        """Gives back what is kept of a prepared layer, which is then read again if it is asked for again."""
        if self.prepared is not None and is_layer(block_id):
            self.prepared.forget(layer_index(block_id), precision)

    def is_rounded(self, block_id: str, precision: str) -> bool:
        """Whether `variant` quantises the block itself, where nothing prepared has to be split."""
        if precision not in BITS:
            return False
        return not is_layer(block_id) or self.method(block_id, precision) == "rtn"

    def method(self, block_id: str, precision: str) -> str:
        """How a layer that `variant` gives, without padding, was quantised.

        The format of the checkpoint, the method of `jaxserve quantize`, or "rtn": rounded to the nearest.
        """
        if isinstance(self.store, ImportedStore) and precision == self.precision(block_id):
            return self.store.scheme.format
        if self.prepared is not None and precision in self.prepared.precisions:
            return self.prepared.method(precision).name
        return "rtn"

    def precision(self, block_id: str) -> str:
        """What the checkpoint has a block in: the configuration's dtype, unless others quantised it."""
        return (
            self.store.precision(self.config, block_id) if isinstance(self.store, ImportedStore) else self.config.dtype
        )

    def block(
        self, block_id: str, padded: ModelConfig | None = None, between: Callable[[], None] | None = None
    ) -> dict[str, np.ndarray]:
        """A block's parameters by their dotted path in its module, packed for `padded` (by default `config`).

        Reads the block's tensors and nothing else; the arrays are new, in the dtype of the configuration. With tied
        embeddings the head's `weight` is a copy of embed's, for the caller to share. `between` is called before each
        tensor is read, and may wait: others may need the cores.

        Raises `CheckpointError` for a value that the configuration's dtype cannot hold, and warns of those that are not
        finite, unless `between` is given.
        """
        config = self.config
        target = Target(config, padded or config, numpy_dtype(config))
        stacked = stacked_name(block_id) in self.store
        shapes = tensor_shapes(config, block_id, stacked_experts=stacked)

        def read(name: str) -> np.ndarray:
            if between is not None:
                between()
            tensor = self.store.get(name, shapes[name])
            if between is None:  # else it has been read before, when the model was loaded
                check_values(f"{self.path}: {name}", tensor, target.dtype)
            return tensor

        return pack_block(target, block_id, read, stacked_experts=stacked)


def open_checkpoint(
    path: str | Path,
    load_format: LoadFormat = "auto",
    dtype: DType | Literal["auto"] = "auto",
    *,
    prepared: bool = True,
) -> Checkpoint:
    """Opens a Hugging Face checkpoint directory: config.json and safetensors, in one file or in shards.

    Every tensor's presence, shape and byte range is checked now, none is read. "dummy" needs config.json only (`path`
    may be that file) and makes random weights. `dtype` overrides the configuration's; tensors are cast to it.
    `prepared`: use the variants of the layers in the folder's `variants`, if there are any.
    Raises `CheckpointError` naming the file and, where there is one, the tensor.
    """
    path = Path(path)
    directory = path.parent if path.is_file() and path.suffix == ".json" else path
    config_path = path if directory != path else directory / "config.json"
    if load_format != "dummy":
        check_folder(directory)
    config, generation, scheme, headless = read_configs(directory, config_path)
    if dtype != "auto":
        config = replace(config, dtype=dtype)
    if load_format == "dummy":
        return Checkpoint(directory, config, generation, DummyStore())
    files = SafetensorsStore(directory)
    store = files if scheme is None else ImportedStore(files, scheme)
    config = reconcile_head(config, store, headless=headless)
    checkpoint = Checkpoint(directory, config, generation, store)
    used = set[str]()
    for block_id in config.block_ids:
        used |= check_tensors(checkpoint.store, config, block_id)
        checkpoint.precision(block_id)
    warn_of_unused(config, store, used)
    if not prepared or not (directory / FOLDER / MANIFEST).is_file():
        return checkpoint
    variants = VariantStore.open(directory / FOLDER)
    variants.check(checkpoint)
    return replace(checkpoint, prepared=variants)


def check_tensors(store: TensorStore, config: ModelConfig, block_id: str) -> set[str]:
    """Return the names of a block's tensors.

    Raises `CheckpointError` for the first of them that is missing, truncated or mis-shaped.
    """
    shapes = tensor_shapes(config, block_id, stacked_experts=stacked_name(block_id) in store)
    for name, shape in shapes.items():
        store.stored(name, shape)
    return set(shapes)
