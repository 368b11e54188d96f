"""Values of options in the spelling of other engines and libraries."""

import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from jaxserve.core.errors import ConfigError

DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
"""Names of types in vLLM and PyTorch."""

UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
"""Endings of numbers of tokens, as in vLLM."""

NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")


def dtype_name(dtype: Any) -> Any:
    """Return the name of a type that may have another name or be one of NumPy, JAX or PyTorch; any other as it is."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    name = DTYPES.get(name, name)
    return name if name in ("bfloat16", "float16", "float32") else dtype


def number_of_tokens(value: Any) -> Any:
    """Return 4000 for "4k", 4096 for "4K", and any other value as it is. Raise `ConfigError` for a part of a token."""
    if not isinstance(value, str) or not (found := NUMBER.fullmatch(value)):
        return value
    tokens = Decimal(found[1]) * UNITS[found[2]]
    if tokens != int(tokens):
        raise ConfigError(f"{value!r} is {tokens.normalize():f} tokens: give a whole number")
    return int(tokens)


def max_model_len(value: Any) -> Any:
    """Return a number of tokens, or None for vLLM's "auto" and -1: as many as the model and the memory allow."""
    return None if value in ("auto", "-1", -1) else number_of_tokens(value)


def kv_cache_dtype(value: Any) -> Any:
    """Return the precision of a KV cache as it is. Raise `ConfigError` for one of vLLM's that is not supported."""
    if isinstance(value, str) and value.startswith(("fp8", "nvfp4", "int4")):
        raise ConfigError(f"kv_cache_dtype is {value!r}: use int8, which takes half the memory (--kv-cache-dtype)")
    return value


def in_home(path: Any) -> Any:
    """Return a path that begins with ~/ in the user's home, as shells expand it, and any other value as it is."""
    if isinstance(path, str | Path) and str(path).startswith("~/"):
        return type(path)(os.path.expanduser(path))
    return path


def log_level(value: Any) -> Any:
    """Return the nearest severity for one of uvicorn's that Python's logging lacks, and any other as it is."""
    return {"trace": "debug", "critical": "error"}.get(value, value) if isinstance(value, str) else value


VALUES: Mapping[str, Callable[[Any], Any]] = {
    "dtype": dtype_name,
    "max_model_len": max_model_len,
    "max_num_batched_tokens": number_of_tokens,
    "max_queued_tokens": number_of_tokens,
    "kv_cache_dtype": kv_cache_dtype,
    **dict.fromkeys(("model", "tokenizer", "chat_template", "generation_config", "download_dir"), in_home),
    **dict.fromkeys(("compile_cache", "step_log", "policy"), in_home),
    "log_level": log_level,
}
"""What turns another spelling of an option's value into ours, by the option's name."""
