"""The variant store: every decoder layer in every prepared precision, each read on its own.

A folder, by default `variants` next to the model's files:

    variants.json              the precisions, how they were made, and the leaves of each layer
    int4/layers.0, ...         one Orbax checkpoint per precision and layer: the complete set of the layer's leaves

A precision is written to `int4.incoming`, which is renamed to `int4` once all layers are complete. A writer locks the
file `variants.lock`, which is never deleted.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.checkpoint.mapping import stacked_name, tensor_shapes
from jaxserve.checkpoint.safetensors import StoredTensor
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import CheckpointError
from jaxserve.core.files import read_json_object, write_file
from jaxserve.quantization.qarray import QArray

if TYPE_CHECKING:
    from jaxserve.checkpoint.loader import Checkpoint

# Orbax takes a second to import, so it is imported where variants are read or written.

FOLDER = "variants"
MANIFEST = "variants.json"
LOCK = "variants.lock"
# In format 1, AWQ divided the values that a layer writes into the KV cache by scales of its own.
FORMAT = 2
FINGERPRINT_ROWS = 16  # rows of a tensor
Variant = dict[str, np.ndarray | QArray]


@dataclass(frozen=True)
class Method:
    """The method that made a precision.

    `group`: inputs that share a scale where that divides, 0 for all inputs of an output. `calibration`: the SHA-256 of
    the calibration tokens, None without any.
    """

    name: str
    group: int
    symmetric: bool
    calibration: str | None = None


@dataclass(frozen=True)
class Loss:
    """The loss of all layers in a precision, as nats a token of cross-entropy on held-out text."""

    full: float  # the cross-entropy in full precision
    rounding: float  # what rounding to the nearest adds to it
    method: float  # what the stored layers add


class VariantStore:
    """A reader of variants. Thread-safe."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]):
        """Use `open` instead."""
        self.path, self._manifest = path, manifest

    @classmethod
    def open(cls, path: str | Path) -> "VariantStore":
        """Open a store, reading only its manifest. Raise `CheckpointError` if it is missing or cannot be read."""
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise CheckpointError(f"{path}: has no {MANIFEST}; `jaxserve quantize MODEL` makes a store of variants")
        manifest = read_json_object(path / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{path / MANIFEST}: format {manifest.get('format')!r} is not {FORMAT}, the only supported one; "
                "make the variants again with `jaxserve quantize`"
            )
        if missing := [key for key in ("model", "num_layers", "precisions") if key not in manifest]:
            raise CheckpointError(f"{path / MANIFEST}: has no {', '.join(missing)}")
        return cls(path, manifest)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""
        return self._manifest["num_layers"]

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions in which every layer is stored."""
        return tuple(self._manifest["precisions"])

    def method(self, precision: str) -> Method:
        """Return the method that made a precision. Raise `CheckpointError` for a precision that is not stored."""
        return Method(**self._entry(precision)["method"])

    def loss(self, precision: str) -> Loss | None:
        """Return what a precision loses, None if that was not measured. Raise `CheckpointError` as `method`."""
        measured = self._entry(precision).get("loss")
        return None if measured is None else Loss(**measured)

    def nbytes(self, index: int, precision: str) -> int:
        """Return the bytes of a layer's leaves in a precision."""
        return self._layer(index, precision)["nbytes"]

    def layer(self, index: int, precision: str) -> Variant:
        """Read a layer, and return its parameters by dotted path, in read-only arrays.

        Raise `CheckpointError` if the layer is not stored or cannot be read.
        """
        described = self._layer(index, precision)
        return _read(self.path / precision / layer_name(index), described)

    def check(self, checkpoint: "Checkpoint") -> None:
        """Raise `CheckpointError` if the variants were made from another model."""
        if self._manifest["model"] != fingerprint(checkpoint):
            raise CheckpointError(
                f"{self.path}: its variants were made from another model than {checkpoint.path}; "
                "make them again with `jaxserve quantize`"
            )

    def _entry(self, precision: str) -> Mapping[str, Any]:
        if precision not in self.precisions:
            raise CheckpointError(f"{self.path}: has no {precision}; it has {', '.join(self.precisions) or 'nothing'}")
        return self._manifest["precisions"][precision]

    def _layer(self, index: int, precision: str) -> Mapping[str, Any]:
        layers = self._entry(precision)["layers"]
        if not 0 <= index < len(layers):
            raise CheckpointError(f"{self.path}: has no layer {index}; it has {len(layers)}")
        return layers[index]


class VariantWriter:
    """A writer of precisions, layer by layer. Precisions already in the folder stay unless they are written again.

    Variants made from other weights than the checkpoint's are dropped. Only one writer at a time can use a folder,
    because each one replaces the list of precisions.
    """

    def __init__(self, path: str | Path, checkpoint: "Checkpoint", methods: Mapping[str, Method]):
        """Lock the folder for writing the precisions in `methods`.

        Raise `CheckpointError` if the folder cannot be made, or another writer uses it.
        """
        self.path = Path(path).resolve()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed or the process ends
        except BlockingIOError as error:
            raise CheckpointError(f"{self.path}: another `jaxserve quantize` is writing there") from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: variants cannot be written there ({error.strerror})") from error
        self._methods = dict(methods)
        self._layers: dict[str, dict[int, Any]] = {precision: {} for precision in methods}
        self._manifest: dict[str, Any] = {
            "format": FORMAT,
            "model": fingerprint(checkpoint),
            "num_layers": checkpoint.config.num_layers,
            "precisions": {},
        }
        if (self.path / MANIFEST).is_file():
            found = read_json_object(self.path / MANIFEST)
            if (found.get("format"), found.get("model")) == (FORMAT, self._manifest["model"]):
                self._manifest["precisions"] |= found["precisions"]
        for precision in methods:
            shutil.rmtree(self._incoming(precision), ignore_errors=True)

    def add(self, index: int, precision: str, leaves: Mapping[str, np.ndarray | QArray]) -> int:
        """Write a layer and return its bytes. Raise CheckpointError if it cannot be written."""
        import orbax.checkpoint as ocp

        size = sum(leaf.nbytes for leaf in leaves.values())
        # Orbax's threads would log a traceback each, and the files of the layer would fill what is left of the disk.
        if (free := shutil.disk_usage(self.path).free) < size:
            raise CheckpointError(f"{self.path}: a layer in {precision} needs {size} bytes, and {free} are free there")
        tree = {name: _arrays(leaf) for name, leaf in leaves.items()}
        folder = self._incoming(precision) / layer_name(index)
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(folder, tree)
        except (OSError, ValueError) as error:
            if (reason := _system_error(error)) is None:
                raise
            raise CheckpointError(f"{self.path}: variants cannot be written there ({reason})") from error
        quantized = {n: {"bits": x.bits, "size": x.size} for n, x in leaves.items() if isinstance(x, QArray)}
        described = {name: sorted(arrays) if isinstance(arrays, dict) else None for name, arrays in tree.items()}
        files = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
        self._layers[precision][index] = {
            "nbytes": size,
            "quantized": quantized,
            "leaves": described,
            "files": files,
        }
        return size

    def begin(self, precision: str, method: Method) -> None:
        """Begin a precision with another method, and remove the layers that were added."""
        shutil.rmtree(self._incoming(precision), ignore_errors=True)
        self._layers[precision], self._methods[precision] = {}, method

    def finish(self, losses: Mapping[str, Loss] | None = None) -> VariantStore:
        """Put the new precisions in place of old ones with the same names, once all layers have been added.

        `losses`: what precisions lose, as far as it was measured.
        """
        measured = {precision: {"loss": asdict(loss)} for precision, loss in (losses or {}).items()}
        for precision, layers in self._layers.items():
            assert sorted(layers) == list(range(self._manifest["num_layers"])), (precision, sorted(layers))
            self._manifest["precisions"].pop(precision, None)
        # If the process ends below, the store lacks these precisions and is complete otherwise.
        self._write_manifest()
        for precision, layers in self._layers.items():
            shutil.rmtree(self.path / precision, ignore_errors=True)
            self._incoming(precision).rename(self.path / precision)
            described = [layers[index] for index in sorted(layers)]
            entry = {"method": asdict(self._methods[precision]), "layers": described}
            self._manifest["precisions"][precision] = entry | measured.get(precision, {})
        self._write_manifest()
        self._lock.close()
        return VariantStore.open(self.path)

    def _incoming(self, precision: str) -> Path:
        return self.path / f"{precision}.incoming"

    def _write_manifest(self) -> None:
        write_file(self.path / MANIFEST, json.dumps(self._manifest, indent=1))


def _system_error(error: Exception) -> str | None:
    """Return the error of the operating system that made Orbax fail, None if there was none."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore raises ValueError for them
    return os.strerror(int(code[1])) if code else None


def fingerprint(checkpoint: "Checkpoint") -> str:
    """Return the SHA-256 of the model's shape and of up to 16 evenly spaced rows of each layer's tensors.

    It changes with the weights unless only the remaining rows change, and it needs few reads. Quantised tensors are
    hashed as they are stored.
    """
    config, store = checkpoint.config, checkpoint.store
    shape = (config.architecture, config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim)
    digest = hashlib.sha256(repr(shape).encode())
    for block_id in config.block_ids[1:-1]:
        stacked = stacked_name(block_id) in store
        for name, shape in tensor_shapes(config, block_id, stacked_experts=stacked).items():
            digest.update(f"{name}{shape}".encode())
            for tensor in store.stored(name, shape):
                count = math.prod(tensor.shape[:-1])
                some = _rows(tensor, np.linspace(0, count - 1, min(count, FINGERPRINT_ROWS)).astype(int))
                digest.update(some.tobytes() if some.dtype.kind == "i" else some.astype(np.float32).tobytes())
    return digest.hexdigest()


def _rows(tensor: np.ndarray | StoredTensor, indices: np.ndarray) -> np.ndarray:
    if isinstance(tensor, StoredTensor):
        return tensor.rows(indices.tolist())
    return tensor.reshape(-1, tensor.shape[-1])[indices]


def _arrays(leaf: np.ndarray | QArray) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    arrays = {"codes": leaf.codes, "scales": leaf.scales, "zeros": leaf.zeros}
    return {name: np.asarray(array) for name, array in arrays.items() if array is not None}


def _check_sizes(folder: Path, files: Mapping[str, int]) -> None:
    """Raise `CheckpointError` naming the first file that an interrupted copy or a full disk has cut off.

    `files` has the sizes at the time of writing. Orbax itself would read further files first, and name none.
    """
    for name, written in files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else 0
        if found != written:
            raise CheckpointError(f"{file}: has {found} of {written} bytes; make it again with `jaxserve quantize`")


def _read(path: Path, described: Mapping[str, Any]) -> Variant:
    """Return all leaves of one layer. Raise `CheckpointError` if a file is cut off or cannot be read."""
    import orbax.checkpoint as ocp

    _check_sizes(path, described.get("files", {}))
    args = ocp.RestoreArgs(restore_type=np.ndarray)
    wanted = {name: 0 if kinds is None else dict.fromkeys(kinds, 0) for name, kinds in described["leaves"].items()}
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore(
                path.resolve(), args=ocp.args.PyTreeRestore(wanted, jax.tree.map(lambda _: args, wanted))
            )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    for array in jax.tree.leaves(tree):
        array.flags.writeable = False
    quantized = described["quantized"]
    return {name: QArray(**leaf, **quantized[name]) if name in quantized else leaf for name, leaf in tree.items()}
