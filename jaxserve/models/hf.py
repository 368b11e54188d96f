"""Strict reading of the config.json fields that all families share: an unknown feature is an error."""

import logging
import math
from collections.abc import Mapping
from typing import Any, get_args

from jaxserve.core.config import DType, ModelConfig, RopeConfig, RopeKind
from jaxserve.core.errors import CheckpointError
from jaxserve.core.files import token_ids

log = logging.getLogger(__name__)

Json = Mapping[str, Any]

DEFAULT_THETA = 10000.0
MAX_INT = 2**31 - 1
MIN_FLOAT, MAX_FLOAT = 2.0**-126, 2.0**127

NEUTRAL: Mapping[str, Any] = {
    "alibi": False,
    "attention_chunk_size": None,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": False,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "no_rope_layers": None,
    "parallel_attn": False,
    "qk_layernorm": False,
    "residual_multiplier": 1,
    "rope_interleave": False,
    "rope_interleaved": False,
    "rotary_pct": 1,
    "scale_depth": None,
    "scale_emb": 1,
    "use_alibi": False,
    "use_parallel_residual": False,
}
"""Fields of other families that would change the computation, with the value at which they have no effect."""


def common_fields(hf: Json, *, head_dim: int | None = None) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all families read from the same keys.

    `head_dim` is the family's default. Raise `CheckpointError` if a field is invalid or its value is not supported.
    """
    heads = require_int(hf, "num_attention_heads")
    hidden = require_int(hf, "hidden_size")
    kv_heads = optional_int(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {activation!r} is not supported; supported: 'silu' and its alias 'swish'")
    size = optional_int(hf, "head_dim", head_dim or hidden // heads)
    if size % 2 or size == 0:
        raise CheckpointError(f"head_dim is {size}: it must be even, because RoPE rotates pairs")
    rope = rope_config(hf)
    return {
        "vocab_size": require_int(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": require_int(hf, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": require_int(hf, "intermediate_size"),
        "max_position": max_position(hf, rope),
        "rms_norm_eps": optional_number(hf, "rms_norm_eps", 1e-6, zero=True),
        "rope": rope,
        "tie_embeddings": optional_bool(hf, "tie_word_embeddings"),
        "dtype": parameter_dtype(hf),
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
    }


def check_ignored(hf: Json, config: ModelConfig) -> None:
    """Raise `CheckpointError` for a field that changes the computation in a way that no supported family has."""
    neutral = {
        **NEUTRAL,
        "attention_multiplier": config.head_dim**-0.5,
        "query_pre_attn_scalar": config.head_dim,
        "use_qk_norm": config.qk_norm,
        "qk_norm": config.qk_norm,
    }
    for name, value in neutral.items():
        given = hf.get(name)
        # A list has an entry for each layer, and a true entry means RoPE in that layer.
        rope_everywhere = name == "no_rope_layers" and isinstance(given, list) and all(given)
        if given is None or given == value or rope_everywhere:
            continue
        if isinstance(value, float) and isinstance(given, int | float) and math.isclose(given, value, rel_tol=1e-6):
            continue
        raise CheckpointError(f"{name} {given!r} is not supported with {config.architecture}; supported: {value!r}")


def require_int(hf: Json, key: str) -> int:
    """Return a positive integer of 32 bits. Raise `CheckpointError` if it is missing or invalid."""
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INT:
        raise CheckpointError(f"{key} is {value!r}: it must be a positive integer of 32 bits")
    return value


def optional_int(hf: Json, key: str, default: int) -> int:
    """Return a positive integer, or `default` if it is missing or null. Raise `CheckpointError` if it is invalid."""
    return default if hf.get(key) is None else require_int(hf, key)


def optional_number(hf: Json, key: str, default: float, *, zero: bool = False) -> float:
    """Return a positive number that float32 can hold (or 0 if `zero`), or `default` if it is missing or null.

    Raise `CheckpointError` if it is invalid.
    """
    value = hf.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (MIN_FLOAT <= value <= MAX_FLOAT or (zero and value == 0)):
        kind = "number from 0 on" if zero else "positive number"
        raise CheckpointError(f"{key} is {value!r}: it must be a {kind} in the range of float32")
    return float(value)


def optional_bool(hf: Json, key: str) -> bool:
    """Return a boolean, or False if it is missing or null. Raise `CheckpointError` for any other value."""
    value = hf.get(key)
    if value is not None and value not in (True, False):
        raise CheckpointError(f"{key} is {value!r}: it must be true or false")
    return bool(value)


def parameter_dtype(hf: Json) -> DType:
    """Return `dtype`, or `torch_dtype` of older files, or bfloat16. Raise `CheckpointError` if it is not supported."""
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in get_args(DType):
        raise CheckpointError(f"dtype {name!r} is not supported; supported: {', '.join(get_args(DType))}")
    return name


def rope_config(hf: Json) -> RopeConfig:
    """Return the RoPE settings from `rope_scaling`, or else from `rope_parameters` (transformers 5, the same order).

    Raise `CheckpointError` if they are not supported.
    """
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = hf.get(key) or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{key} is {given!r}: it must be an object")
    _warn_of_conflicting_rope(hf, given)
    theta = optional_number(given, "rope_theta", optional_number(hf, "rope_theta", DEFAULT_THETA))
    kind = given.get("rope_type") or given.get("type")
    if kind is None and given.get("factor") not in (None, 1):
        raise CheckpointError(f"{key} has a factor, {given['factor']!r}, but no rope_type")
    kind = kind or "default"
    if kind not in get_args(RopeKind):
        raise CheckpointError(f"RoPE type {kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}")
    partial = given.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in given:
        raise CheckpointError(f"RoPE type {kind!r} needs a 'factor'")
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    numbers = {name: optional_number(given, name, 1.0) for name in names if given.get(name) is not None}
    scales = ("mscale", "mscale_all_dim")
    numbers |= {name: optional_number(given, name, 1.0, zero=True) for name in scales if given.get(name) is not None}
    original = _original_max_position(given, hf)
    rope = RopeConfig(
        kind=kind,
        theta=theta,
        factor=optional_number(given, "factor", 1.0),
        original_max_position=original,
        truncate=given.get("truncate") is None or optional_bool(given, "truncate"),
        **numbers,
    )
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointError(
            f"low_freq_factor is {rope.low_freq_factor}: it must be less than high_freq_factor, {rope.high_freq_factor}"
        )
    if kind == "yarn" and theta <= 1:
        raise CheckpointError(f"rope_theta is {theta}: with yarn it must be more than 1")
    return rope


def _original_max_position(given: Json, hf: Json) -> int:
    """Return the context length before RoPE was scaled, by default `max_position_embeddings`."""
    key = "original_max_position_embeddings"
    value = optional_number(given, key, 0)
    if value != int(value):
        raise CheckpointError(f"{key} is {given[key]!r}: it must be a positive integer")
    return int(value) or require_int(hf, "max_position_embeddings")


def _warn_of_conflicting_rope(hf: Json, used: Json) -> None:
    other = hf.get("rope_parameters")
    if hf.get("rope_scaling") and other and dict(other) != used:
        log.warning("config.json: using rope_scaling %s and ignoring rope_parameters %s", dict(used), dict(other))
    inner, outer = used.get("rope_theta"), hf.get("rope_theta")
    if inner and outer and inner != outer:
        log.warning("config.json: using rope_theta %s of the RoPE parameters and ignoring rope_theta %s", inner, outer)


def max_position(hf: Json, rope: RopeConfig) -> int:
    """Return the number of positions that the model supports: scaled RoPE stretches the value in config.json."""
    given = optional_int(hf, "max_position_embeddings", 2048)
    if rope.kind == "linear":
        return min(int(given * rope.factor), MAX_INT)
    if rope.kind == "yarn":
        return min(max(given, int(rope.original_max_position * rope.factor)), MAX_INT)
    return given


def uniform_windows(hf: Json, window: int | None) -> tuple[int | None, ...]:
    """Return `window` for every layer, or () for None. Raise `CheckpointError` if it is not a positive integer."""
    if window is None:
        return ()
    return (require_int({"sliding_window": window}, "sliding_window"),) * require_int(hf, "num_hidden_layers")


def layered_windows(hf: Json) -> tuple[int | None, ...]:
    """Return the sliding windows of a Qwen model: () unless `use_sliding_window` is set.

    `layer_types` names the layers with a window. Without it these are the layers from `max_window_layers` on.
    Raise `CheckpointError` if `layer_types` does not fit.
    """
    if not optional_bool(hf, "use_sliding_window") or hf.get("sliding_window", 4096) is None:
        return ()
    window = optional_int(hf, "sliding_window", 4096)
    layers = require_int(hf, "num_hidden_layers")
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        raise CheckpointError(f"layer_types {kinds} must name sliding_attention or full_attention for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
