"""Memory-mapped safetensors: every tensor is a view of its file, and every defect names the file and the tensor.

The format (huggingface.co/docs/safetensors): a little-endian uint64 n, n bytes of JSON that give each tensor's dtype,
shape and byte range, then the bytes. It is read here rather than by its library because that copies whole tensors
and does not say which one a truncated file cuts off.
"""

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.core.errors import CheckpointError

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
INTEGERS: Mapping[str, np.dtype] = {
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
}
"""What quantised checkpoints have beside them."""
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsFile:
    """One file, mapped read-only. Raises `CheckpointError` where its header is not what the format says."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        self.data = np.frombuffer(self._map, np.uint8)
        self.start, self.entries = self._header()

    def _header(self) -> tuple[int, dict[str, Any]]:
        size = len(self.data)
        length = int.from_bytes(self.data[:8].tobytes(), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{self.path}: not a safetensors file, or truncated in its header ({size} bytes)")
        try:
            header = json.loads(self.data[8 : 8 + length].tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its safetensors header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: its safetensors header is not a JSON object")
        header.pop("__metadata__", None)
        return 8 + length, header

    def forget(self) -> None:
        """Gives back the memory of what was read; views stay valid, and are read from the file again when touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def get(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, np.dtype] = DTYPES) -> np.ndarray:
        """The tensor as a read-only view of the file; checked against the shape and the dtypes it may have."""
        where = f"{self.path}: tensor {name}"
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{where} is missing")
        try:
            dtype_name, found = str(entry["dtype"]), tuple(entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{where} has a malformed header entry {entry!r}") from error
        if dtype_name not in dtypes:
            raise CheckpointError(f"{where} has dtype {dtype_name}; supported: {', '.join(dtypes)}")
        if found != shape:
            raise CheckpointError(f"{where} has shape {list(found)}, the model's config.json makes it {list(shape)}")
        dtype, size = dtypes[dtype_name], len(self.data) - self.start
        if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{where} has byte range [{begin}, {end}) for shape {list(shape)} of {dtype_name}")
        if end > size:
            raise CheckpointError(f"{where} ends at byte {end} of the data, the file has {size}: it is truncated")
        return self.data[self.start + begin : self.start + end].view(dtype).reshape(shape)


class SafetensorsStore:
    """All tensors of a checkpoint directory by name: one file, or the shards that its index lists."""

    def __init__(self, directory: Path):
        self.directory = directory
        index = directory / INDEX_NAME
        if index.is_file():
            self.source, self.files = index, _open_shards(index)
        else:
            self.source = directory / SINGLE_NAME
            file = SafetensorsFile(self.source)
            self.files = dict.fromkeys(file.entries, file)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def get(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, np.dtype] = DTYPES) -> np.ndarray:
        """A tensor as a read-only view of its file. Raises `CheckpointError` naming the file and the tensor."""
        if name not in self.files:
            raise CheckpointError(f"{self.source}: tensor {name} is missing")
        return self.files[name].get(name, shape, dtypes)

    def forget(self) -> None:
        """Gives back the memory of all that was read; see `SafetensorsFile.forget`."""
        for file in set(self.files.values()):
            file.forget()

    def where(self, name: str) -> str:
        """A tensor and its file, for messages about it."""
        return f"{self.files[name].path if name in self.files else self.source}: tensor {name}"


def _open_shards(index: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the shard that holds it. File names that leave the directory are refused."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no 'weight_map'")
    shards: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: tensor {tensor} is put in {name!r}, not a .safetensors file beside it")
        if name not in shards:
            path = index.parent / name
            if not path.is_file():
                raise CheckpointError(f"{path}: shard is missing (it holds tensor {tensor}, says {index.name})")
            shards[name] = SafetensorsFile(path)
    return {tensor: shards[name] for tensor, name in weight_map.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value
