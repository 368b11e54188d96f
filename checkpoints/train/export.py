"""Write trained parameters in Hugging Face layout: fused projections are split back into their usual names."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.core.config import ModelConfig


def hf_tensors(config: ModelConfig, graph: nnx.GraphDef, params: nnx.State) -> dict[str, np.ndarray]:
    """Return the bfloat16 tensors by their Hugging Face names; the tied head has no tensor."""
    blocks = nnx.merge(graph, params)
    tensors = {
        "model.embed_tokens.weight": blocks["embed"].weight[...],
        "model.norm.weight": blocks["head"].norm.weight[...],
    }
    for number in range(config.num_layers):
        layer, prefix = blocks[f"layers.{number}"], f"model.layers.{number}"
        qkv, (gate, up) = layer.attention.qkv[...], layer.mlp.gate_up[0]
        tensors |= {
            f"{prefix}.input_layernorm.weight": layer.input_norm.weight[...],
            f"{prefix}.post_attention_layernorm.weight": layer.post_norm.weight[...],
            f"{prefix}.self_attn.q_proj.weight": qkv[:, :-2].reshape(-1, config.hidden_size),
            f"{prefix}.self_attn.k_proj.weight": qkv[:, -2].reshape(-1, config.hidden_size),
            f"{prefix}.self_attn.v_proj.weight": qkv[:, -1].reshape(-1, config.hidden_size),
            f"{prefix}.self_attn.o_proj.weight": layer.attention.o[...].reshape(config.hidden_size, -1),
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": layer.mlp.down[...],
        }
    return {
        name: np.ascontiguousarray(np.asarray(jax.device_get(x), ml_dtypes.bfloat16)) for name, x in tensors.items()
    }


def save_model(config: ModelConfig, tensors: dict[str, np.ndarray], folder: Path) -> None:
    """Write model.safetensors, config.json and generation_config.json into the existing `folder`."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0], "pad_token_id": 1}
    _write(
        folder / "config.json",
        {
            "architectures": [config.architecture],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope.theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            **ends,
        },
    )
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.15}
    _write(folder / "generation_config.json", {**ends, **sampling})


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
