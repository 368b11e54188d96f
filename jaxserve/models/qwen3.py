"""Qwen3: norms on the queries and keys of each head instead of Qwen2's biases."""

from jaxserve.core.config import ModelConfig
from jaxserve.models import hf as common

DEFAULT_HEAD_DIM = 128


def config_from_hf(hf: common.Json) -> ModelConfig:
    """Read a Qwen3ForCausalLM config.json; `attention_bias` applies to all four projections."""
    attention_bias = common.optional_bool(hf, "attention_bias")
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        **common.common_fields(hf, head_dim=DEFAULT_HEAD_DIM),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        windows=common.layered_windows(hf),
    )
