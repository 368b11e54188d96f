"""The modules of models: their parameters, and the properties that serving relies on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.config import ModelConfig
from jaxserve.models import build_block, config_from_hf
from jaxserve.models.dense import build_blocks, dense_causal_attend, forward
from tests.golden.cases import CASES, llama, qwen3_moe
from tests.support.reference import turned

AXES = {"kv_heads", "mlp", "vocab", "experts", "embed", None}


def config(**fields) -> ModelConfig:
    return config_from_hf(llama(dtype="float32", **fields))


def abstract(config: ModelConfig, block: str) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: build_block(config, block, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_axis_has_a_logical_name(name: str):
    model = config_from_hf(CASES[name])
    for block in model.block_ids:
        for path, variable in nnx.to_flat_state(abstract(model, block)[1]):
            assert len(variable.axes) == len(variable.shape), path
            assert set(variable.axes) <= AXES, path


def test_layers_of_a_kind_share_their_graph():
    """The executor then traces a kind once, and a swapped layer compiles nothing."""
    model = config_from_hf(qwen3_moe(num_hidden_layers=4, mlp_only_layers=[0, 2], use_sliding_window=True))
    graphs = [abstract(model, f"layers.{layer}")[0] for layer in range(4)]
    assert graphs[0] == graphs[2]
    assert graphs[1] == graphs[3]
    assert graphs[0] != graphs[1]


@pytest.mark.parametrize("block", ["layers.3", "layers.", "layers.x", "layers", "body", ""])
def test_unknown_blocks_are_refused(block: str):
    with pytest.raises(ValueError, match="no block"):
        build_block(config(), block, rngs=nnx.Rngs(0))


def test_tied_embeddings_are_one_parameter():
    blocks = build_blocks(config(tie_word_embeddings=True), rngs=nnx.Rngs(0))
    assert blocks["head"].weight is blocks["embed"].weight


def test_later_tokens_do_not_change_earlier_logits():
    model = config()
    blocks = build_blocks(model, rngs=nnx.Rngs(0))
    tokens = jnp.arange(12)
    run = jax.jit(partial(forward, model, blocks))
    before, after = run(tokens), run(tokens.at[8].set(99))
    np.testing.assert_array_equal(before[:8], after[:8])
    assert not np.allclose(before[8:], after[8:])


def test_packed_segments_do_not_attend_to_each_other():
    model = config()
    blocks = build_blocks(model, rngs=nnx.Rngs(0))
    first, second = jnp.arange(5), jnp.arange(50, 57)
    positions, segments = jnp.concatenate((first, jnp.arange(7))), jnp.repeat(jnp.array([0, 1]), jnp.array([5, 7]))
    run = jax.jit(partial(forward, model, blocks))
    packed = run(jnp.concatenate((first, second)), positions, segments)
    alone = jnp.concatenate((run(first), run(second)))
    np.testing.assert_allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 50])
def test_attention_window_counts_the_token_itself(window: int):
    positions = jnp.arange(6)
    attend = dense_causal_attend(positions, window=window, scale=1.0)
    values = jnp.eye(6)[:, None]  # token t's value is the unit vector t: the output shows who was seen
    seen = attend(turned(jnp.zeros((6, 1, 2, 6)), jnp.zeros((6, 1, 6)), values))[:, 0, 0]
    counts = np.minimum(np.arange(6) + 1, window)
    np.testing.assert_allclose(seen.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal((np.asarray(seen) > 0).sum(axis=-1), counts)


def test_parameters_get_finite_gradients():
    """The serving modules are the training modules."""
    model = config(attention_bias=True, mlp_bias=True)
    graph, params = nnx.split(nnx.Dict(build_blocks(model, rngs=nnx.Rngs(0))))

    def loss(params: nnx.State) -> jax.Array:
        return -jax.nn.log_softmax(forward(model, nnx.merge(graph, params), jnp.arange(9)))[:, 3].mean()

    leaves = list(map(np.asarray, jax.tree.leaves(jax.jit(jax.grad(loss))(params))))
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    moving = sum(np.any(leaf != 0) for leaf in leaves)
    assert moving == len(leaves), "every parameter takes part"
