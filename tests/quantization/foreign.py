"""A writer of checkpoints in the layouts of AWQ, GPTQ and compressed-tensors from known codes, scales and zeros.

It follows the formats' descriptions, code by code, and shares nothing with the code that reads them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def into_words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Pack unsigned codes along an axis of a matrix, the first in the lowest bits."""
    each = 32 // bits
    codes = np.moveaxis(codes.astype(np.uint64), axis, -1)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each)))
    words = np.zeros((codes.shape[0], codes.shape[1] // each), np.uint64)
    for word in range(words.shape[1]):
        for place in range(each):
            source = place if order is None else order[place]
            words[:, word] |= codes[:, word * each + source] << np.uint64(bits * place)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


class Weight:
    """A random weight [O, C] = scales * (codes - zeros), with unsigned codes and zeros."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int, symmetric: bool):
        self.group = group or shape[1]
        groups = -(-shape[1] // self.group)
        self.codes = rng.integers(0, 1 << bits, shape)
        self.scales = (rng.uniform(0.01, 0.02, (shape[0], groups)) / (1 << bits) * 8).astype(np.float16)
        self.zeros = np.full(self.scales.shape, 1 << (bits - 1))
        if not symmetric:
            self.zeros = rng.integers(0, 1 << bits, self.scales.shape)
            self.zeros[0, 0] = 0  # the one that GPTQ's first layout cannot store as it is
        self.bits = bits

    @property
    def values(self) -> np.ndarray:
        """float32 [O, C]."""
        of_inputs = np.arange(self.codes.shape[1]) // self.group
        zeros, scales = (x.astype(np.float32)[:, of_inputs] for x in (self.zeros, self.scales))
        return (self.codes - zeros) * scales

    def awq(self) -> dict[str, np.ndarray]:
        return {
            "qweight": into_words(self.codes.T, 4, 1, AWQ_ORDER),
            "qzeros": into_words(self.zeros.T, 4, 1, AWQ_ORDER),
            "scales": self.scales.T.copy(),
        }

    def gptq(self, *, offset: int = 1, order: np.ndarray | None = None) -> dict[str, np.ndarray]:
        stored = (self.zeros.astype(np.int64) - offset) % (1 << self.bits)
        return {
            "qweight": into_words(self.codes.T, self.bits, 0),
            "qzeros": into_words(stored.T, self.bits, 1),
            "scales": self.scales.T.copy(),
            "g_idx": (np.arange(self.codes.shape[1]) // self.group if order is None else order).astype(np.int32),
        }

    def gptq_v2(self) -> dict[str, np.ndarray]:
        return self.gptq(offset=0)

    def pack_quantized(self) -> dict[str, np.ndarray]:
        return {
            "weight_packed": into_words(self.codes, self.bits, 1),
            "weight_scale": self.scales,
            "weight_zero_point": into_words(self.zeros, self.bits, 0),
            "weight_shape": np.array(self.codes.shape, np.int64),
        }

    def int_quantized(self) -> dict[str, np.ndarray]:
        return {
            "weight": (self.codes - 128).astype(np.int8),
            "weight_scale": self.scales,
            "weight_zero_point": (self.zeros - 128).astype(np.int8),
        }


def quantization_config(layout: str, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    """Return the entry of config.json as each project writes it."""
    size = group or -1
    if layout == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": size, "zero_point": not symmetric, "version": "gemm"}
    if layout.startswith("gptq"):
        config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": False}
        return config | {"checkpoint_format": layout}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    entry = {"targets": ["Linear"], "weights": weights | {"group_size": group or None}, "input_activations": None}
    config_groups, name = {"group_0": entry}, layout.replace("_", "-")
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": config_groups, "ignore": ["lm_head"]}


def write(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], layout: str, *, bits: int = 4,
    group: int = 32, symmetric: bool = False, skip: str = "never", ends: tuple[str, ...] = ("_proj.weight",),
) -> dict[str, np.ndarray]:  # fmt: skip
    """Write a model in a layout, and return the float32 tensors that it stands for.

    Tensors whose names have one of these ends are quantised, except those with `skip` in them.
    """
    rng = np.random.default_rng(11)
    stored, values = {}, {}
    for name, shape in shapes.items():
        if name.endswith(ends) and skip not in name:
            weight = Weight(rng, shape, bits, group, symmetric)
            values[name] = weight.values
            tensors = getattr(weight, layout)()
            if symmetric:
                tensors.pop("weight_zero_point", None)
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in tensors.items()}
        else:
            values[name] = stored[name] = rng.normal(size=shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"quantization_config": quantization_config(layout, bits, group, symmetric)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return values
