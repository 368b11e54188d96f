"""The variant store: layers come back as they were written, and nothing else is accepted in their place."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxserve.calibration.pipeline import QuantizationSettings
from jaxserve.calibration.run import run
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.refit import fitted
from jaxserve.checkpoint.variants import FORMAT, MANIFEST, Method, VariantStore, VariantWriter, fingerprint
from jaxserve.cli.main import app
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError
from jaxserve.quantization import QArray
from jaxserve.quantization.layer import nbytes, round_layer
from tests.support.file_size import file_size_limit

MODEL = bundled_model_path()
RTN = Method("rtn", 128, True)


def assert_equal_leaves(found, expected):
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert isinstance(found[name], QArray) == isinstance(leaf, QArray), name
        assert jax.tree.structure(found[name]) == jax.tree.structure(leaf), name
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(leaf), strict=True):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b)


HELD_OUT = ("--calib", __file__, "--calib-samples", "2", "--calib-length", "32")  # a text to measure on


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the bundled model, rounded to the nearest by the command."""
    out = tmp_path_factory.mktemp("store") / "variants"
    command = ["quantize", str(MODEL), "--precisions", "int4,int3", "--method", "rtn", "--out", str(out), *HELD_OUT]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "305,152" in done.output
    return out


@pytest.mark.parametrize("precision", ["int4", "int3"])
def test_variants_written_by_the_command_equal_the_rounded_model(store, precision):
    variants, checkpoint = VariantStore.open(store), open_checkpoint(MODEL)
    variants.check(checkpoint)
    assert variants.num_layers == checkpoint.config.num_layers > 0
    for index in range(variants.num_layers):
        expected = round_layer(checkpoint.block(f"layers.{index}"), int(precision[-1]))
        assert_equal_leaves(variants.layer(index, precision), expected)
        assert variants.nbytes(index, precision) == nbytes(expected)


def test_variant_of_one_layer_is_read_without_the_others(store, tmp_path):
    alone = tmp_path / "variants"
    shutil.copytree(
        store, alone, ignore=lambda folder, names: {n for n in names if n.startswith("layers.")} - {"layers.5"}
    )
    assert_equal_leaves(VariantStore.open(alone).layer(5, "int3"), VariantStore.open(store).layer(5, "int3"))
    with pytest.raises(CheckpointError, match=r"int3.layers\.4"):
        VariantStore.open(alone).layer(4, "int3")


def test_variant_is_read_only(store):
    with pytest.raises(ValueError, match="read-only"):
        VariantStore.open(store).layer(0, "int4")["attention.qkv"].codes[0] = 0


def test_variant_store_adds_and_replaces_single_precisions(tmp_path):
    checkpoint = open_checkpoint(MODEL)
    layers = [round_layer(checkpoint.block(f"layers.{index}"), 8) for index in range(8)]
    with_zeros = [round_layer(checkpoint.block(f"layers.{index}"), 8, symmetric=False) for index in range(8)]
    for precision, method, variant in (("int8", RTN, layers), ("int4", RTN, layers), ("int8", RTN, with_zeros)):
        writer = VariantWriter(tmp_path, checkpoint, {precision: method})
        for index, leaves in enumerate(variant):
            writer.add(index, precision, leaves)
        store = writer.finish()
    assert set(store.precisions) == {"int4", "int8"}
    assert_equal_leaves(store.layer(7, "int8"), with_zeros[7])
    assert_equal_leaves(store.layer(7, "int4"), layers[7])
    assert store.method("int4") == RTN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["int4", "int8", MANIFEST, "variants.lock"]


def test_variant_store_refuses_a_second_writer(tmp_path):
    checkpoint = open_checkpoint(MODEL)
    layers = [round_layer(checkpoint.block(f"layers.{index}"), 8) for index in range(8)]
    first = VariantWriter(tmp_path, checkpoint, {"int8": RTN})
    first.add(0, "int8", layers[0])
    command = ["quantize", str(MODEL), "--precisions", "int4", "--method", "rtn", "--out", str(tmp_path), *HELD_OUT]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "another `jaxserve quantize` is writing there" in " ".join(refused.output.split())
    for index in range(1, 8):
        first.add(index, "int8", layers[index])
    first.finish()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert set(VariantStore.open(tmp_path).precisions) == {"int4", "int8"}


def test_layer_larger_than_what_is_free_is_refused(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(MODEL)
    writer = VariantWriter(tmp_path, checkpoint, {"int8": RTN})
    leaves = round_layer(checkpoint.block("layers.0"), 8)
    size = sum(leaf.nbytes for leaf in leaves.values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    message = f"{tmp_path}: a layer in int8 needs {size} bytes, and {size - 1} are free there"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        writer.add(0, "int8", leaves)
    assert os.listdir(tmp_path) == ["variants.lock"]


def test_full_disk_is_reported_with_the_folder(tmp_path):
    checkpoint = open_checkpoint(MODEL)
    writer = VariantWriter(tmp_path, checkpoint, {"int8": RTN})
    leaves = round_layer(checkpoint.block("layers.0"), 8)
    message = f"{tmp_path}: variants cannot be written there (File too large)"
    with file_size_limit(100), pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        writer.add(0, "int8", leaves)


def test_interrupted_write_leaves_the_old_variant_store(store, tmp_path):
    again = tmp_path / "variants"
    shutil.copytree(store, again)
    checkpoint = open_checkpoint(MODEL)
    VariantWriter(again, checkpoint, {"int4": RTN}).add(0, "int4", round_layer(checkpoint.block("layers.0"), 8))
    assert_equal_leaves(VariantStore.open(again).layer(0, "int4"), VariantStore.open(store).layer(0, "int4"))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The bundled model with prepared variants that rounding to the nearest alone would not give."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("variants"))
    run(model, QuantizationSettings(("int4",), "rtn", 64))
    return model


@pytest.mark.parametrize("shards", [1, 2])
def test_checkpoint_uses_variants_prepared_next_to_it(prepared, shards):
    checkpoint = open_checkpoint(prepared)
    padded = replace(checkpoint.config, shards=shards)
    expected = round_layer(checkpoint.block("layers.3", padded), 4, group=64)
    assert_equal_leaves(checkpoint.variant("layers.3", "int4", padded), expected)
    assert checkpoint.variant("layers.3", "int8", padded)["mlp.down"].bits == 8  # was not prepared
    assert open_checkpoint(prepared, prepared=False).variant("layers.3", "int4")["mlp.down"].group == 128


def test_prepared_variants_follow_the_dtype_and_are_padded(prepared):
    checkpoint = open_checkpoint(prepared, dtype="float32")
    plain = checkpoint.variant("layers.0", "int4")
    assert plain["post_norm.weight"].dtype == np.float32
    padded = checkpoint.variant("layers.0", "int4", replace(checkpoint.config, intermediate_size=1024))
    down = np.asarray(padded["mlp.down"].dequantize())
    size = checkpoint.config.intermediate_size
    np.testing.assert_array_equal(down[:, :size], plain["mlp.down"].dequantize())
    assert down.shape == (256, 1024)
    assert not down[:, size:].any()


def test_prepared_groups_become_smaller_where_devices_would_cut_them():
    checkpoint = open_checkpoint(MODEL)
    layer, two = round_layer(checkpoint.block("layers.0"), 4, group=0), replace(checkpoint.config, shards=2)
    split = fitted(layer, checkpoint.config, two)["mlp.down"]
    assert split.group == 128
    np.testing.assert_array_equal(split.dequantize(), layer["mlp.down"].dequantize())


def test_variants_of_older_weights_are_refused_and_replaced(prepared, tmp_path):
    file = prepared / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.self_attn.q_proj.weight"] = -tensors["model.layers.2.self_attn.q_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="another model"):
        open_checkpoint(prepared)
    assert run(prepared, QuantizationSettings(("int8",), "rtn")).store.precisions == ("int8",)
    assert open_checkpoint(prepared).prepared is not None


def test_fingerprint_covers_rows_all_over_a_tensor(prepared):
    before = fingerprint(open_checkpoint(prepared))
    file, name = prepared / "model.safetensors", "model.layers.2.self_attn.q_proj.weight"
    tensors = load_file(file)
    tensors[name] = np.concatenate([tensors[name][:1], tensors[name][:0:-1]])
    save_file(tensors, file)
    assert fingerprint(open_checkpoint(prepared, prepared=False)) != before


def test_error_for_an_unwritable_variant_folder_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    command = ["quantize", str(MODEL), "--method", "rtn", "--out", str(tmp_path / "file")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "cannot be written there" in done.output.replace("\n", " ")


def test_refused_quantize_command_leaves_no_folder(tmp_path):
    command = ["quantize", str(MODEL), "--calib", "/nowhere.txt", "--out", str(tmp_path / "variants")]
    assert CliRunner().invoke(app, command).exit_code == 1
    assert not (tmp_path / "variants").exists()


def test_error_for_a_truncated_variant_file_names_it(store, tmp_path, capfd):
    cut = tmp_path / "variants"
    shutil.copytree(store, cut)
    largest = max((cut / "int4" / "layers.2").rglob("*"), key=lambda file: file.stat().st_size)
    os.truncate(largest, 100)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(largest))}: has 100 of \d+ bytes"):
        VariantStore.open(cut).layer(2, "int4")
    largest.unlink()
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(largest))}: has 0 of \d+ bytes"):
        VariantStore.open(cut).layer(2, "int4")
    assert "Event loop is closed" not in capfd.readouterr().err


def test_variants_of_another_model_are_refused(store, tiny_model):
    with pytest.raises(CheckpointError, match="another model"):
        VariantStore.open(store).check(open_checkpoint(tiny_model, "dummy"))


def test_error_for_a_missing_layer_precision_or_manifest_names_it(store, tmp_path):
    variants = VariantStore.open(store)
    with pytest.raises(CheckpointError, match="has no int8; it has int4, int3"):
        variants.layer(0, "int8")
    with pytest.raises(CheckpointError, match="has no layer 8; it has 8"):
        variants.nbytes(8, "int4")
    with pytest.raises(CheckpointError, match="jaxserve quantize"):
        VariantStore.open(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99 is not 2.*make the variants again with `jaxserve quantize`"):
        VariantStore.open(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"format": FORMAT, "num_layers": 8}))
    with pytest.raises(CheckpointError, match="has no model, precisions"):
        VariantStore.open(tmp_path)


def test_norms_of_variants_keep_the_checkpoints_dtype(store):
    assert VariantStore.open(store).layer(0, "int4")["input_norm.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precisions", "int5"], "'int5'"),
        (["--precisions", ","], "no precision"),
        (["--method", "rtn", "--group", "48"], "group is 48"),
        (["--calib", "/nowhere.txt"], "/nowhere.txt"),
    ],
)
def test_invalid_quantize_options_give_a_one_line_error(tmp_path, options, message):
    done = CliRunner().invoke(app, ["quantize", str(MODEL), "--out", str(tmp_path / "variants"), *options])
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output
