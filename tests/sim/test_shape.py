"""Bytes and operations from a config.json alone equal those of the real modules."""

import json
from pathlib import Path

import pytest

from jaxserve.control.plan import block_chain, parallel_plan
from jaxserve.core.bundled import bundled_model_path, configs_path
from jaxserve.core.errors import ConfigError
from jaxserve.sim.shape import ModelShape

MOE = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def bundled() -> ModelShape:
    return ModelShape.load(bundled_model_path())


@pytest.fixture
def moe(tmp_path: Path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    return ModelShape.load(tmp_path)


@pytest.mark.parametrize(
    ("precision", "size"), [("bfloat16", 1_180_672), ("int8", 600_064), ("int4", 305_152), ("int3", 231_424)]
)
def test_a_layer_has_the_bytes_that_the_engine_counts(bundled: ModelShape, precision: str, size: int):
    assert bundled.layer_bytes(precision) == size


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-32b", 32.76),
        ("codellama-34b", 33.74),
        ("llama-3-70b", 70.55),
    ],
)
def test_known_models_have_their_number_of_parameters(name: str, billions: float):
    shape = ModelShape.load(name)
    size = shape.num_layers * shape.layer_bytes(shape.dtype) + shape.head_bytes(shape.dtype) + shape.embed_bytes()
    assert shape.name == name
    assert size / shape.itemsize / 1e9 == pytest.approx(billions, abs=0.006)


def test_every_file_of_models_is_a_model():
    files = sorted(configs_path("models").iterdir())
    assert len(files) == 7
    for file in files:
        assert ModelShape.load(file) == ModelShape.load(file.stem)


def test_a_stage_has_the_bytes_of_its_blocks_and_tied_embeddings_once(bundled: ModelShape):
    chain = block_chain("bfloat16", ("bfloat16",) * 7 + ("int4",), "bfloat16")
    whole = parallel_plan(chain, kv_pages=2, tp=1, pp=1, dp=1, devices=1).instances[0].stages[0]
    layers = 7 * bundled.layer_bytes("bfloat16") + bundled.layer_bytes("int4")
    assert bundled.stage_bytes(whole) == layers + bundled.head_bytes("bfloat16")
    first, last = parallel_plan(chain, kv_pages=2, tp=1, pp=2, dp=1, devices=2).instances[0].stages
    both = bundled.stage_bytes(first) + bundled.stage_bytes(last)
    assert both == layers + bundled.head_bytes("bfloat16") + bundled.embed_bytes()


def test_two_devices_have_half_of_everything_but_the_norms():
    shape = ModelShape.load("llama-3-70b")
    norms = 2 * shape.hidden_size * 2
    assert 2 * (shape.layer_bytes("bfloat16", 2) - norms) == shape.layer_bytes("bfloat16") - norms
    assert 2 * shape.layer_ops(2) == shape.layer_ops()
    assert 2 * shape.head_ops(2) == shape.head_ops()
    assert 2 * shape.attention_ops(2) == shape.attention_ops()
    assert 2 * shape.kv_bytes_per_token(2) == shape.kv_bytes_per_token()


def test_a_kv_head_is_copied_and_not_cut():
    shape = ModelShape.load("llama-3-8b")  # 8 kv heads
    assert shape.kv_bytes_per_token(16) == shape.kv_bytes_per_token(8) == 2 * 128 * 2
    assert shape.attention_ops(16) * 16 == shape.attention_ops()


def test_a_kv_cache_in_int8_has_a_scale_for_each_row(bundled: ModelShape):
    assert bundled.kv_bytes_per_token() == 2 * 2 * 64 * 2
    assert bundled.kv_bytes_per_token(dtype="int8", platform="cpu") == 2 * 2 * (64 + 4)
    assert bundled.kv_bytes_per_token(dtype="int8", platform="gpu") == 2 * 2 * (64 + 16)


def test_operations_are_two_for_each_weight():
    shape = ModelShape.load("llama-2-7b")
    assert shape.layer_ops() == shape.layer_bytes("float16") - 2 * shape.hidden_size * 2
    assert shape.attention_ops() == 4 * 32 * 128


def test_of_experts_only_the_chosen_ones_are_multiplied_but_all_are_kept(moe: ModelShape):
    expert = 3 * 256 * 128
    attention = (4 + 2 * 2) * 64 * 256 + 256 * 256
    assert moe.layer_ops() == 2 * (attention + 2 * expert + 8 * 256)
    assert moe.layer_bytes("bfloat16") == 2 * (attention + 8 * expert + 8 * 256 + 2 * 256)


def test_a_step_reads_the_experts_that_its_tokens_chose(moe: ModelShape):
    expert, rest = 2 * 3 * 256 * 128, moe.layer_bytes("bfloat16") - 8 * 2 * 3 * 256 * 128
    assert moe.read_bytes("bfloat16", 1) == pytest.approx(rest + 2 * expert)
    assert rest + 2 * expert < moe.read_bytes("bfloat16", 4) < moe.layer_bytes("bfloat16")
    assert moe.read_bytes("bfloat16", 1000) == pytest.approx(moe.layer_bytes("bfloat16"))


def test_a_dense_layer_is_read_as_a_whole(bundled: ModelShape):
    assert bundled.read_bytes("int4", 1) == bundled.layer_bytes("int4")


def test_an_unknown_precision_is_refused(bundled: ModelShape):
    with pytest.raises(ConfigError, match=r"'int5': choose from bfloat16, .*int3"):
        bundled.layer_bytes("int5")


def test_a_model_that_is_not_there_is_an_error_with_those_that_are():
    with pytest.raises(ConfigError, match=r"unknown model 'llama-9'.*llama-2-7b"):
        ModelShape.load("llama-9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ],
)
def test_a_bad_field_is_named_with_its_file(tmp_path: Path, change: dict, message: str):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MOE | change))
    with pytest.raises(ConfigError, match=message) as caught:
        ModelShape.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_what_is_no_config_is_one_error(tmp_path: Path, text: str):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        ModelShape.load(tmp_path / "x.json")
