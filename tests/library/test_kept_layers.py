"""An engine that goes on with layers and losses that were kept while it runs, and uses them at its next start."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.build import BuiltEngine, build
from jaxserve.calibration.background import Wanted, prepare
from jaxserve.calibration.losses import HeldOut
from jaxserve.calibration.own_text import Start
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.kept import KeptLayers
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.checkpoint.variants import Loss
from jaxserve.core.config import EngineConfig
from jaxserve.preparation import wanted_of
from tests.support.internals import held_variants

OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 2 + 32, "memory_gb": 4, "warmup": False}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the cache of Hugging Face's hub, whose files are links."""
    blobs = tmp_path_factory.mktemp("hub") / "models--org--kept" / "blobs"
    folder = blobs.parent / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    shutil.copy(tiny_model / "config.json", blobs)
    dummy = open_checkpoint(tiny_model, "dummy")
    shapes = {n: shape for block in dummy.config.block_ids for n, shape in tensor_shapes(dummy.config, block).items()}
    save_file({name: dummy.store.get(name, shape) for name, shape in shapes.items()}, blobs / "model.safetensors")
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(blob)
    return folder


def write(starts: Sequence[Start]) -> Sequence[Sequence[int]]:
    return [np.random.default_rng(0).integers(3, 499, start.params.max_tokens).tolist() for start in starts]


def served(built: BuiltEngine, layer: int = 1) -> np.ndarray:
    """Return the codes of a layer's weight in int4, as it is held."""
    weight = held_variants(built.store)[f"layers.{layer}", "int4"]["mlp.down"]
    return np.asarray(weight.codes.parts[0])


def test_engine_goes_on_with_what_was_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Random weights lose no less by any method than by rounding.
    monkeypatch.setattr(HeldOut, "losses", lambda self: {"int4": Loss(6.0, 0.2, 0.1), "int8": Loss(6.0, 0.02, 0.01)})
    config = EngineConfig(model=model, policy="morph", **OPTIONS)
    built = build(config, controlled=True)
    assert built.control is not None
    assert "rounded to int4 without calibration" in caplog.text
    rounded, status = served(built), built.control.status()
    assert status["quality"] == {"loss": 0.0, "nats": 0.0, "floor": 0.05, "measured": True}
    wanted = wanted_of(built)
    assert wanted == Wanted(str(model), str(model / "variants" / "background"), ("int4", "int8"), (), "float32")
    Path(wanted.folder).mkdir(parents=True)
    prepare(wanted, built.kept.checkpoint, None, write)
    assert np.array_equal(served(built), rounded), "nothing changes before the engine is told"
    before = built.control.policy
    built.renew()
    assert built.control.policy is not before
    assert not np.array_equal(served(built), rounded)
    assert built.control.decisions(1)[0]["reason"] == "layers were measured: policy morph -> morph"
    kept = KeptLayers(built.kept.checkpoint, built.kept.folder, built.kept.wanted)
    expected = kept.variant("layers.1", "int4")["mlp.down"].codes
    assert np.array_equal(served(built), np.asarray(expected))
    built.close()

    caplog.clear()
    again = build(config, controlled=True)
    assert "rounded to int4" not in caplog.text
    assert np.array_equal(served(again), np.asarray(expected)), "the next start uses it at once"
    assert again.control is not None
    loss = again.control.loss
    assert loss is not None
    assert loss.is_measured(["int4", "int8", "int4"])
    assert (again.control.policy.init(again.resolved.plan.instances[0]).ladder.loss) is loss  # type: ignore[attr-defined]
    again.close()


def test_layers_that_start_in_few_bits_stay_rounded(model: Path) -> None:
    built = build(EngineConfig(model=model, precision="int4", **OPTIONS), controlled=True)
    assert built.kept.wanted == ()
    assert built.rounded_layers == (("int4", (0, 1, 2)),)
    wanted = wanted_of(built)
    assert wanted is not None
    assert (wanted.variants, wanted.rounded) == ((), (("int4", (0, 1, 2)),))
    assert built.control is not None
    assert not built.control.status()["quality"]["measured"]
    built.close()


def test_engine_that_changes_nothing_does_not_read_the_profile(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("variants"))
    (copy / "sensitivity.json").write_text("not JSON")
    build(EngineConfig(model=copy, **OPTIONS)).close()


def test_recorded_engine_keeps_its_order(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=model, policy="morph", step_log=tmp_path / "steps", **OPTIONS)
    built = build(config, controlled=True)
    assert wanted_of(built) is None
    built.close()


def test_option_switches_preparation_off(model: Path) -> None:
    built = build(EngineConfig(model=model, policy="morph", prepare=False, **OPTIONS), controlled=True)
    assert wanted_of(built) is None
    built.close()


def test_model_with_a_profile_is_left_to_its_owner() -> None:
    built = build(EngineConfig(policy="morph", **OPTIONS), controlled=True)
    assert wanted_of(built) is None
    assert built.control is not None
    assert built.control.loss.is_measured(["int4", "int8"] * 4)  # type: ignore[union-attr]
    built.close()
