"""Mistral: Llama with a sliding window in every layer."""

from jaxserve.core.config import ModelConfig
from jaxserve.models import hf as common

DEFAULT_WINDOW = 4096  # if config.json has no such field; null means full attention


def config_from_hf(hf: common.Json) -> ModelConfig:
    """Read a MistralForCausalLM config.json."""
    return ModelConfig(
        architecture="MistralForCausalLM",
        **common.common_fields(hf),
        windows=common.uniform_windows(hf, hf.get("sliding_window", DEFAULT_WINDOW)),
    )
