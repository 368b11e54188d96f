"""Stored quantised layers are padded and split with the codes that they have."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, ConfigError, EngineConfig, SamplingParams
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.checkpoint.refit import fitted, group_after
from jaxserve.core.config import ModelConfig
from jaxserve.models import config_from_hf, rope_cos_sin
from jaxserve.models.dense import dense_causal_attend, restore_block
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from jaxserve.planning.resolve import resolve
from jaxserve.quantization import QArray
from jaxserve.quantization.layer import round_layer
from tests.conftest import TINY
from tests.golden.cases import CASES
from tests.golden.weights import write_checkpoint
from tests.quantization.foreign import write
from tests.support.reference import Reference
from tests.support.thorough import some

# Six kv heads of two query heads each, so that groups of 32 inputs are the heads of one kv head.
MODEL = TINY | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16, "vocab_size": 499}
MODEL |= {"num_hidden_layers": 2}
SHAPES = {
    name: shape
    for block in config_from_hf(MODEL).block_ids
    for name, shape in tensor_shapes(config_from_hf(MODEL), block).items()
}
LAYOUTS = [("awq", 4, False), ("gptq", 4, False), ("gptq", 8, True), ("pack_quantized", 4, False)]
TOKENS = list(range(3, 40))


def padded_for(path: Path, shards: int, precision: str) -> ModelConfig:
    return padded_config(open_checkpoint(path).config, shards, split_unit([precision]))


def dense(leaf: np.ndarray | QArray) -> np.ndarray:
    return np.asarray(leaf.dequantize() if isinstance(leaf, QArray) else leaf)


@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize(("layout", "bits", "symmetric"), LAYOUTS)
def test_padded_layer_of_another_tool_has_the_weights_of_the_padded_model(
    tmp_path: Path, layout: str, bits: int, symmetric: bool, group: int
) -> None:
    write(tmp_path, MODEL, SHAPES, layout, bits=bits, group=group, symmetric=symmetric)
    checkpoint, precision = open_checkpoint(tmp_path), f"int{bits}"
    padded = padded_for(tmp_path, 4, precision)
    assert padded.num_heads * padded.head_dim == padded.intermediate_size == 512
    found, expected = checkpoint.variant("layers.1", precision, padded), checkpoint.block("layers.1", padded)
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        np.testing.assert_array_equal(dense(leaf).reshape(expected[name].shape), expected[name], err_msg=name)
    layout = stored_layout(checkpoint, padded, "layers.1", precision)
    weights = {name: leaf for name, leaf in found.items() if isinstance(leaf, QArray)}
    assert len(weights) == 4
    for name, leaf in weights.items():
        assert leaf.nbytes <= layout.nbytes(name, leaf), "known before it is read"


@pytest.mark.parametrize("layout", some(["awq", "gptq"], 1))
def test_imported_model_says_the_same_at_every_degree(tmp_path: Path, layout: str) -> None:
    write(tmp_path, MODEL, SHAPES, layout)
    plain = Reference(tmp_path, dict.fromkeys(range(2), "int4"), load_format="auto")
    expected = [list(plain.greedy(prompt, 8)) for prompt in ([5, 6, 7], TOKENS)]
    for tp in (1, 2, 4):
        engine = LLM(tmp_path, tp=tp, dp=4 // tp, max_tp=4, warmup=False, max_num_seqs=4, skip_tokenizer_init=True)
        with engine as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            outputs = llm.generate([[5, 6, 7], TOKENS], params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 64, True), (4, 0, False), (3, 32, False), (8, 64, False)])
def test_prepared_layer_computes_the_same_when_it_is_padded(
    tmp_path: Path, bits: int, group: int, symmetric: bool
) -> None:
    model = CASES["llama_linear_biases"] | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 32}
    config = config_from_hf(model)
    shapes = {name: shape for block in config.block_ids for name, shape in tensor_shapes(config, block).items()}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, model, shapes, seed=0), dtype="float32")
    config, precision = checkpoint.config, f"int{bits}"
    padded = padded_config(config, 4, split_unit([precision]))
    stored = round_layer(checkpoint.block("layers.0"), bits, group=group, symmetric=symmetric)
    whole, split = outputs(config, stored, precision), outputs(padded, fitted(stored, config, padded), precision)
    np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-5)


def outputs(config: ModelConfig, leaves: Mapping[str, np.ndarray | QArray], precision: str) -> np.ndarray:
    """Return what a layer makes of random states."""
    layer = restore_block(config, "layers.0", leaves, precision)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, config.hidden_size)), jnp.float32)
    positions = jnp.arange(20)
    attend = dense_causal_attend(positions, scale=config.head_dim**-0.5)
    return np.asarray(layer(x, *rope_cos_sin(config, positions), attend))


def test_layer_whose_groups_would_be_mixed_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """With three query heads of 16 numbers, a group of 32 inputs has heads of two kv heads."""
    fields = {"num_attention_heads": 12, "num_key_value_heads": 4}
    model = config_from_hf(MODEL | fields)
    shapes = {name: shape for block in model.block_ids for name, shape in tensor_shapes(model, block).items()}
    write(tmp_path, MODEL | fields, shapes, "awq")
    options = {"model": tmp_path, "skip_tokenizer_init": True, "max_num_seqs": 4}
    assert resolve(EngineConfig(**options, dp=4)).padded_model.shards == 1
    with pytest.raises(ConfigError, match=r"attention\.o is quantised in groups of 32 inputs.*\(tp, max_tp\)"):
        resolve(EngineConfig(**options, dp=4, max_tp=4))


@pytest.mark.parametrize(
    ("name", "group", "shards", "expected"),
    [
        ("attention.qkv", 1024, 4, 1024),  # its inputs are not split
        ("mlp.down", 128, 4, 128),
        ("mlp.down", 512, 4, 512),
        ("mlp.down", 1024, 4, 128),
        ("mlp.down", 2048, 4, 128),  # one group: all inputs of an output
        ("attention.o", 128, 4, 64),  # seven heads of 64 numbers: some groups have heads of two kv heads
    ],
)
def test_groups_are_as_large_as_padding_allows(name: str, group: int, shards: int, expected: int) -> None:
    model = ModelConfig("LlamaForCausalLM", 500, 256, 2, 28, 4, 64, 2048, 256)
    assert group_after(name, group, model, padded_config(model, shards, 128)) == expected
