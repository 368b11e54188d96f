"""The mapping from a Hugging Face checkpoint's tensors to a block's parameters. All families share one naming."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.core.aligned_arrays import aligned_zeros
from jaxserve.core.block_names import layer_index
from jaxserve.core.config import ModelConfig
from jaxserve.parallel.padding import cast, fill, fill_gate_up, pack_gate_up, pack_o, pack_qkv, pad

Read = Callable[[str], np.ndarray]
Shape = tuple[int, ...]


class PackTarget(NamedTuple):
    """The model's configuration, its padded configuration, and the dtype into which a block is packed."""

    config: ModelConfig
    padded: ModelConfig
    dtype: np.dtype


def numpy_dtype(config: ModelConfig) -> np.dtype:
    """Return the numpy dtype of a model's parameters."""
    return np.dtype(ml_dtypes.bfloat16 if config.dtype == "bfloat16" else config.dtype)


def tensor_shapes(config: ModelConfig, block_id: str, *, stacked_experts: bool = False) -> dict[str, Shape]:
    """Return the names and shapes of a block's tensors in the checkpoint.

    `stacked_experts`: a mixture of experts has one tensor per projection instead of one per expert and projection.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    if block_id == "embed":
        return {"model.embed_tokens.weight": vocabulary}
    if block_id == "head":
        return {"model.norm.weight": (config.hidden_size,), head_name(config): vocabulary}
    shapes = _attention_shapes(config)
    if config.is_sparse(layer_index(block_id)):
        shapes |= _expert_shapes(config, stacked_experts)
    else:
        shapes |= _mlp_shapes(config)
    return {f"model.{block_id}.{name}": shape for name, shape in shapes.items()}


def head_name(config: ModelConfig) -> str:
    """Return the name of the tensor that projects to the vocabulary."""
    return "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"


def stacked_name(block_id: str) -> str:
    """Return the name of the tensor that is present if and only if a layer's experts are stacked."""
    return f"model.{block_id}.mlp.experts.gate_up_proj"


def _linear(name: str, out: int, inner: int, bias: bool) -> dict[str, Shape]:
    weight = {f"{name}.weight": (out, inner)}
    return weight | {f"{name}.bias": (out,)} if bias else weight


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= _linear("self_attn.q_proj", q, hidden, config.qkv_bias)
    shapes |= _linear("self_attn.k_proj", kv, hidden, config.qkv_bias)
    shapes |= _linear("self_attn.v_proj", kv, hidden, config.qkv_bias)
    shapes |= _linear("self_attn.o_proj", hidden, q, config.o_bias)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _mlp_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    gate, up = _linear("mlp.gate_proj", inner, hidden, bias), _linear("mlp.up_proj", inner, hidden, bias)
    return gate | up | _linear("mlp.down_proj", hidden, inner, bias)


def _expert_shapes(config: ModelConfig, stacked: bool) -> dict[str, Shape]:
    assert config.moe is not None
    experts, hidden, inner = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts, hidden)}
    if stacked:
        gate_up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
        return shapes | {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
    for expert in range(experts):
        for name, out, inp in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            shapes |= _linear(f"mlp.experts.{expert}.{name}_proj", out, inp, False)
    return shapes


def pack_block(
    target: PackTarget, block_id: str, read: Read, *, stacked_experts: bool = False
) -> dict[str, np.ndarray]:
    """Return a block's parameters by dotted path, fused and padded, from the tensors that `read` returns by name."""
    config, padded, dtype = target
    rows = (padded.vocab_rows, config.hidden_size)
    if block_id == "embed":
        return {"weight": pad(read("model.embed_tokens.weight"), rows, dtype)}
    if block_id == "head":
        norm, weight = read("model.norm.weight"), read(head_name(config))
        return {"norm.weight": cast(norm, dtype), "weight": pad(weight, rows, dtype)}

    def read_layer(name: str) -> np.ndarray:
        return read(f"model.{block_id}.{name}")

    block = {
        "input_norm.weight": cast(read_layer("input_layernorm.weight"), dtype),
        "post_norm.weight": cast(read_layer("post_attention_layernorm.weight"), dtype),
    }
    block |= _pack_attention(target, read_layer)
    if not config.is_sparse(layer_index(block_id)):
        return block | _pack_mlp(target, read_layer)
    return block | _pack_experts(target, read_layer, stacked_experts)


def _pack_attention(target: PackTarget, read: Read) -> dict[str, np.ndarray]:
    config, padded, dtype = target

    def qkv(kind: str) -> np.ndarray:
        q, k, v = (read(f"self_attn.{name}_proj.{kind}") for name in "qkv")
        return pack_qkv(q, k, v, config, padded, dtype)

    packed = {"attention.qkv": qkv("weight")}
    packed["attention.o"] = pack_o(read("self_attn.o_proj.weight"), config, padded, dtype)
    if config.qkv_bias:
        packed["attention.qkv_bias"] = qkv("bias")
    if config.o_bias:
        packed["attention.o_bias"] = cast(read("self_attn.o_proj.bias"), dtype)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            packed[f"attention.{name}.weight"] = cast(read(f"self_attn.{name}.weight"), dtype)
    return packed


def _pack_mlp(target: PackTarget, read: Read) -> dict[str, np.ndarray]:
    config, padded, dtype = target
    inner = padded.intermediate_size

    def gate_up(kind: str) -> np.ndarray:
        gates = [read(f"mlp.{name}_proj.{kind}") for name in ("gate", "up")]
        return pack_gate_up(gates, inner, padded.shards, dtype)

    packed = {"mlp.gate_up": gate_up("weight")}
    packed["mlp.down"] = pad(read("mlp.down_proj.weight"), (config.hidden_size, inner), dtype)
    if config.mlp_bias:
        packed["mlp.gate_up_bias"] = gate_up("bias")
        packed["mlp.down_bias"] = cast(read("mlp.down_proj.bias"), dtype)
    return packed


def _pack_experts(target: PackTarget, read: Read, stacked: bool) -> dict[str, np.ndarray]:
    config, padded, dtype = target
    assert config.moe is not None
    assert padded.moe is not None
    experts, hidden, inner = config.moe.num_experts, config.hidden_size, padded.moe.intermediate_size
    shards = padded.shards
    gate_up = aligned_zeros((experts, shards, 2, inner // shards, hidden), dtype)
    down = aligned_zeros((experts, hidden, inner), dtype)
    for expert in range(experts):
        if stacked:
            gates = np.split(read("mlp.experts.gate_up_proj")[expert], 2)
            last = read("mlp.experts.down_proj")[expert]
        else:
            gates = [read(f"mlp.experts.{expert}.{name}_proj.weight") for name in ("gate", "up")]
            last = read(f"mlp.experts.{expert}.down_proj.weight")
        fill_gate_up(gate_up[expert], gates)
        fill(down[expert], last)
    router = cast(read("mlp.gate.weight"), dtype)
    return {"mlp.router": router, "mlp.experts_gate_up": gate_up, "mlp.experts_down": down}
