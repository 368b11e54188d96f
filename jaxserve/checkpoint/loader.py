"""An open checkpoint: its configuration, and its blocks, which are read one at a time."""

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
from jaxserve.checkpoint.mapping import PackTarget, numpy_dtype, pack_block, stacked_name, tensor_shapes
from jaxserve.checkpoint.reconcile import reconcile_head, warn_of_unused
from jaxserve.checkpoint.refit import fitted
from jaxserve.checkpoint.rounding import round_block
from jaxserve.checkpoint.safetensors import SafetensorsStore, StoredTensor
from jaxserve.checkpoint.values import check_values
from jaxserve.checkpoint.variants import FOLDER, MANIFEST, VariantStore
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.config import DType, ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.quantization import QArray

DUMMY_STDDEV = 0.02
# Numbers drawn for a tensor, which repeats them. A prime, so that the rows of a tensor differ.
DUMMY_PERIOD = 1_000_003

LoadFormat = Literal["auto", "safetensors", "dummy"]


class TensorStore(Protocol):
    """A store of tensors by their names in the checkpoint."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor. Raise `CheckpointError` naming file and tensor if it is missing or has another shape."""
        ...

    def stored(self, name: str, shape: tuple[int, ...]) -> Sequence[np.ndarray | StoredTensor]:
        """Return the stored tensors that make up a tensor, unread if they are in a file. Raise as `get`."""
        ...

    def remember(self) -> None:
        """Check from now on that a tensor is unchanged whenever it is read again, or raise `CheckpointError`."""
        ...


class DummyStore:
    """A store of random tensors, the same in each run. Norms are ones, and experts are not stacked."""

    def __contains__(self, name: str) -> bool:
        return False

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a float32 tensor whose values depend on its name and shape alone."""
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        size = math.prod(shape)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values = rng.standard_normal(min(size, DUMMY_PERIOD), np.float32) * np.float32(DUMMY_STDDEV)
        return np.resize(values, shape)

    def stored(self, name: str, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Return the tensor in a list."""
        return [self.get(name, shape)]

    def remember(self) -> None:
        """Do nothing: a tensor is the same at every reading."""


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    `generation`: the contents of generation_config.json, {} without that file. `prepared`: the variants of its layers
    in the folder `variants`, None without that folder.
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
        """Return a block's parameters in a precision, in the layout that `block` describes.

        A quantised layer comes from the first of these sources that exists: the checkpoint, the prepared variants
        (`jaxserve quantize`), rounding to the nearest. The embedding and the head are always rounded. `between` works
        as in `block`, in full precision only.

        Raise `ConfigError` if `padded` would cut the groups of a stored or prepared layer.
        """
        config, padded = self.config, padded or self.config
        if precision not in BITS:
            return {**self.block(block_id, padded, between)}
        if not is_layer(block_id):
            return round_block(padded, block_id, self.block(block_id, padded), precision)
        stored = None
        if isinstance(self.store, ImportedStore) and precision == self.precision(block_id):
            stored = self.store.block(config, block_id)
        elif self.prepared is not None and precision in self.prepared.precisions:
            stored = self.prepared.layer(layer_index(block_id), precision)
        if stored is not None:
            return fitted(stored, config, padded)
        return round_block(padded, block_id, self.block(block_id, padded), precision)

    def remember(self, block_id: str | None = None) -> None:
        """Check from now on that tensors are unchanged when they are read again, or raise `CheckpointError`.

        Those tensors of a block that have not been read since the first call are read now, for their checksums.
        """
        self.store.remember()
        if block_id is None:
            return
        shapes = tensor_shapes(self.config, block_id, stacked_experts=stacked_name(block_id) in self.store)
        for name, shape in shapes.items():
            for tensor in self.store.stored(name, shape):
                if isinstance(tensor, StoredTensor) and not tensor.is_remembered:
                    tensor.read()

    def is_rounded(self, block_id: str, precision: str) -> bool:
        """Return whether `variant` quantises the block itself."""
        if precision not in BITS:
            return False
        return not is_layer(block_id) or self.method(block_id, precision) == "rtn"

    def method(self, block_id: str, precision: str) -> str:
        """Return how the layer that `variant` returns was quantised.

        This is the format of the checkpoint, the method of `jaxserve quantize`, or "rtn" (rounding to the nearest).
        """
        if isinstance(self.store, ImportedStore) and precision == self.precision(block_id):
            return self.store.scheme.format
        if self.prepared is not None and precision in self.prepared.precisions:
            return self.prepared.method(precision).name
        return "rtn"

    def precision(self, block_id: str) -> str:
        """Return the precision a block is stored in: the configuration's dtype unless the checkpoint is quantised."""
        return (
            self.store.precision(self.config, block_id) if isinstance(self.store, ImportedStore) else self.config.dtype
        )

    def block(
        self, block_id: str, padded: ModelConfig | None = None, between: Callable[[], None] | None = None
    ) -> dict[str, np.ndarray]:
        """Return a block's parameters by their dotted path in its module, packed for `padded` (by default `config`).

        Only the block's tensors are read. The arrays are new, in the dtype of the configuration. With tied embeddings
        the head's `weight` is a copy of the embedding's, for the caller to share. `between` is called before each
        tensor is read, and may wait until the cores are free.

        Without `between`, raise `CheckpointError` for a value that the configuration's dtype cannot hold, and warn of
        values that are not finite.
        """
        config = self.config
        target = PackTarget(config, padded or config, numpy_dtype(config))
        stacked = stacked_name(block_id) in self.store
        shapes = tensor_shapes(config, block_id, stacked_experts=stacked)

        def read(name: str) -> np.ndarray:
            if between is not None:
                between()
            tensor = self.store.get(name, shapes[name])
            if between is None:  # with `between`, the values were checked when the model was loaded
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
    """Open a Hugging Face checkpoint directory: config.json and safetensors, in one file or in shards.

    Every tensor's presence, shape and byte range is checked now, but none is read. `load_format="dummy"` makes random
    weights from config.json alone; `path` may then be that file. `dtype` overrides the dtype of config.json, and
    tensors are cast to it. `prepared`: use the variants in the folder `variants`, if it exists.

    Raise `CheckpointError` naming the file, and the tensor if one is at fault.
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

    Raise `CheckpointError` for the first tensor that is missing, truncated or has another shape.
    """
    shapes = tensor_shapes(config, block_id, stacked_experts=stacked_name(block_id) in store)
    for name, shape in shapes.items():
        store.stored(name, shape)
    return set(shapes)
