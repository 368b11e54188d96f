"""AWQ: scaling keeps the function, and the searched scales change outputs less than rounding alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.calibration.activations import Inputs, calibrate
from jaxserve.calibration.awq import awq_layer, scale_layer
from jaxserve.calibration.fake_quantization import grouped, rounded
from jaxserve.calibration.pipeline import QuantizationSettings, quantize_layers
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.loader import DummyStore
from jaxserve.core.config import ModelConfig, MoEConfig
from jaxserve.core.errors import ConfigError
from jaxserve.kernels import ProjectedQKV
from jaxserve.models import build_block, rope_cos_sin
from jaxserve.models.dense import dense_causal_attend, restore_block
from jaxserve.quantization import QArray
from jaxserve.quantization.layer import LayerFormat, round_layer
from jaxserve.quantization.rounding import quantize

CONFIG = ModelConfig(
    "LlamaForCausalLM", vocab_size=50, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96, max_position=64, dtype="float32",
)  # fmt: skip
KINDS = {
    "plain": CONFIG,
    "biases": replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": replace(CONFIG, qk_norm=True),
    "experts": replace(CONFIG, moe=MoEConfig(4, 2, 32, True, (True,))),
}
TOKENS = np.random.default_rng(1).integers(0, 500, (3, 40)).astype(np.int32)
DEQUANTIZE = jax.jit(QArray.dequantize)
CALIBRATION = np.random.default_rng(1).integers(0, 500, (20, 60)).astype(np.int32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_simulated_rounding_equals_quantize(bits, group, symmetric):
    w = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    w[0, :128] = 0
    expected = np.asarray(quantize(w, bits, group=group, symmetric=symmetric).dequantize())
    found = np.asarray(jax.jit(lambda w: rounded(grouped(w, group), bits, symmetric))(w)).reshape(w.shape)
    same = found == expected
    assert same.mean() > 0.999  # a number between two codes may fall to either
    np.testing.assert_allclose(found[same], expected[same])


def random_leaves(config: ModelConfig) -> dict[str, np.ndarray]:
    _, state = nnx.split(nnx.eval_shape(lambda: build_block(config, "layers.0", rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(7)
    return {
        ".".join(map(str, path)): rng.normal(0.5 if path[-1] == "weight" else 0, 0.3, leaf.shape).astype(np.float32)
        for path, leaf in nnx.to_flat_state(state)
    }


@partial(jax.jit, static_argnums=0)
def run_and_write(config: ModelConfig, leaves: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the layer's output, and the keys and values that it writes into its cache."""
    positions = jnp.arange(len(x))
    dense, written = dense_causal_attend(positions, scale=config.head_dim**-0.5), []

    def attend(qkv: ProjectedQKV) -> jax.Array:
        written.extend(qkv.value()[1:])
        return dense(qkv)

    return restore_block(config, "layers.0", leaves)(x, *rope_cos_sin(config, positions), attend), *written


def run_layer(config: ModelConfig, leaves: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return run_and_write(config, leaves, x)[0]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_awq_scaling_keeps_the_outputs_and_the_kv_cache(kind, dtype):
    config, leaves = KINDS[kind], random_leaves(KINDS[kind])
    for norm in ("input_norm.weight", "post_norm.weight"):  # as a checkpoint in this dtype holds them
        leaves[norm] = leaves[norm].astype(dtype).astype(np.float32)
    rng = np.random.default_rng(3)

    def search(w, inputs):
        return np.exp(rng.normal(size=w.shape[1])).astype(np.float32)

    names = ["attention.qkv", "mlp.experts_gate_up"] if config.moe else ["attention.qkv", "mlp.gate_up", "mlp.down"]
    scaled, scales = scale_layer(leaves, dict.fromkeys(names, None), search, np.dtype(dtype))
    assert scales.keys() == set(names)
    assert all(
        scaled[norm].astype(dtype).astype(np.float32).tolist() == scaled[norm].tolist()
        for norm in ("input_norm.weight", "post_norm.weight")
    )
    assert not any(np.allclose(scaled[name], leaves[name]) for name in names)
    x = rng.normal(size=(20, config.hidden_size)).astype(np.float32)
    for found, expected in zip(run_and_write(config, scaled, x), run_and_write(config, leaves, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def uneven_rows(size: int) -> np.ndarray:
    """Return inputs [200, size] of which a few are far larger than the others."""
    rng = np.random.default_rng(5)
    return rng.normal(size=(200, size)).astype(np.float32) * np.exp(rng.normal(0, 1.5, size)).astype(np.float32)


def means(rows: np.ndarray) -> Inputs:
    return Inputs(np.abs(rows).mean(axis=0), np.square(rows).mean(axis=0), rows.T @ rows / len(rows))


@pytest.mark.parametrize("bits", [4, 3])
def test_awq_outputs_change_less_than_rounded_ones(bits):
    leaves = random_leaves(CONFIG)
    sizes = {"attention.qkv": 64, "attention.o": 64, "mlp.gate_up": 64, "mlp.down": 96}
    inputs = {name: uneven_rows(size) for name, size in sizes.items()}
    observed = {name: means(rows) for name, rows in inputs.items()}
    variant = awq_layer(leaves, observed, LayerFormat(bits, 32, True, np.dtype(np.float32)))
    nearest = round_layer(leaves, bits, group=32)
    assert variant.keys() == nearest.keys()
    for name, norm in (("attention.qkv", "input_norm.weight"), ("mlp.gate_up", "post_norm.weight")):
        rows, s = inputs[name], leaves[norm] / variant[norm]
        # the up projection is divided by the scales of what comes after it: only the gate is compared
        kept = np.s_[:] if name == "attention.qkv" else np.s_[:, 0]
        w, nearest_w, variant_w = (
            np.asarray(x).reshape(leaves[name].shape)[kept].reshape(-1, 64)
            for x in (leaves[name], nearest[name].dequantize(), variant[name].dequantize())
        )
        change, rounding = np.square(rows @ (variant_w / s - w).T).mean(), np.square(rows @ (nearest_w - w).T).mean()
        assert change < 0.7 * rounding, name
    rows, w = inputs["attention.o"], leaves["attention.o"].reshape(64, 64)
    searched, rounded_w = (np.asarray(x["attention.o"].dequantize()) for x in (variant, nearest))
    assert np.square(rows @ (searched - w).T).mean() < np.square(rows @ (rounded_w - w).T).mean()


def test_calibration_observes_the_inputs_of_every_weight(tiny_model):
    checkpoint = open_checkpoint(tiny_model, "dummy")
    config = checkpoint.config
    blocks = {b: restore_block(config, b, checkpoint.block(b)) for b in ("embed", "layers.1")}
    xs = [run_layer(config, checkpoint.block("layers.0"), blocks["embed"](jnp.asarray(t))) for t in TOKENS]
    expected = means(np.concatenate([blocks["layers.1"].input_norm(x) for x in xs]))
    seen = next(c for c in calibrate(checkpoint, TOKENS, gram=True) if c.index == 1).inputs
    assert {name: x.gram.shape[1] for name, x in seen.items()} == {
        "attention.qkv": 64, "attention.o": 64, "mlp.gate_up": 64, "mlp.down": 96,
    }  # fmt: skip
    for name in ("mean_abs", "mean_square", "gram"):
        found = getattr(seen["attention.qkv"], name)
        np.testing.assert_allclose(found, getattr(expected, name), rtol=1e-3, atol=1e-4)
    for x in seen.values():
        np.testing.assert_allclose(np.diagonal(x.gram), x.mean_square, rtol=1e-3)


def test_a_token_with_a_massive_residual_stream_does_not_outweigh_the_others(tiny_model):
    """The first token of a text has a residual stream hundreds of times larger in many models."""
    checkpoint = open_checkpoint(tiny_model, "dummy")
    massive = 7
    embedding = checkpoint.block("embed")["weight"].copy()
    embedding[massive] *= 1000
    tokens = np.where(massive == TOKENS, massive + 1, TOKENS)
    changed = replace(checkpoint, store=Replaced(checkpoint.store, {"model.embed_tokens.weight": embedding}))
    plain = next(calibrate(changed, tokens)).inputs
    tokens[:, 0] = massive
    for name, inputs in next(calibrate(changed, tokens)).inputs.items():
        grown = np.asarray(inputs.mean_square) / np.asarray(plain[name].mean_square)
        assert np.median(grown) < 1.5, name


def outputs(checkpoint: Checkpoint, layers: dict[int, dict], tokens: np.ndarray) -> np.ndarray:
    """Return the hidden states after the last layer."""
    x = restore_block(checkpoint.config, "embed", checkpoint.block("embed"))(jnp.asarray(tokens))
    for index in range(checkpoint.config.num_layers):
        full = checkpoint.block(f"layers.{index}")
        leaves = {
            name: DEQUANTIZE(leaf).reshape(full[name].shape) if isinstance(leaf, QArray) else leaf
            for name, leaf in layers.get(index, full).items()
        }
        x = run_layer(checkpoint.config, leaves, x)
    return np.asarray(x)


class Replaced:
    """A store of tensors some of which are replaced."""

    def __init__(self, store: DummyStore, tensors: dict[str, np.ndarray]):
        self._store, self._tensors = store, tensors

    def __contains__(self, name: str) -> bool:
        return name in self._store

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._tensors[name] if name in self._tensors else self._store.get(name, shape)


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_calibrated_model_is_nearer_to_full_precision_than_a_rounded_one(tiny_model: Path, method, symmetric):
    checkpoint = open_checkpoint(tiny_model, "dummy")
    unseen = np.random.default_rng(2).integers(0, 500, 60).astype(np.int32)
    full = outputs(checkpoint, {}, unseen)
    error = {}
    for name in ("rtn", method):
        made = quantize_layers(checkpoint, QuantizationSettings(("int3",), name, 64, symmetric), CALIBRATION)
        error[name] = np.square(outputs(checkpoint, {v.index: v.leaves for v in made}, unseen) - full).mean()
    assert error[method] < error["rtn"]


def test_calibration_without_text_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="--calib FILE"):
        next(quantize_layers(open_checkpoint(tiny_model, "dummy"), QuantizationSettings(("int4",), "awq")))
