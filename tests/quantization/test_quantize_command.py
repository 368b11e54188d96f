"""`jaxserve quantize` with calibration text: what it writes, prints and holds in memory."""

import gc
import json
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from jaxserve.calibration import own_text, pipeline
from jaxserve.calibration.own_text import Settings
from jaxserve.calibration.pipeline import QuantizationSettings, quantize_layers
from jaxserve.calibration.run import CalibrationText
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.checkpoint.variants import VariantStore, VariantWriter
from jaxserve.cli.main import app
from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.quantization import QArray
from jaxserve.quantization.layer import LayerFormat, Leaves, round_layer
from tests.conftest import TINY
from tests.quantization.test_variants import assert_equal_leaves

LAYERS = 3
CONFIG = TINY | {"num_hidden_layers": LAYERS, "intermediate_size": 64, "vocab_size": 4096}  # few shapes to compile
MATRICES = {"attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"}
TEXT = "def area(width: float, height: float) -> float:\n    return width * height\n\n\n"
PIECES = ("--calib-samples", "2", "--calib-length", "24")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights, and the bundled one's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    dummy = open_checkpoint(folder, "dummy")
    shapes = {name: shape for b in dummy.config.block_ids for name, shape in tensor_shapes(dummy.config, b).items()}
    save_file({name: dummy.store.get(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    shutil.copy(bundled_model_path() / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calib.txt"
    path.write_text(TEXT * 4)
    return path


def quantize(model: Path, calib: Path, out: Path, *options: str) -> str:
    """Run the command and return what it printed."""
    command = ["quantize", str(model), "--precisions", "int4", "--method", "awq", "--calib", str(calib), *PIECES]
    done = CliRunner().invoke(app, [*command, "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ((), QuantizationSettings(("int4",), "awq")),
        (("--zero-points", "--group", "32"), QuantizationSettings(("int4",), "awq", 32, symmetric=False)),
    ],
)
def test_quantize_command_writes_the_layers_that_awq_makes(
    model: Path, calib: Path, tmp_path: Path, options: tuple[str, ...], settings: QuantizationSettings
) -> None:
    printed = quantize(model, calib, tmp_path / "variants", *options)
    store, checkpoint = VariantStore.open(tmp_path / "variants"), open_checkpoint(model)
    store.check(checkpoint)
    method = store.method("int4")
    group = settings.format_of("int4", checkpoint.config).group
    assert (method.name, method.group, method.symmetric) == ("awq", group, settings.symmetric)
    assert f"{sum(store.nbytes(index, 'int4') for index in range(LAYERS)):,}" in printed
    tokens = CalibrationText(calib, 2, 24).tokens(Tokenizer.load(model))
    assert tokens.shape == (2, 24)
    layers = list(quantize_layers(checkpoint, settings, tokens[:1]))  # the second piece is held out
    assert len(layers) == LAYERS
    for index, precision, leaves in layers:
        found = store.layer(index, precision)
        assert_equal_leaves(found, leaves)
        assert {name for name, leaf in found.items() if isinstance(leaf, QArray)} == MATRICES
        for name in MATRICES:
            assert found[name].bits == 4
            assert (found[name].zeros is None) == settings.symmetric
            groups = -(-found[name].size // group)
            assert found[name].scales.shape[-1] == groups, name
        assert store.nbytes(index, precision) == sum(leaf.nbytes for leaf in leaves.values())


def test_quantize_command_holds_one_layer_in_memory_and_shows_progress(
    model: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No array of an earlier layer is left on the host or on the device when a layer is written."""
    block, add = Checkpoint.block, VariantWriter.add
    arrays: dict[int, list[weakref.ref]] = {}  # by layer: those of full precision, and those of the variant
    device: list[int] = []  # bytes of all arrays of JAX while a layer is written

    def read(checkpoint: Checkpoint, block_id: str, *args: Any) -> dict[str, Any]:
        leaves = block(checkpoint, block_id, *args)
        if block_id.startswith("layers."):
            follow(int(block_id.removeprefix("layers.")), leaves)
        return leaves

    def follow(index: int, leaves: Mapping[str, Any]) -> None:
        arrays.setdefault(index, []).extend(weakref.ref(leaf) for leaf in jax.tree.leaves(dict(leaves)))

    def write(writer: VariantWriter, index: int, precision: str, leaves: Leaves) -> int:
        follow(index, leaves)
        gc.collect()
        device.append(sum(array.nbytes for array in jax.live_arrays()))
        alive = [number for number, refs in arrays.items() if any(ref() is not None for ref in refs)]
        assert alive == [index]
        return add(writer, index, precision, leaves)

    monkeypatch.setattr(Checkpoint, "block", read)
    monkeypatch.setattr(VariantWriter, "add", write)
    printed = quantize(model, calib, tmp_path / "variants")
    assert sorted(arrays) == list(range(LAYERS))
    assert all(len(refs) > len(MATRICES) for refs in arrays.values())
    assert max(device) - min(device) < VariantStore.open(tmp_path / "variants").nbytes(0, "int4")
    assert "quantising layers: done in" in printed


class FewPieces(Settings):
    """Settings of a short text, whatever is asked for."""

    def __init__(self, *given: int, **named: int):
        super().__init__(5, 16, named.get("seed", Settings.seed))


def test_quantize_needs_no_text_and_keeps_a_method_only_if_it_loses_less_than_rounding(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(leaves: Mapping[str, Any], inputs: Any, form: LayerFormat) -> Leaves:
        return round_layer({name: -leaf for name, leaf in leaves.items()}, form.bits, group=form.group)

    monkeypatch.setattr(pipeline, "awq_layer", poisoned)
    monkeypatch.setattr(own_text, "Settings", FewPieces)
    command = ["quantize", str(model), "--precisions", "int4", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "writing calibration text: done in" in done.output
    assert "15 held-out tokens of text that the model has written" in done.output
    assert "int4: awq loses no less than rounding: rounding is stored" in done.output
    store = VariantStore.open(tmp_path)
    assert store.method("int4").name == "rtn"
    loss = store.loss("int4")
    assert loss is not None
    assert loss.method == loss.rounding
    for index in range(LAYERS):
        leaves = open_checkpoint(model).block(f"layers.{index}")
        assert_equal_leaves(store.layer(index, "int4"), round_layer(leaves, 4, group=store.method("int4").group))
    asked = CliRunner().invoke(app, [*command, "--method", "awq"])
    assert "writing calibration text" not in asked.output, "the text is kept"
    assert "int4: awq loses no less than rounding: it is stored because of --method awq" in asked.output
    store = VariantStore.open(tmp_path)
    assert store.method("int4").name == "awq"
    assert store.loss("int4").method > store.loss("int4").rounding
