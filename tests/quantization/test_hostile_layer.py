"""A layer that cannot be rounded well is found by the measurement, and no policy changes it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.calibration.sensitivity.order import sensitivity
from jaxserve.calibration.sensitivity.profile import FILE_NAME
from jaxserve.calibration.sensitivity.run import Options, profile_model
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.control.policies import ACCURACY, PERFORMANCE, MorphPolicy
from jaxserve.control.policies.quality import FLOOR
from jaxserve.core.bundled import bundled_model_path
from tests.support.control import home_plan, machine

NUM_LAYERS, HOSTILE = 8, 5
FACTOR = 1024  # a power of two, so that full precision stays what it is
TEXT = "def area(width: float, height: float) -> float:\n    return width * height\n\n\nclass Box:\n    pass\n\n\n" * 30


def hostile(folder: Path) -> Path:
    """Return a copy of the bundled model that computes the same, with a layer whose groups have one huge weight each.

    Every 32nd input of some products is divided by a factor where it is normalised, and multiplied by it in the weight.
    """
    model = bundled_model_path()
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix == ".json" and path.name != FILE_NAME:
            shutil.copy(path, folder)
    tensors = load_file(model / "model.safetensors")
    prefix = f"model.layers.{HOSTILE}."
    of_norms = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for norm, products in of_norms.items():
        tensors[f"{prefix}{norm}.weight"][::32] /= FACTOR
        for product in products:
            tensors[f"{prefix}{product}.weight"][:, ::32] *= FACTOR
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_layer_that_cannot_be_rounded_keeps_its_precision(tmp_path: Path) -> None:
    folder, calib = hostile(tmp_path / "model"), tmp_path / "text.txt"
    calib.write_text(TEXT)
    profile = profile_model(folder, calib, None, Options(precisions=("int8", "int4"), length=128, tokens=256))
    profile.save(folder / FILE_NAME)
    found = sensitivity(folder, NUM_LAYERS, ("int4", "int8"), lambda: fingerprint(open_checkpoint(folder)))
    assert found.swap_order[-1] == HOSTILE
    losses = [found.loss.by_layer["int4"][layer] for layer in found.swap_order]
    assert losses[-1] > max(FLOOR, 5 * losses[-2])
    for settings in (ACCURACY, PERFORMANCE):
        policy = MorphPolicy(machine(NUM_LAYERS), found.swap_order, settings, loss=found.loss)
        largest = policy.largest(home_plan(NUM_LAYERS).instances[0])
        assert largest is not None
        precisions = largest.layer_precisions
        assert precisions[HOSTILE] == "bfloat16"
        assert precisions.count("int4") == NUM_LAYERS - 1, "all others change"


def test_the_hostile_model_computes_what_the_original_does(tmp_path: Path) -> None:
    names = "attention.qkv", "input_norm.weight"
    original, changed = (
        open_checkpoint(path, dtype="float32").block(f"layers.{HOSTILE}")
        for path in (bundled_model_path(), hostile(tmp_path / "model"))
    )
    products = [np.asarray(block[names[0]]) * np.asarray(block[names[1]]) for block in (original, changed)]
    assert products[0] == pytest.approx(products[1], abs=0)
    assert np.abs(np.asarray(changed[names[0]])).max() > 100 * np.abs(np.asarray(original[names[0]])).max()
