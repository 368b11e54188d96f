"""Safetensors files, read tensor by tensor. Every error names the file and the tensor.

The format (huggingface.co/docs/safetensors): a little-endian uint64 n, n bytes of JSON that give each tensor's dtype,
shape and byte range, then the bytes. The library of that name is not used, for two reasons. It does not say which
tensor a truncated file cuts off. And it maps files into memory: if a mapped file is truncated while the server runs,
touching it kills the process, whereas reading it reports an error.
"""

import contextlib
import json
import logging
import math
import os
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.folder import weight_files
from jaxserve.core.aligned_arrays import aligned_zeros
from jaxserve.core.errors import CheckpointError
from jaxserve.core.files import is_lfs_pointer, lfs_error, read_json_object
from jaxserve.core.model_files import INDEX_NAME, SINGLE_NAME

log = logging.getLogger(__name__)

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# Further types in quantised checkpoints.
INTEGERS: Mapping[str, np.dtype] = {
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Bytes that are read at once. They are still in a processor's cache when their checksum is computed.
CHUNK = 1 << 20


class SafetensorsFile:
    """An open safetensors file. Its methods raise `CheckpointError` if its header is malformed, or its bytes change.

    It stays open, so that a file that is deleted or replaced later is still read as it was.
    """

    def __init__(self, path: Path):
        self.path = path
        self._checksums: dict[str, int] | None = None  # of tensors' bytes, by name; None before `remember`
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self._opened = self._status()
            self.size, _ = self._opened
            self.start, self.entries = self._header()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error

    def _status(self) -> tuple[int, int]:
        """Return the size and the time of the last change, which differ once the file has been written to."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _header(self) -> tuple[int, dict[str, Any]]:
        first = os.pread(self._descriptor, 8, 0)
        length = int.from_bytes(first, "little")
        if is_lfs_pointer(os.pread(self._descriptor, 64, 0)):
            raise lfs_error(self.path)
        if len(first) < 8 or length > min(self.size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: not a safetensors file, or truncated in its header ({self.size} bytes)"
            )
        text = np.zeros(length, np.uint8)
        _read(self._descriptor, 8, text)
        try:
            header = json.loads(text.tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its safetensors header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: its safetensors header is not a JSON object")
        header.pop("__metadata__", None)
        return 8 + length, header

    def find(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, np.dtype] = DTYPES) -> "StoredTensor":
        """Return a tensor, unread.

        Raise `CheckpointError` if it is missing, malformed or truncated, or has another shape or dtype.
        """
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
            raise CheckpointError(f"{where} has shape {list(found)}, config.json requires {list(shape)}")
        dtype, size = dtypes[dtype_name], self.size - self.start
        if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{where} has byte range [{begin}, {end}) for shape {list(shape)} of {dtype_name}")
        if end > size:
            raise CheckpointError(f"{where} ends at byte {end} of the data, the file has {size}: it is truncated")
        return StoredTensor(self, name, shape, dtype, self.start + begin)

    def remember(self) -> None:
        """Keep the checksum of each tensor's next reading, and compare all later readings with it."""
        if self._checksums is None:
            self._checksums = {}

    def remembers(self, name: str) -> bool:
        """Return whether a checksum of the tensor is stored."""
        return self._checksums is not None and name in self._checksums

    def read(self, name: str, begin: int, into: np.ndarray) -> None:
        """Fill uint8 [N] with a tensor's bytes. Raise `CheckpointError` if they have changed since they were loaded."""
        if not self.remembers(name):
            found = self._read_first(name, begin, into, checksum=self._checksums is not None)
            if self._checksums is not None:
                self._checksums[name] = found
        elif not self._read_again(name, begin, into):
            raise CheckpointError(
                f"{self.path}: tensor {name} is not what was loaded: the file has been changed since the start. Put "
                "the original file back, or restart to serve the new one"
            )

    def read_part(self, name: str, begin: int, into: np.ndarray) -> None:
        """Fill uint8 [N] with some bytes of a tensor. Raise `CheckpointError` if the file has been changed."""
        self._read_first(name, begin, into, checksum=False)

    def _read_first(self, name: str, begin: int, into: np.ndarray, *, checksum: bool) -> int:
        try:
            found = _read(self._descriptor, begin, into, checksum=checksum)
            changed = found is None or self._status() != self._opened
        except OSError as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read ({error.strerror})") from error
        if found is None or changed:
            raise CheckpointError(
                f"{self.path}: has been changed while it was being loaded (tensor {name}). Start again when it is "
                "complete"
            )
        return found

    def _read_again(self, name: str, begin: int, into: np.ndarray) -> bool:
        """Read from the open file, or else from the file now at its path, and return whether the checksum matches."""
        assert self._checksums is not None
        known = self._checksums[name]
        with contextlib.suppress(OSError):
            if _read(self._descriptor, begin, into, checksum=True) == known:
                return True
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return _read(file.fileno(), begin, into, checksum=True) == known
        return False


def _read(descriptor: int, begin: int, into: np.ndarray, *, checksum: bool = False) -> int | None:
    """Fill uint8 [N] from a file's byte `begin` on, and return the CRC-32 of the bytes, or 0 without `checksum`.

    Return None if the file is too short.
    """
    found, done, view = 0, 0, memoryview(into)
    while done < len(into):
        part = view[done : done + CHUNK]
        count = os.preadv(descriptor, [part], begin + done)
        if count == 0:
            return None
        if checksum:
            found = zlib.crc32(part[:count], found)
        done += count
    return found


@dataclass(frozen=True)
class StoredTensor:
    """An unread tensor in a file."""

    file: SafetensorsFile
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int  # offset of its first byte in the file

    @property
    def is_remembered(self) -> bool:
        """True if a checksum is stored, so that the tensor must be unchanged when it is read again."""
        return self.file.remembers(self.name)

    def read(self) -> np.ndarray:
        """Return the tensor in new memory. Raise `CheckpointError` if its bytes have changed since they were loaded."""
        array = aligned_zeros(self.shape, self.dtype)
        self.file.read(self.name, self.begin, array.reshape(-1).view(np.uint8))
        return array

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        """Return some rows [n, C] of the tensor seen as a matrix [R, C], without reading the remaining rows."""
        width = self.shape[-1]
        rows = np.zeros((len(indices), width), self.dtype)
        for row, index in zip(rows, indices, strict=True):
            self.file.read_part(self.name, self.begin + index * row.nbytes, row.view(np.uint8))
        return rows


class SafetensorsStore:
    """A store of all tensors in a checkpoint directory: one file, the shards of an index, or all shards.

    Names begin with `model.` or `lm_head.` as in a causal language model, independent of the prefix in the files.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        index = directory / INDEX_NAME
        if index.is_file():
            self.source, files = index, _open_shards(index)
        else:
            paths = weight_files(directory)
            self.source = paths[0] if len(paths) == 1 else directory
            files = _joined([SafetensorsFile(path) for path in paths])
        self._stored = _stored_names(files)
        self.files = {name: files[stored] for name, stored in self._stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def find(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, np.dtype] = DTYPES) -> StoredTensor:
        """Return a tensor, unread. Raise `CheckpointError` naming the file and the tensor.

        An embedding or a head with more rows than `shape` is cut to its first rows.
        """
        if name not in self.files:
            raise CheckpointError(f"{self.source}: tensor {name} is missing")
        file, stored = self.files[name], self._stored[name]
        rows = self.rows(name) if name in (EMBEDDING, HEAD) else 0
        if rows > shape[0]:
            return replace(file.find(stored, (rows, *shape[1:]), dtypes), shape=shape)
        return file.find(stored, shape, dtypes)

    def rows(self, name: str) -> int:
        """Return the length of a tensor's first axis, 0 if it is unknown."""
        entry = self.files[name].entries.get(self._stored[name]) if name in self.files else None
        shape = entry.get("shape") if isinstance(entry, dict) else None
        return shape[0] if isinstance(shape, list) and shape and isinstance(shape[0], int) else 0

    def is_zero(self, name: str) -> bool:
        """Return whether a tensor can be read and all its values are 0."""
        entry = self.files[name].entries[self._stored[name]]
        try:
            return not np.any(self.get(name, tuple(entry["shape"])))
        except (CheckpointError, TypeError, KeyError):
            return False

    def share(self, name: str, source: str) -> None:
        """Give the missing tensor `name` the values of the tensor `source`."""
        self.files[name], self._stored[name] = self.files[source], self._stored[source]

    def get(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, np.dtype] = DTYPES) -> np.ndarray:
        """Return a tensor, read into new memory. Raise `CheckpointError` naming the file and the tensor."""
        return self.find(name, shape, dtypes).read()

    def stored(self, name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
        """Return a list of one unread tensor. Raise `CheckpointError` naming the file and the tensor."""
        return [self.find(name, shape)]

    def remember(self) -> None:
        """Keep the checksum of each tensor's next reading, and compare all later readings with it."""
        for file in set(self.files.values()):
            file.remember()

    def where(self, name: str) -> str:
        """Return the file and the name of a tensor, for messages about it."""
        return f"{self.files[name].path if name in self.files else self.source}: tensor {name}"


def _stored_names(files: Mapping[str, SafetensorsFile]) -> dict[str, str]:
    """Return the stored name of each tensor by its name in a causal language model.

    Models saved without their head lack the prefix `model.`, and wrapped models have a longer one.
    """
    _, _, suffix = EMBEDDING.partition(".")
    found = [name.removesuffix(suffix) for name in files if name == suffix or name.endswith(f".{suffix}")]
    if len(found) > 1:  # towers for images and draft heads have embeddings too
        found = [prefix for prefix in found if any(name.startswith(f"{prefix}layers.0.self_attn.") for name in files)]
    if len(found) != 1 or found == ["model."]:
        return {name: name for name in files}
    (prefix,) = found
    outer = prefix.removesuffix("model.")

    def usual(name: str) -> str:
        if name.startswith("lm_head."):
            return name
        return f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name.removeprefix(outer)

    return {usual(name): name for name in files}


def _joined(files: Sequence[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Return the file of each tensor. Raise `CheckpointError` for a tensor that is in two files."""
    tensors: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            if name in tensors:
                raise CheckpointError(f"{file.path}: tensor {name} is in {tensors[name].path.name} too")
            tensors[name] = file
    return tensors


def _open_shards(index: Path) -> dict[str, SafetensorsFile]:
    """Return the shard of each tensor. File names that leave the directory are refused."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no 'weight_map'")
    shards: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {tensor} is put in {name!r}, which is not a .safetensors file next to the index"
            )
        if name not in shards:
            path = index.parent / name
            if not path.is_file():
                raise CheckpointError(f"{path}: shard is missing (it holds tensor {tensor}, says {index.name})")
            shards[name] = SafetensorsFile(path)
    _warn_of_copies(index, weight_map, shards)
    return {tensor: shards[name] for tensor, name in weight_map.items()}


def _warn_of_copies(index: Path, weight_map: Mapping[str, str], shards: Mapping[str, SafetensorsFile]) -> None:
    """Log what the index ignores: a second copy of a tensor, or a single file next to the shards."""
    copies = [(t, name) for name, shard in shards.items() for t in shard.entries if weight_map.get(t, name) != name]
    if copies:
        tensor, name = copies[0]
        log.warning(
            "%s: %d tensors are in two shards, e.g. %s is also in %s; it is read from %s, as the index says",
            index,
            len(copies),
            tensor,
            name,
            weight_map[tensor],
        )
    if SINGLE_NAME not in shards and (index.parent / SINGLE_NAME).is_file():
        log.warning("%s is not read: %s lists other files", index.parent / SINGLE_NAME, index.name)
