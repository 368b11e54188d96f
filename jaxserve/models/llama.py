"""Llama 2 and 3, and models tuned from them such as Vicuna and CodeLlama."""

from jaxserve.core.config import ModelConfig
from jaxserve.models import hf as common


def config_from_hf(hf: common.Json) -> ModelConfig:
    """Read a LlamaForCausalLM config.json; `attention_bias` applies to all four projections."""
    attention_bias = common.optional_bool(hf, "attention_bias")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        **common.common_fields(hf),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=common.optional_bool(hf, "mlp_bias"),
    )
