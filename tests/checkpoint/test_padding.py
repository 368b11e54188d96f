"""Padding for tensor parallelism changes shapes, never the function."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.core.config import ModelConfig
from jaxserve.models import config_from_hf
from jaxserve.parallel.padding import head_sources, padded_config
from tests.golden.cases import CASES
from tests.golden.model import Model, golden, relative_error
from tests.golden.weights import write_checkpoint


def config(heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 131, 48, 3, heads, kv_heads, 8, 88, 256)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "padded_heads"),
    [
        (6, 3, 1, (6, 3)),
        (6, 3, 2, (8, 4)),  # a kv head of zeros
        (6, 3, 4, (8, 4)),
        (6, 3, 3, (6, 3)),
        (6, 3, 6, (6, 6)),  # every kv head twice, one query head each
        (8, 2, 4, (8, 4)),
        (8, 2, 8, (8, 8)),
        (6, 2, 4, (8, 4)),  # groups of three dealt out as two and one
        (4, 1, 8, (8, 8)),  # more copies than query heads
        (32, 8, 8, (32, 8)),
    ],
)
def test_padded_heads_stay_next_to_their_kv_head(heads: int, kv_heads: int, tp: int, padded_heads: tuple[int, int]):
    padded = padded_config(config(heads, kv_heads), tp)
    assert (padded.num_heads, padded.num_kv_heads) == padded_heads
    query, kv = head_sources(config(heads, kv_heads), padded)
    assert sorted(query[query >= 0]) == list(range(heads)), "each query head runs exactly once"
    group = heads // kv_heads
    for sources, head in zip(query, kv, strict=True):
        assert all(source // group == head for source in sources if source >= 0), "next to its own kv head"


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_padded_sizes_divide_by_tp(tp: int):
    moe = config_from_hf(CASES["qwen3_moe"])
    for model in (config(6, 3), moe):
        padded = padded_config(model, tp)
        sizes = [padded.num_kv_heads, padded.intermediate_size, padded.vocab_rows]
        assert all(size % tp == 0 for size in sizes)
        assert padded.moe is None or padded.moe.intermediate_size % tp == 0
        assert padded.vocab_size == model.vocab_size


def test_sizes_that_divide_by_tp_are_not_padded():
    model = replace(config(32, 8), vocab_size=128)
    assert padded_config(model, 8) == replace(model, shards=8)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("unit", [128, 256])
def test_quantised_input_shares_are_whole_packing_units(tp: int, unit: int):
    for model in (config(6, 3), config(8, 2), config_from_hf(CASES["qwen3_moe"])):
        padded = padded_config(model, tp, unit)
        sizes = [padded.num_heads * padded.head_dim, padded.intermediate_size]
        sizes += [padded.moe.intermediate_size] if padded.moe else []
        assert all(size % (tp * unit) == 0 for size in sizes)
        assert padded.num_kv_heads == padded_config(model, tp).num_kv_heads, "the KV cache does not grow"


@pytest.mark.parametrize(
    ("name", "tp"),
    [("llama2", 4), ("llama_linear_biases", 4), ("qwen2", 8), ("qwen3_layer_types", 3), ("qwen3_moe", 8)],
)
def test_padded_model_computes_the_logits_of_transformers(name: str, tp: int, tmp_path: Path):
    case = golden(name)
    path = case.write(tmp_path)
    padded_to = padded_config(open_checkpoint(path, dtype="float32").config, tp)
    logits = Model(path, padded_to=padded_to, length=40).logits(case.prompt)
    assert logits.shape == (40, padded_to.vocab_rows)
    assert padded_to.vocab_rows > 131, "the vocabulary is prime"
    assert np.all(np.isneginf(logits[:, 131:]))
    assert relative_error(logits[:, :131], case.logits()) < 1e-4


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(6, 3, 2), (6, 3, 4), (6, 1, 4), (6, 6, 8)])
def test_padded_heads_compute_the_same_function(heads: int, kv_heads: int, tp: int, tmp_path: Path):
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 2}
    hf = CASES["llama_linear_biases"] | fields
    model = config_from_hf(hf)
    shapes = {name: shape for block in model.block_ids for name, shape in tensor_shapes(model, block).items()}
    path = write_checkpoint(tmp_path, hf, shapes, seed=0)
    tokens = list(range(20))
    padded_to = padded_config(open_checkpoint(path, dtype="float32").config, tp)
    assert padded_to.num_heads != heads or padded_to.num_kv_heads != kv_heads
    padded = Model(path, padded_to=padded_to, length=20).logits(tokens)
    assert relative_error(padded[:, :131], Model(path, length=20).logits(tokens)) < 1e-5
