"""The registry of supported architectures, and the construction of their blocks."""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from flax import nnx

from jaxserve.core.block_names import is_layer, layer_index, layer_name
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.core.precision import BITS
from jaxserve.models import llama, mistral, qwen2, qwen3, qwen3_moe
from jaxserve.models.hf import check_ignored
from jaxserve.models.layers import MLP, DecoderLayer, Embed, Head
from jaxserve.models.moe import MoE
from jaxserve.quantization import QArray

log = logging.getLogger(__name__)

ConfigReader = Callable[[Mapping[str, Any]], ModelConfig]

FAMILIES: dict[str, ConfigReader] = {
    "LlamaForCausalLM": llama.config_from_hf,
    "MistralForCausalLM": mistral.config_from_hf,
    "Qwen2ForCausalLM": qwen2.config_from_hf,
    "Qwen3ForCausalLM": qwen3.config_from_hf,
    "Qwen3MoeForCausalLM": qwen3_moe.config_from_hf,
}
"""The reader of config.json for each architecture, by its Hugging Face name."""

MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""The architecture for each `model_type`, for configurations that name no architecture."""
RENAMED = {"LLaMAForCausalLM": "LlamaForCausalLM"}
HEADLESS, WITH_HEAD = "Model", "ForCausalLM"  # ends of the names of a family's classes; the first is for embeddings


def register_family(architecture: str, read: ConfigReader, *, model_type: str) -> None:
    """Let this process load checkpoints of another architecture, as their config.json names it.

    `read` returns the configuration of a config.json. Raise `ValueError` if the architecture is known already.
    """
    if architecture in FAMILIES:
        raise ValueError(f"{architecture} is known already")
    FAMILIES[architecture] = read
    MODEL_TYPES[model_type] = architecture


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a Hugging Face config.json.

    Raise `CheckpointError` if a feature is not supported; the message names the supported values.
    """
    given = _architectures(hf)
    by_type = MODEL_TYPES.get(str(hf.get("model_type")))
    family = next((name for name in map(_with_head, given) if name in FAMILIES), None)
    if family is None and not given:
        family = by_type
    if family is None:
        found = ", ".join(given) or f"none (model_type {hf.get('model_type')!r})"
        raise CheckpointError(f"architecture {found} is not supported; supported: {', '.join(FAMILIES)}")
    if by_type not in (family, None):
        log.warning("config.json: using architectures %s and ignoring model_type %r", family, hf["model_type"])
    config = FAMILIES[family](hf)
    check_ignored(hf, config)
    return config


def is_headless(hf: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a model without an output head."""
    return any(name.endswith(HEADLESS) and _with_head(name) in FAMILIES for name in _architectures(hf))


def _with_head(name: str) -> str:
    """Return the usual name of an architecture, which is that of the class with an output head."""
    return name.removesuffix(HEADLESS) + WITH_HEAD if name.endswith(HEADLESS) else RENAMED.get(name, name)


def _architectures(hf: Mapping[str, Any]) -> list[str]:
    given = hf.get("architectures") or ()
    return [given] if isinstance(given, str) else [str(name) for name in given]


def build_block(config: ModelConfig, block_id: str, *, rngs: nnx.Rngs, precision: str | None = None) -> nnx.Module:
    """Return a block with random weights, or with abstract parameters under `nnx.eval_shape`.

    `precision` applies to the block's large matrices; None and the configuration's dtype mean full precision.
    Raise `ValueError` if the model has no such block.
    """
    bits = BITS.get(precision or config.dtype)
    if block_id == "embed":
        return Embed(config, rngs=rngs, bits=bits)
    if block_id == "head":
        return Head(config, rngs=rngs, bits=bits)
    kind, _, index = block_id.partition(".")
    if kind != "layers" or not index.isdigit() or int(index) >= config.num_layers:
        raise ValueError(f"unknown block {block_id!r} in a model of {config.num_layers} layers")
    feed_forward = MoE if config.is_sparse(int(index)) else MLP
    return DecoderLayer(config, rngs=rngs, feed_forward=feed_forward, bits=bits)


def abstract_block(
    config: ModelConfig, block_id: str, precision: str | None = None
) -> tuple[nnx.GraphDef, Mapping[str, nnx.Variable]]:
    """Return a block's graph definition and its abstract parameters by dotted path, in the order of its state's leaves.

    Do not change the results: all layers of the same kind share them.
    """
    return _abstract_block(config, representative(config, block_id), precision or config.dtype)


def representative(config: ModelConfig, block_id: str) -> str:
    """Return the first block of the same kind: blocks with the same representative share their graph definition."""
    if block_id not in config.block_ids or not is_layer(block_id):
        return block_id
    sparse = config.is_sparse(layer_index(block_id))
    return next(layer_name(layer) for layer in range(config.num_layers) if config.is_sparse(layer) == sparse)


@lru_cache(maxsize=64)
def _abstract_block(
    config: ModelConfig, block_id: str, precision: str
) -> tuple[nnx.GraphDef, Mapping[str, nnx.Variable]]:
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: build_block(config, block_id, rngs=nnx.Rngs(0), precision=precision))
    )
    return graphdef, {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def check_parameters(variables: Mapping[str, nnx.Variable], values: Mapping[str, Any]) -> None:
    """Assert that `values` fit a block's parameters: arrays of their shapes, and QArrays of any group size."""
    for name, variable in variables.items():
        expected, value = variable.get_value(), values[name]
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        assert isinstance(value, QArray) == isinstance(expected, QArray), (name, type(value))


def block_state(variables: Mapping[str, nnx.Variable], values: Mapping[str, Any]) -> nnx.State:
    """Return the state of a block with these parameters, after `check_parameters`."""
    check_parameters(variables, values)
    return shard_state(variables, values)


def shard_state(variables: Mapping[str, nnx.Variable], values: Mapping[str, Any]) -> nnx.State:
    """Return the state of a block with one device's shares of its parameters."""
    return nnx.from_flat_state([(tuple(name.split(".")), v.replace(values[name])) for name, v in variables.items()])
