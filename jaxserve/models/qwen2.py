"""Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window in the upper layers if switched on."""

from jaxserve.core.config import ModelConfig
from jaxserve.models import hf as common


def config_from_hf(hf: common.Json) -> ModelConfig:
    """Read a Qwen2ForCausalLM config.json."""
    return ModelConfig(
        architecture="Qwen2ForCausalLM",
        **common.common_fields(hf),
        qkv_bias=True,
        windows=common.layered_windows(hf),
    )
