"""Groups that share a scale: which are taken, what is said of it, and that planned bytes are loaded bytes."""

import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxserve.build import build
from jaxserve.calibration.pipeline import QuantizationSettings
from jaxserve.calibration.run import run
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.cli.main import app
from jaxserve.core.config import EngineConfig
from jaxserve.core.scale_groups import default_group, group_size, sentence
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import padded_config
from jaxserve.planning.sizes import block_bytes
from jaxserve.quantization import QArray
from jaxserve.sim.shape import ModelShape
from tests.golden.cases import CASES

ODD = {"hidden_size": 96, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}


def model(folder: Path, name: str = "llama2", **fields) -> Path:
    """Write a model's config.json alone, with odd sizes, and return its path."""
    sizes = {**ODD, "moe_intermediate_size": 160} if "moe" in name else ODD
    (folder / "config.json").write_text(json.dumps(CASES[name] | sizes | {"num_hidden_layers": 2} | fields))
    return folder / "config.json"


def weights(folder: Path, name: str = "llama2", **fields) -> Path:
    """Write a model with random weights, and return its folder."""
    from safetensors.numpy import save_file

    from jaxserve.checkpoint.mapping import tensor_shapes

    config = open_checkpoint(model(folder, name, **fields), "dummy").config
    rng, tensors = np.random.default_rng(0), {}
    for block in config.block_ids:
        for tensor, shape in tensor_shapes(config, block, stacked_experts=False).items():
            tensors[tensor] = (0.02 * rng.standard_normal(shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("size", "wanted", "group"),
    [(576, 128, 64), (576, 64, 64), (576, 32, 32), (576, 0, 576), (96, 64, 32), (40, 128, 40), (256, 256, 256)],
)
def test_group_is_what_is_wanted_where_it_divides(size: int, wanted: int, group: int):
    assert group_size(size, wanted) == group


def test_layer_has_small_groups_in_few_bits_if_128_does_not_divide_all_its_inputs():
    assert [default_group((576, 576, 1536), bits) for bits in (8, 4, 3)] == [128, 32, 32]
    assert [default_group((768, 768, 2048), bits) for bits in (8, 4, 3)] == [128, 128, 128]


def test_sentence_names_weights_by_group_and_says_why():
    groups = {"attention.qkv": (576, 64), "mlp.gate_up": (576, 64), "mlp.down": (1536, 128)}
    assert sentence(groups) == (
        "a scale for 64 inputs of qkv, gate_up, for 128 inputs of down: 128 does not divide 576"
    )
    assert "divide" not in sentence({"mlp.down": (576, 64)}, 64)


@pytest.mark.parametrize("name", ["llama2", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["int8", "int4", "int3"])
@pytest.mark.parametrize("tp", [1, 2])
def test_planned_bytes_are_loaded_bytes_with_odd_sizes(name: str, precision: str, tp: int, tmp_path: Path):
    checkpoint = open_checkpoint(model(tmp_path, name), "dummy")
    padded = padded_config(checkpoint.config, tp, split_unit([precision]) if tp > 1 else 1)
    for block in ("layers.0", "head"):
        leaves = checkpoint.variant(block, precision, padded)
        quantized = [leaf for leaf in leaves.values() if isinstance(leaf, QArray)]
        assert quantized
        assert sum(leaf.nbytes for leaf in leaves.values()) == block_bytes(padded, block, precision, 1)


@pytest.mark.parametrize("precision", ["int8", "int4", "int3"])
def test_simulator_counts_the_bytes_of_a_layer_with_odd_sizes(precision: str, tmp_path: Path):
    config = model(tmp_path)
    shape = ModelShape.load(config)
    assert shape.layer_bytes(precision) == block_bytes(
        open_checkpoint(config, "dummy").config, "layers.0", precision, 1
    )


@pytest.mark.parametrize("group", [None, 128, 64, 0])
def test_prepared_layers_have_the_bytes_that_are_planned(group: int | None, tmp_path: Path):
    folder = weights(tmp_path)
    settings = QuantizationSettings(("int8", "int4"), "rtn", group)
    store = run(folder, settings).store
    checkpoint = open_checkpoint(folder)
    for precision in settings.precisions:
        layout = stored_layout(checkpoint, checkpoint.config, "layers.0", precision)
        planned = block_bytes(checkpoint.config, "layers.0", precision, 1, layout)
        loaded = checkpoint.variant("layers.0", precision)
        assert planned == sum(leaf.nbytes for leaf in loaded.values()) == store.nbytes(0, precision)
        assert loaded["attention.qkv"].group == (96 if group == 0 else 32)
        by_default = 64 if precision == "int8" else 32
        assert loaded["mlp.down"].group == {None: by_default, 128: 64, 64: 64, 0: 320}[group]


def test_command_says_which_groups_it_takes_instead(tmp_path: Path):
    folder = weights(tmp_path)
    command = ["quantize", str(folder), "--method", "rtn", "--precisions", "int4,int3", "--group"]
    said = CliRunner().invoke(app, [*command, "128"]).output
    assert "int4, int3: a scale for 32 inputs of" in said
    assert "for 64 inputs of down: 128 does not divide 320 and 96" in said
    assert "does not divide" not in CliRunner().invoke(app, [*command, "32"]).output


def notices(caplog: pytest.LogCaptureFixture, folder: Path, **options) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        config = EngineConfig(model=str(folder), memory_gb=1, max_model_len=64, max_num_seqs=2, warmup=False, **options)
        build(config).close()
    return [record.getMessage() for record in caplog.records if "rounded to" in record.getMessage()]


def test_start_says_in_one_line_what_is_rounded_and_what_loses_less(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = weights(tmp_path)
    for options in ({"precision": "int4"}, {"layer_precision": "1-:int4"}, {"policy": "morph", "variants": ("int4",)}):
        (line,) = notices(caplog, folder, **options)
        assert "int4 without calibration (a scale for 32 inputs of" in line
        assert "128 does not divide 320 and 96" in line
        assert f"`jaxserve quantize {folder}`" in line
        assert "\n" not in line
    (line,) = notices(caplog, folder, precision="int4", layer_precision="0:int3")
    assert "rounded to int3 and int4 without" in line or "rounded to int4 and int3 without" in line
    assert notices(caplog, folder) == []
    assert notices(caplog, folder, precision="int8") == []


def test_start_says_nothing_of_rounding_when_layers_were_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = weights(tmp_path)
    run(folder, QuantizationSettings(("int4",), "rtn"))
    assert notices(caplog, folder, precision="int4") == []
    assert len(notices(caplog, folder, precision="int3")) == 1


def test_rounded_leaves_have_the_shapes_of_their_module(tmp_path: Path):
    from jaxserve.models import abstract_block

    checkpoint = open_checkpoint(model(tmp_path, "qwen3_moe"), "dummy")
    _, variables = abstract_block(checkpoint.config, "layers.0", "int4")
    for name, leaf in checkpoint.variant("layers.0", "int4").items():
        expected = variables[name].get_value()
        assert jax.tree.map(np.shape, leaf) == jax.tree.map(np.shape, expected), name
