"""A checkpoint directory as a configuration and blocks that are read one at a time."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jaxserve.checkpoint.dummy import DummyStore
from jaxserve.checkpoint.folder import check_folder
from jaxserve.checkpoint.imported import ImportedStore
from jaxserve.checkpoint.mapping import Target, numpy_dtype, pack_block, stacked_name, tensor_shapes
from jaxserve.checkpoint.reconcile import settle_vocabulary, tell_of_unused
from jaxserve.checkpoint.rounded import rounded_block
from jaxserve.checkpoint.safetensors import SafetensorsStore, StoredTensor
from jaxserve.checkpoint.values import check_values
from jaxserve.checkpoint.variants import FOLDER, MANIFEST, VariantStore, fitted
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.config import DType, ModelConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.core.files import read_json_object
from jaxserve.core.precision import BITS
from jaxserve.models import config_from_hf
from jaxserve.models.hf import token_ids
from jaxserve.models.registry import is_headless
from jaxserve.quantization import QArray
from jaxserve.quantization.formats import Scheme, read_scheme

log = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "dummy"]
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ put the settings that config.json may lack, and what they mean."""


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
        physical: ModelConfig | None = None,
        between: Callable[[], None] | None = None,
    ) -> dict[str, np.ndarray | QArray]:
        """A block's parameters in a precision, in the layout of `block`; `between` as there, in full precision.

        A quantised layer is as the checkpoint stores it, or as it was prepared (`jaxserve quantize`), or rounded to the
        nearest: the first of these that there is. What was prepared is not used where `physical` pads the weights or
        cuts their groups. Other blocks are always rounded.
        """
        config, physical = self.config, physical or self.config
        if precision not in BITS:
            return {**self.block(block_id, physical, between)}
        if not is_layer(block_id):
            return rounded_block(physical, block_id, self.block(block_id, physical), precision)
        if isinstance(self.store, ImportedStore) and precision == self.precision(block_id):
            return self.store.block(config, physical, block_id)
        if self.prepared is not None and precision in self.prepared.precisions:
            variant = fitted(self.prepared.layer(layer_index(block_id), precision), config, physical)
            if variant is not None:
                return variant
            log.warning(
                "%s in %s is rounded to the nearest: what was prepared cannot be split (tp)", block_id, precision
            )
        return rounded_block(physical, block_id, self.block(block_id, physical), precision)

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
        self, block_id: str, physical: ModelConfig | None = None, between: Callable[[], None] | None = None
    ) -> dict[str, np.ndarray]:
        """A block's parameters by their dotted path in its module, packed for `physical` (by default `config`).

        Reads the block's tensors and nothing else; the arrays are new, in the dtype of the configuration. With tied
        embeddings the head's `weight` is a copy of embed's, for the caller to share. `between` is called before each
        tensor is read, and may wait: others may need the cores.

        Raises `CheckpointError` for a value that the configuration's dtype cannot hold, and warns of those that are not
        finite, unless `between` is given.
        """
        config = self.config
        target = Target(config, physical or config, numpy_dtype(config))
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
    config, generation, scheme, headless = _read_configs(directory, config_path)
    if dtype != "auto":
        config = replace(config, dtype=dtype)
    if load_format == "dummy":
        return Checkpoint(directory, config, generation, DummyStore())
    files = SafetensorsStore(directory)
    store = files if scheme is None else ImportedStore(files, scheme)
    config = settle_vocabulary(config, store, headless=headless)
    checkpoint = Checkpoint(directory, config, generation, store)
    used = set[str]()
    for block_id in config.block_ids:
        used |= check_tensors(checkpoint.store, config, block_id)
        checkpoint.precision(block_id)
    tell_of_unused(config, store, used)
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


def _read_configs(directory: Path, config_path: Path) -> tuple[ModelConfig, dict[str, Any], Scheme | None, bool]:
    """Return config.json, generation_config.json, how the weights are quantised, and whether there is no head."""
    if not directory.is_dir() or not config_path.is_file():
        check_folder(directory)
    hf = read_json_object(config_path)
    try:
        config, headless = config_from_hf(hf), is_headless(hf)
        settings = _quantization(directory, hf)
        scheme = read_scheme(settings) if settings else None
    except CheckpointError as error:
        raise CheckpointError(f"{config_path}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{config_path}: holds a value of the wrong kind ({error})") from error
    generation_path = directory / "generation_config.json"
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


def _quantization(directory: Path, hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how the weights are quantised, as config.json or else the file beside it says; None: they are not."""
    given = hf.get("quantization_config")
    if given is None and hf.get("compression_config"):  # the older name
        given = {"quant_method": "compressed-tensors", **hf["compression_config"]}
    if hf.get("quantization") and not (given or {}).get("quant_method"):
        raise CheckpointError(
            "its weights are quantised by MLX, which is not supported: take the model they are made of"
        )
    for name, method in QUANTIZATION_FILES.items():
        if not (directory / name).is_file():
            continue
        beside = read_json_object(directory / name)
        if not given:
            return {"quant_method": method, **beside}
        for key in ("bits", "group_size", "sym", "desc_act", "zero_point"):
            if key in given and key in beside and given[key] != beside[key]:
                log.warning(
                    "%s: %s is %r in config.json, which is used, and %r in %s",
                    directory,
                    key,
                    given[key],
                    beside[key],
                    name,
                )
    return given
