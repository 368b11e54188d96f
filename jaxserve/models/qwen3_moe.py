"""Qwen3-MoE: Qwen3 with mixtures of experts as feed-forwards in some or all layers."""

from jaxserve.core.config import ModelConfig, MoEConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.models import hf as common


def config_from_hf(hf: common.Json) -> ModelConfig:
    """Read a Qwen3MoeForCausalLM config.json. Unlike in Qwen3, a sliding window applies to every layer.

    Raise `CheckpointError` if a token needs more experts than the model has.
    """
    attention_bias = common.optional_bool(hf, "attention_bias")
    window = hf.get("sliding_window", 4096) if common.optional_bool(hf, "use_sliding_window") else None
    return ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        **common.common_fields(hf),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        windows=common.uniform_windows(hf, window),
        moe=_moe_config(hf),
    )


def _moe_config(hf: common.Json) -> MoEConfig:
    key = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    experts = common.require_int(hf, key)
    per_token = common.optional_int(hf, "num_experts_per_tok", 8)
    if per_token > experts:
        raise CheckpointError(f"num_experts_per_tok is {per_token}: it must be at most {key}, {experts}")
    step, dense = common.optional_int(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise CheckpointError(f"mlp_only_layers is {dense!r}: it must be a list of layers' indices")
    layers = range(common.require_int(hf, "num_hidden_layers"))
    return MoEConfig(
        num_experts=experts,
        experts_per_token=per_token,
        intermediate_size=common.require_int(hf, "moe_intermediate_size"),
        normalize_weights=common.optional_bool(hf, "norm_topk_prob"),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
    )
