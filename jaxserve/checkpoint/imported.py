"""Checkpoints quantised by other tools, read as QArrays or dequantised to float32."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.mapping import PackTarget, numpy_dtype, pack_block, tensor_shapes
from jaxserve.checkpoint.safetensors import DTYPES, INTEGERS, SafetensorsStore, StoredTensor
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.quantization.formats import Codes, Scheme, decode, dequantized, find_tensors
from jaxserve.quantization.layer import CONTRACTED, flat_inputs
from jaxserve.quantization.packing import pack
from jaxserve.quantization.qarray import QArray

WEIGHT = ".weight"


@dataclass(frozen=True)
class _Stored:
    """The unread tensors of one weight."""

    files: SafetensorsStore
    name: str

    def has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.files

    def get(self, suffix: str, shape: tuple[int, ...]) -> StoredTensor:
        return self.files.find(f"{self.name}.{suffix}", shape, {**DTYPES, **INTEGERS})

    def fail(self, suffix: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.files.where(f'{self.name}.{suffix}')} {why}")


class ImportedStore:
    """A store of tensors by name, in which quantised weights are dequantised to float32."""

    def __init__(self, files: SafetensorsStore, scheme: Scheme):
        self.files, self.scheme = files, scheme

    def __contains__(self, name: str) -> bool:
        return name in self.files or self.is_quantized(name)

    def remember(self) -> None:
        self.files.remember()

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantised, given its name in the unquantised model."""
        return name.endswith(WEIGHT) and f"{name.removesuffix(WEIGHT)}.{self.scheme.marker}" in self.files

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a tensor, dequantised if need be. Raise `CheckpointError` naming the file and the tensor."""
        if not self.is_quantized(name):
            return self.files.get(name, shape)
        return dequantized(self.codes(name, shape), self.scheme.bits)

    def stored(self, name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
        """Return the stored tensors of a weight, unread. Raise `CheckpointError` naming the file and the tensor."""
        if not self.is_quantized(name):
            return self.files.stored(name, shape)
        return list(self._tensors(name, shape).values())

    def codes(self, name: str, shape: tuple[int, ...]) -> Codes:
        """Return a quantised weight, unpacked. Raise `CheckpointError` naming the file and the tensor."""
        tensors = {suffix: tensor.read() for suffix, tensor in self._tensors(name, shape).items()}
        return decode(self.scheme, tensors, shape)

    def _tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        return find_tensors(self.scheme, _Stored(self.files, name.removesuffix(WEIGHT)), shape)

    def precision(self, config: ModelConfig, block_id: str) -> str:
        """Return the precision a block is stored in. Raise `CheckpointError` if only part of a layer is quantised."""
        weights = [name for name in tensor_shapes(config, block_id) if _is_large(name)]
        if not is_layer(block_id) or not any(map(self.is_quantized, weights)):
            return config.dtype
        for name in weights:
            if not self.is_quantized(name):
                raise CheckpointError(f"{self.files.where(name)} is not quantised, but other weights of its layer are")
        return f"int{self.scheme.bits}"

    def block(self, config: ModelConfig, block_id: str) -> dict[str, np.ndarray | QArray]:
        """Return the parameters of a quantised layer without padding, with the codes that are stored.

        Scales in bfloat16 keep their dtype, and others become float32.
        """
        shapes = tensor_shapes(config, block_id)
        weights = {name: self.codes(name, shape) for name, shape in shapes.items() if _is_large(name)}
        bfloat16 = np.dtype(ml_dtypes.bfloat16)
        exact = (
            bfloat16 if all(weight.scales.dtype == bfloat16 for weight in weights.values()) else np.dtype(np.float32)
        )
        symmetric = self.scheme.symmetric and not any(np.any(weight.zeros) for weight in weights.values())

        def packed(dtype: np.dtype, read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
            return pack_block(PackTarget(config, config, dtype), block_id, read)

        def field(name: str, *, of: str) -> np.ndarray:
            """Return one field of a weight, repeated to the weight's shape, so that it is packed like the weight."""
            if name not in weights:
                return np.zeros(shapes[name], np.uint8)
            values = getattr(weights[name], of)
            return np.repeat(values, shapes[name][1] // values.shape[1], axis=1)

        def other(name: str) -> np.ndarray:
            return np.zeros(shapes[name], np.uint8) if name in weights else self.get(name, shapes[name])

        codes, scales = (
            packed(np.dtype(np.uint8), partial(field, of="codes")),
            packed(exact, partial(field, of="scales")),
        )
        zeros = {} if symmetric else packed(exact, partial(field, of="zeros"))
        block: dict[str, np.ndarray | QArray] = {**packed(numpy_dtype(config), other)}
        for name in CONTRACTED.keys() & block.keys():
            block[name] = self._joined(name, codes[name], scales[name], zeros.get(name))
        return block

    def _joined(self, name: str, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> QArray:
        codes = flat_inputs(name, codes)
        size = codes.shape[-1]
        group = min(self.scheme.group, size) or size

        def narrow(values: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(flat_inputs(name, values)[..., ::group])

        narrowed = None if zeros is None else narrow(zeros)
        return QArray(pack(codes, self.scheme.bits), narrow(scales), narrowed, self.scheme.bits, size)


def _is_large(name: str) -> bool:
    # Projections are quantised, norms and routers are not.
    return name.endswith("_proj.weight")
