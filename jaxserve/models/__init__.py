"""Flax NNX modules of the supported model families.

Modules name their axes logically and contain no mesh and no KV cache.
"""

from jaxserve.models.layers import Attend as Attend, DecoderLayer as DecoderLayer, Embed as Embed, Head as Head
from jaxserve.models.registry import (
    abstract_block as abstract_block,
    block_state as block_state,
    build_block as build_block,
    check_parameters as check_parameters,
    config_from_hf as config_from_hf,
    representative as representative,
    shard_state as shard_state,
)
from jaxserve.models.rope import rope_cos_sin as rope_cos_sin
