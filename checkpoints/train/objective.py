"""The training loss: the loss of whole sequences, computed by the modules that serve."""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint import open_checkpoint
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.kernels import Rotated
from jaxserve.models import Attend, rope_cos_sin
from jaxserve.models.dense import build_blocks

QUERY_BLOCK = 128  # a block of queries skips the keys after its end, which halves the work of long sequences


def build(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the graph definition and random float32 parameters of the chain of blocks."""
    return nnx.split(nnx.Dict(build_blocks(config, rngs=nnx.Rngs(seed))))


def restore(config: ModelConfig, folder: Path) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the graph definition and the parameters of a finished checkpoint.

    Raise `CheckpointError` if its shapes differ from the model's.
    """
    checkpoint = open_checkpoint(folder, dtype="float32")
    if checkpoint.config != config:
        raise CheckpointError(f"{folder}: {checkpoint.config} is not the model that is trained: {config}")
    graph, params = build(config, seed=0)
    tensors = {
        f"{block_id}.{name}": x for block_id in config.block_ids for name, x in checkpoint.block(block_id).items()
    }
    flat = [(path, leaf.replace(jnp.asarray(tensors[".".join(path)]))) for path, leaf in nnx.to_flat_state(params)]
    return graph, nnx.from_flat_state(flat)


def causal_attend(batch: int, length: int, head_dim: int) -> Attend:
    """Compute dense causal attention over `batch` sequences of `length` tokens, concatenated to T = batch * length."""
    step = max(QUERY_BLOCK, length // 8)

    def attend(qkv: Rotated) -> jax.Array:
        q, k, v = qkv.value()
        _, heads, group, _ = q.shape
        q = q.reshape(batch, length, heads, group, head_dim).transpose(0, 2, 3, 1, 4)  # [batch, K, G, length, D]
        k, v = (x.reshape(batch, length, heads, head_dim).transpose(0, 2, 1, 3) for x in (k, v))
        blocks = []
        for start in range(0, length, step):
            end = min(start + step, length)
            rows = q[..., start:end, :].reshape(batch, heads, -1, head_dim)
            scores = jnp.einsum("bktd,bksd->bkts", rows, k[:, :, :end]) * head_dim**-0.5
            visible = jnp.tile(jnp.arange(start, end)[:, None] >= jnp.arange(end), (group, 1))
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
            out = jnp.einsum("bkts,bksd->bktd", weights, v[:, :, :end])
            blocks.append(out.reshape(batch, heads, group, end - start, head_dim))
        return jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(batch * length, heads, group, head_dim)

    return attend


def token_losses(config: ModelConfig, graph: nnx.GraphDef, params: nnx.State, rows: jax.Array) -> jax.Array:
    """Return the negative log likelihood in nats, float32 [batch * length], of rows int32 [batch, length + 1]."""
    blocks = nnx.merge(graph, params)
    batch, length = rows.shape[0], rows.shape[1] - 1
    cos, sin = rope_cos_sin(config, jnp.tile(jnp.arange(length), batch))
    attend = causal_attend(batch, length, config.head_dim)
    x = blocks["embed"](rows[:, :-1].reshape(-1))
    for layer in range(config.num_layers):
        x = blocks[f"layers.{layer}"](x, cos, sin, attend)
    logits = blocks["head"](x)
    chosen = jnp.take_along_axis(logits, rows[:, 1:].reshape(-1, 1), axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
