"""The cost of a chunk by which microbatches are formed: the user's, or one that follows from the model's sizes."""

from math import isfinite

from jaxserve.core.config import EngineConfig, ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.scheduler.chunk_cost import ChunkCost

# Tokens that multiply as long as a step takes that has hardly any, mostly to read the weights: the rate of a processor
# over the bandwidth of its memory, for weights of two bytes.
FIXED_TOKENS = {"cpu": 32, "gpu": 256, "tpu": 256}


def given_chunk_cost(config: EngineConfig) -> ChunkCost | None:
    """Return the cost that the user gives, None without one. Raise `ConfigError` if it is not one."""
    text = config.microbatch_cost
    if text is None:
        return None
    try:
        a, b, g = (float(number) for number in text.split(","))
    except ValueError:
        a, b, g = -1.0, -1.0, -1.0
    if not (all(isfinite(number) and number >= 0 for number in (a, b, g)) and b > 0):
        raise ConfigError(
            f"microbatch_cost is {text!r}: it must be three numbers a,b,g of at least 0 with b above 0, such as "
            "1e-9,2e-5,4e-3"
        )
    return ChunkCost(a, b, g)


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
