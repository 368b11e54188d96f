"""A model that is padded for several devices computes the same function on one of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint import open_checkpoint
from jaxserve.core.config import ModelConfig
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from tests.golden.cases import CASES
from tests.golden.model import relative_error
from tests.support.reference import Reference

TOKENS = np.random.default_rng(0).integers(3, 127, 40).tolist()
UNEVEN = {
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "dtype": "float32",
}
EVEN = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 132}
FAMILIES = ("llama2", "llama_linear_biases", "qwen2", "qwen3", "qwen3_moe")


def write(folder: Path, name: str, **fields) -> Path:
    (folder / "config.json").write_text(json.dumps(CASES[name] | UNEVEN | fields))
    return folder


def padded_for(folder: Path, shards: int, *precisions: str) -> ModelConfig:
    return padded_config(open_checkpoint(folder, "dummy").config, shards, split_unit(precisions))


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_and_widths_that_four_does_not_divide_are_padded_without_effect(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name)
    padded = padded_for(model, 4)
    assert (padded.num_kv_heads, padded.vocab_rows, padded.shards) == (8, 132, 4)
    whole, split = (Reference(model, padded_to=config).logits(TOKENS) for config in (None, padded))
    assert np.all(np.isneginf(split[:, 131:]))
    assert relative_error(split[:, :131], whole) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_shards_of_an_even_model_change_no_bit(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name, **EVEN)
    padded = padded_for(model, 4)
    assert padded == replace(open_checkpoint(model, "dummy").config, shards=4)
    np.testing.assert_array_equal(*(Reference(model, padded_to=config).logits(TOKENS) for config in (None, padded)))


def test_sixteen_bit_model_is_the_same_within_rounding(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2", dtype="bfloat16")
    whole, split = (Reference(model, padded_to=config).logits(TOKENS) for config in (None, padded_for(model, 4)))
    assert relative_error(split[:, :131], whole) < 0.02


@pytest.mark.parametrize(
    ("name", "precision"), [("llama2", "int8"), ("qwen2", "int4"), ("llama2", "int3"), ("qwen3_moe", "int4")]
)
def test_quantised_weights_are_packed_in_whole_units_of_every_shard(name: str, precision: str, tmp_path: Path) -> None:
    """Rows of one group have the same scale with and without padding, as zeros change no maximum."""
    fields = {"intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 128}
    model = write(tmp_path, name, **fields, hidden_size=128)
    layers = dict.fromkeys(range(2), precision)
    padded = padded_for(model, 4, precision)
    assert padded.num_kv_heads == 8
    assert max(padded.intermediate_size, padded.moe.intermediate_size if padded.moe else 0) >= 4 * 128
    whole, split = (Reference(model, layers, padded_to=config).logits(TOKENS) for config in (None, padded))
    assert relative_error(split[:, :131], whole) < 1e-5
