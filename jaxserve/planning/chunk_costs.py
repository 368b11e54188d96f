"""The cost of a chunk that is assumed while no step was measured: from the sizes of the model alone."""

from jaxserve.core.config import ModelConfig
from jaxserve.scheduler.chunk_cost import ChunkCost

# Tokens that multiply as long as a step takes that has hardly any, mostly to read the weights: the rate of a processor
# over the bandwidth of its memory, for weights of two bytes.
FIXED_TOKENS = {"cpu": 32, "gpu": 256, "tpu": 256}


def assumed_chunk_cost(model: ModelConfig, platform: str) -> ChunkCost:
    """Return the cost of a chunk, in units of the time that one token takes to go through the layers.

    The time of a pair of tokens in attention is to that of a token as their operations are.
    """
    heads, width = model.num_heads * model.head_dim, model.hidden_size
    kv_heads = model.num_kv_heads * model.head_dim
    weights = 2 * heads * width + 2 * kv_heads * width + 3 * width * _inner(model)
    return ChunkCost(a=4 * heads / (2 * weights), b=1.0, g=float(FIXED_TOKENS[platform]))


def _inner(model: ModelConfig) -> int:
    """Return the inner width of the feed-forward half that a token goes through, of all experts that it chooses."""
    if model.moe is None:
        return model.intermediate_size
    return model.moe.experts_per_token * model.moe.intermediate_size
