"""Tiny models, one for each family and feature, with config.json files in old and new style."""

from typing import Any

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def case(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return SMALL | {"architectures": [architecture], "model_type": model_type} | fields


def llama(**fields: Any) -> dict[str, Any]:
    return case("LlamaForCausalLM", "llama", **fields)


def qwen3_moe(**fields: Any) -> dict[str, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "head_dim": 16}
    return case("Qwen3MoeForCausalLM", "qwen3_moe", **experts | fields)


CASES: dict[str, dict[str, Any]] = {
    "llama2": llama(num_key_value_heads=6, torch_dtype="float16", rope_theta=10000.0, rope_scaling=None),
    "llama3": llama(
        tie_word_embeddings=True,
        eos_token_id=[2, 3],
        torch_dtype="bfloat16",
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama_linear_biases": llama(
        attention_bias=True, mlp_bias=True, head_dim=20, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "llama_yarn": llama(
        max_position_embeddings=32,
        rope_theta=10000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "mistral_window": case("MistralForCausalLM", "mistral", sliding_window=8, head_dim=16, torch_dtype="bfloat16"),
    "mistral_full": case(
        "MistralForCausalLM",
        "mistral",
        sliding_window=None,
        dtype="bfloat16",
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    ),
    "qwen2": case(
        "Qwen2ForCausalLM",
        "qwen2",
        tie_word_embeddings=True,
        rope_theta=1000000.0,
        sliding_window=16,
        use_sliding_window=False,
        max_window_layers=1,
    ),
    "qwen2_window": case(
        "Qwen2ForCausalLM",
        "qwen2",
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=1,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "qwen3": case(
        "Qwen3ForCausalLM",
        "qwen3",
        head_dim=24,
        tie_word_embeddings=True,
        dtype="bfloat16",
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    ),
    "qwen3_layer_types": case(
        "Qwen3ForCausalLM",
        "qwen3",
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3_moe": qwen3_moe(norm_topk_prob=True),
    "qwen3_moe_stacked": qwen3_moe(
        norm_topk_prob=False, num_hidden_layers=4, mlp_only_layers=[3], decoder_sparse_step=2
    ),
}

STACKED_EXPERTS = {"qwen3_moe_stacked"}

ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 4096,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "attention_factor": 1.25,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 2048,
    },
}
"""`rope_parameters` of models with 64 or 128 numbers in a head and theta 500000."""
