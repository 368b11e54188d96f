"""Decoders for weights quantised by other tools: AWQ, GPTQ and compressed-tensors.

All formats mean scales * (codes - zeros) with unsigned codes of b bits. They differ in how codes and zeros are packed
into words of 32 bits, lowest bits first. O outputs, C inputs, G groups of inputs:

- AWQ ("gemm"): qweight [C, O/8], qzeros [G, O/8], scales [G, O]; along O, in the order 0 2 4 6 1 3 5 7.
- GPTQ: qweight [C/(32/b), O] along C, qzeros [G, O/(32/b)] along O, scales [G, O]; g_idx [C] holds each input's group.
  Zeros are stored minus one, unless `checkpoint_format` is "gptq_v2".
- compressed-tensors, "pack-quantized": weight_packed [O, C/(32/b)] along C, weight_scale [O, G], and if not symmetric
  weight_zero_point [O/(32/b), G] along O. "int-quantized": weight int8 [O, C], weight_zero_point int8 [O, G].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxserve.core.errors import CheckpointError
from jaxserve.core.numeric import ceil_div

AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
OPTIONAL = ("g_idx", "weight_g_idx")
FORMATS = ("awq", "gptq", "pack-quantized", "int-quantized")


@dataclass(frozen=True)
class Scheme:
    """The quantisation of a checkpoint's weights. `group` 0: one scale for all inputs of an output."""

    format: str
    bits: int
    group: int
    symmetric: bool
    zero_offset: int = 0  # to be added to stored zeros

    def groups(self, inputs: int) -> int:
        """Return the number of groups that `inputs` inputs form."""
        return ceil_div(inputs, self.group) if self.group else 1

    @property
    def per_word(self) -> int:
        """Number of codes in a word of 32 bits."""
        return 32 // self.bits

    @property
    def packed_axes(self) -> tuple[str, ...]:
        """The axes of a weight whose lengths must be multiples of `per_word`."""
        return {"awq": ("outputs",), "gptq": ("outputs", "inputs")}.get(self.format, ())

    @property
    def marker(self) -> str:
        """The suffix of the tensor that every quantised weight has, and no other."""
        return {"awq": "qweight", "gptq": "qweight", "pack-quantized": "weight_packed"}.get(self.format, "weight_scale")


class Codes(NamedTuple):
    """An unpacked weight [O, C]: w = scales * (codes - 2**(b-1) - zeros), as in `QArray`."""

    codes: np.ndarray  # uint8 [O, C]
    scales: np.ndarray  # [O, G], as stored
    zeros: np.ndarray  # float32 [O, G]


class Stored(Protocol):
    """An unread tensor in a file."""

    def read(self) -> np.ndarray: ...


T = TypeVar("T", bound=Stored)
T_co = TypeVar("T_co", bound=Stored, covariant=True)


class Source(Protocol[T_co]):
    """A source of one weight's tensors by the suffix of their names."""

    def has(self, suffix: str) -> bool: ...

    def get(self, suffix: str, shape: tuple[int, ...]) -> T_co:
        """Return a tensor, unread. Raise `CheckpointError` if it is missing or has another shape."""
        ...

    def fail(self, suffix: str, why: str) -> CheckpointError:
        """Return an error that names the file and the tensor."""
        ...


Tensors = dict[str, np.ndarray]
Shape = tuple[int, int]  # (O, C)


def read_scheme(given: Mapping[str, Any]) -> Scheme:
    """Return the scheme that a `quantization_config` describes. Raise `CheckpointError` if it is not supported."""
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"
    readers = {"awq": _awq_scheme, "gptq": _gptq_scheme, "compressed-tensors": _compressed_scheme}
    if method not in readers:
        raise CheckpointError(f"quant_method {method!r} is not supported; supported: {', '.join(readers)}")
    scheme = readers[method](given)
    supported = {"awq": (4,), "int-quantized": (8,)}.get(scheme.format, (4, 8))
    if scheme.bits not in supported:
        raise CheckpointError(f"{method} in {scheme.bits!r} bits is not supported; supported: {supported}")
    return scheme


def find_tensors(scheme: Scheme, source: Source[T], shape: Shape) -> dict[str, T]:
    """Return a weight's tensors by suffix, unread except for an order of the inputs (g_idx).

    Raise `CheckpointError` naming the file and the tensor that is at fault.
    """
    for axis, size in zip(("outputs", "inputs"), shape, strict=True):
        if axis in scheme.packed_axes and size % scheme.per_word:
            raise source.fail(scheme.marker, f"has {size} {axis}, which is not a multiple of {scheme.per_word}")
    inputs, groups = shape[1], scheme.groups(shape[1])
    if groups > 1 and inputs % scheme.group:
        raise source.fail(scheme.marker, f"has {inputs} inputs, which groups of {scheme.group} do not divide")
    wanted = {
        suffix: size for suffix, size in _shapes(scheme, shape).items() if suffix not in OPTIONAL or source.has(suffix)
    }
    tensors = {suffix: source.get(suffix, size) for suffix, size in wanted.items()}
    for suffix in ("g_idx", "weight_g_idx"):
        order = tensors.get(suffix)
        if order is not None and scheme.group and not np.array_equal(order.read(), np.arange(inputs) // scheme.group):
            raise source.fail(
                suffix,
                "groups inputs by their activation order (desc_act, actorder), which would reorder them at every"
                " step and is not supported; supported: groups of neighbouring inputs",
            )
    return tensors


def decode(scheme: Scheme, tensors: Tensors, shape: Shape) -> Codes:
    """Return the codes of a weight [O, C] from its tensors by suffix, as `find_tensors` lists them."""
    return {"awq": _awq, "gptq": _gptq, "pack-quantized": _packed, "int-quantized": _integers}[scheme.format](
        scheme, tensors, shape
    )


def dequantized(weight: Codes, bits: int) -> np.ndarray:
    """Return the weight as float32 [O, C]."""
    outputs, inputs = weight.codes.shape
    values = weight.codes.reshape(outputs, weight.scales.shape[1], -1).astype(np.float32) - (1 << (bits - 1))
    values = (values - weight.zeros[..., None]) * weight.scales.astype(np.float32)[..., None]
    return values.reshape(outputs, inputs)


# -- quantization_config


def _awq_scheme(given: Mapping[str, Any]) -> Scheme:
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(f"AWQ version {version!r} is not supported; supported: 'gemm'")
    bits, group = given.get("bits", given.get("w_bit", 4)), given.get("group_size", given.get("q_group_size", 128))
    return Scheme("awq", bits, max(group, 0), not given.get("zero_point", True))


def _gptq_scheme(given: Mapping[str, Any]) -> Scheme:
    layout = given.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"checkpoint_format {layout!r} is not supported; supported: 'gptq', 'gptq_v2'")
    for pattern, settings in (given.get("dynamic") or {}).items():
        names = ("bits", "group_size", "sym")
        other = {name: settings[name] for name in names if name in settings and settings[name] != given.get(name)}
        if other and not pattern.startswith("-:"):
            raise CheckpointError(
                f"GPTQ with other settings for some layers is not supported: dynamic gives {other} to {pattern!r};"
                " supported: layers left out ('-:')"
            )
    group, symmetric = max(given.get("group_size", 128), 0), bool(given.get("sym", True))
    return Scheme("gptq", given.get("bits", 4), group, symmetric, zero_offset=1 if layout == "gptq" else 0)


def _compressed_scheme(given: Mapping[str, Any]) -> Scheme:
    groups = list((given.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise CheckpointError(f"compressed-tensors with {len(groups)} config_groups is not supported; supported: 1")
    weights, activations = groups[0].get("weights") or {}, groups[0].get("input_activations")
    layout = groups[0].get("format") or given.get("format")
    if layout not in FORMATS[2:]:
        raise CheckpointError(f"compressed-tensors format {layout!r} is not supported; supported: {FORMATS[2:]}")
    if weights.get("type", "int") != "int" or weights.get("strategy") not in ("group", "channel"):
        raise CheckpointError(
            f"compressed-tensors weights of type {weights.get('type')!r} by {weights.get('strategy')!r} are not"
            " supported; supported: 'int' by 'group' or 'channel'"
        )
    if given.get("transform_config"):
        raise CheckpointError(
            "compressed-tensors with a transform_config is not supported: inputs would have to be transformed at every"
            " step"
        )
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise CheckpointError(
            f"compressed-tensors with sparsity_config {sparsity!r} is not supported; supported: 'dense'"
        )
    if activations and not activations.get("dynamic"):
        raise CheckpointError("compressed-tensors with static input_activations is not supported; supported: dynamic")
    group = weights.get("group_size") if weights["strategy"] == "group" else 0
    return Scheme(layout, weights.get("num_bits", 8), max(group or 0, 0), bool(weights.get("symmetric", True)))


# -- tensors


def _shapes(scheme: Scheme, shape: Shape) -> dict[str, tuple[int, ...]]:
    (outputs, inputs), groups, each = shape, scheme.groups(shape[1]), scheme.per_word
    if scheme.format in ("awq", "gptq"):
        words = (inputs, outputs // each) if scheme.format == "awq" else (inputs // each, outputs)
        tensors = {"qweight": words, "scales": (groups, outputs), "qzeros": (groups, outputs // each)}
        return tensors | ({"g_idx": (inputs,)} if scheme.format == "gptq" else {})
    scales = {"weight_scale": (outputs, groups), "weight_g_idx": (inputs,)}
    if scheme.format == "int-quantized":
        return scales | {"weight": shape} | ({} if scheme.symmetric else {"weight_zero_point": (outputs, groups)})
    zeros = {} if scheme.symmetric else {"weight_zero_point": (ceil_div(outputs, each), groups)}
    return scales | {"weight_packed": (outputs, ceil_div(inputs, each))} | zeros


def _awq(scheme: Scheme, tensors: Tensors, shape: Shape) -> Codes:
    def unpack(words: np.ndarray) -> np.ndarray:
        fields = _fields(words, 4)  # [rows, O/8, 8]
        codes = np.empty_like(fields)
        codes[..., AWQ_ORDER] = fields
        return codes.reshape(len(words), -1).T

    return _codes(unpack(tensors["qweight"]), tensors["scales"].T, unpack(tensors["qzeros"]), 4)


def _gptq(scheme: Scheme, tensors: Tensors, shape: Shape) -> Codes:
    codes = _fields(tensors["qweight"], scheme.bits).transpose(1, 0, 2).reshape(shape)
    zeros = _fields(tensors["qzeros"], scheme.bits).reshape(len(tensors["qzeros"]), -1).T
    zeros = zeros + scheme.zero_offset & (1 << scheme.bits) - 1  # a zero of 0, minus one, is stored as the largest code
    return _codes(codes, tensors["scales"].T, zeros, scheme.bits)


def _packed(scheme: Scheme, tensors: Tensors, shape: Shape) -> Codes:
    outputs, inputs = shape
    codes = _fields(tensors["weight_packed"], scheme.bits).reshape(outputs, -1)[:, :inputs]
    scales = tensors["weight_scale"]
    if scheme.symmetric:
        return _codes(codes, scales, np.full(scales.shape, 1 << (scheme.bits - 1)), scheme.bits)
    zeros = _fields(tensors["weight_zero_point"], scheme.bits).transpose(0, 2, 1).reshape(-1, scales.shape[1])
    return _codes(codes, scales, zeros[:outputs], scheme.bits)


def _integers(scheme: Scheme, tensors: Tensors, shape: Shape) -> Codes:
    codes = (tensors["weight"].astype(np.int16) + 128).astype(np.uint8)
    scales = tensors["weight_scale"]
    zeros = np.zeros(scales.shape, np.int16) if scheme.symmetric else tensors["weight_zero_point"].astype(np.int16)
    return _codes(codes, scales, zeros + 128, 8)


def _codes(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int) -> Codes:
    """Return `Codes` from zeros that are unsigned like the codes."""
    return Codes(codes, scales, zeros.astype(np.float32) - (1 << (bits - 1)))


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32 [...] to uint8 [..., 32 / bits], the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
