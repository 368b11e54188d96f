"""What a server keeps about its model: made once, used if it is whole, and ignored otherwise."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.calibration import background, own_text
from jaxserve.calibration.background import Wanted, missing, prepare
from jaxserve.calibration.own_text import Start
from jaxserve.calibration.sensitivity.kept_profile import kept_profile
from jaxserve.calibration.sensitivity.order import Sensitivity
from jaxserve.calibration.sensitivity.profile import FILE_NAME
from jaxserve.calibration.sensitivity.rounding_costs import FILE_NAME as COSTS, RoundingCost, load_costs
from jaxserve.checkpoint import Checkpoint, kept as kept_module, open_checkpoint
from jaxserve.checkpoint.kept import MAX_MODELS, MODELS, KeptLayers, kept_folder, make_room
from jaxserve.checkpoint.loader import DummyStore
from jaxserve.checkpoint.variants import Loss
from jaxserve.core.errors import CheckpointError, JaxserveError
from jaxserve.quantization import QArray

POISONED = "model.layers.1.mlp.down_proj.weight"


class Poisoned(DummyStore):
    """Random weights, some of which are huge in one layer."""

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = super().get(name, shape)
        if name == POISONED:
            values = values.copy()
            values[np.arange(len(values)), np.arange(len(values)) * 7 % values.shape[1]] *= 300
        return values


class Writer:
    """A model that writes random tokens, and counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, starts: Sequence[Start]) -> Sequence[Sequence[int]]:
        self.calls += 1
        rng = np.random.default_rng(0)
        return [rng.integers(3, 499, start.params.max_tokens).tolist() for start in starts]


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path) -> Checkpoint:
    return open_checkpoint(tiny_model, "dummy")


def wanted_in(folder: Path, **changes: object) -> Wanted:
    base = Wanted("tiny", str(folder), ("int8", "int4"), (("int3", (0, 1, 2)),), "float32", 6)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    assert missing(wanted_in(folder), checkpoint)
    prepare(wanted_in(folder), checkpoint, None, Writer())
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The same in a folder that a test may change."""
    folder = tmp_path / "kept"
    for file in made.rglob("*"):
        if file.is_file():
            target = folder / file.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return folder


def layer_codes(layer: object) -> np.ndarray:
    weight = layer["mlp.down"]  # type: ignore[index]
    assert isinstance(weight, QArray)
    return np.asarray(weight.codes)


# -- what is made


def test_everything_is_made_once(checkpoint: Checkpoint, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not missing(wanted_in(made), checkpoint)
    kept = KeptLayers(checkpoint, made, ("int8", "int4"))
    assert kept.precisions == ("int4",), "int8 loses next to nothing when it is rounded"
    profile = kept_profile(kept)
    assert profile is not None
    assert profile.methods == {"int8": "rtn", "int4": "awq"}
    assert profile.losses["int4"].together > profile.losses["int8"].together
    monkeypatch.setattr(background, "quantize_layers", None)
    writer = Writer()
    (made / FILE_NAME).rename(made / "old.json")
    prepare(replace(wanted_in(made), rounded=()), checkpoint, None, writer)
    assert writer.calls == 0
    assert (made / FILE_NAME).read_text() == (made / "old.json").read_text()
    (made / "old.json").unlink()


def test_what_another_policy_needs_is_added(checkpoint: Checkpoint, copied: Path) -> None:
    more = wanted_in(copied, variants=("int3",), rounded=())
    assert missing(more, checkpoint)
    prepare(more, checkpoint, None, Writer())
    assert not missing(more, checkpoint)
    assert KeptLayers(checkpoint, copied, ("int4", "int3")).precisions == ("int4", "int3")


def test_work_goes_on_where_it_was_ended(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = wanted_in(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(background, "layer_losses", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(wanted, checkpoint, None, Writer())
    assert missing(wanted, checkpoint)
    assert KeptLayers(checkpoint, tmp_path, ("int4",)).precisions == ("int4",)
    writer = Writer()
    prepare(wanted, checkpoint, None, writer)
    assert writer.calls == 0
    assert not missing(wanted, checkpoint)


def test_nothing_half_written_is_used(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = background.VariantWriter.add

    def full(writer: object, index: int, *arguments: object) -> int:
        if index == 2:
            raise CheckpointError("the disk is full")
        return real(writer, index, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(background.VariantWriter, "add", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            prepare(wanted_in(tmp_path), checkpoint, None, Writer())
    assert KeptLayers(checkpoint, tmp_path, ("int4",)).precisions == ()
    with monkeypatch.context() as patched:
        patched.setattr(background, "write_sums", lambda *arguments: 1 / 0)  # killed after the layers
        with pytest.raises(ZeroDivisionError):
            prepare(wanted_in(tmp_path), checkpoint, None, Writer())
    assert KeptLayers(checkpoint, tmp_path, ("int4",)).precisions == ()
    prepare(wanted_in(tmp_path), checkpoint, None, Writer())
    assert not missing(wanted_in(tmp_path), checkpoint)


def test_folder_that_cannot_be_written_is_an_error_of_one_line(checkpoint: Checkpoint) -> None:
    with pytest.raises(JaxserveError, match="cannot write /proc/nowhere"):
        prepare(wanted_in(Path("/proc/nowhere")), checkpoint, None, Writer())


def test_layer_that_cannot_be_rounded_is_found_and_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = replace(open_checkpoint(tiny_model, "dummy"), store=Poisoned())
    wanted = wanted_in(tmp_path, variants=("int4",), rounded=())
    prepare(wanted, checkpoint, None, Writer())
    profile = kept_profile(KeptLayers(checkpoint, tmp_path, ("int4",)))
    assert profile is not None
    alone = profile.losses["int4"].alone
    assert alone[1] > 3 * max(alone[0], alone[2])
    known = Sensitivity.of(3, ("int4",), profile)
    assert known.swap_order[-1] == 1
    floor = (known.loss(["int4", "float32", "int4"]) + known.loss(["float32", "int4", "float32"])) / 2
    assert known.loss(["int4", "float32", "int4"]) <= floor < known.loss(["float32", "int4", "float32"])


def test_rounding_is_kept_where_preparation_gains_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background.HeldOut, "losses", lambda held_out: {"int4": Loss(6.0, 0.1, 0.1)})
    wanted = wanted_in(tmp_path, variants=("int4",), rounded=())
    prepare(wanted, checkpoint, None, Writer())
    kept = KeptLayers(checkpoint, tmp_path, ("int4",))
    assert kept.method("layers.1", "int4") == "rtn"
    profile = kept_profile(kept)
    assert profile is not None
    assert profile.methods == {"int4": "rtn"}
    assert not missing(wanted, checkpoint)


# -- what is used


def test_kept_layers_take_the_place_of_rounded_ones(checkpoint: Checkpoint, made: Path) -> None:
    kept, others = KeptLayers(checkpoint, made, ("int4",)), KeptLayers(checkpoint, made, ())
    rounded = checkpoint.variant("layers.1", "int4")
    assert not np.array_equal(layer_codes(kept.variant("layers.1", "int4")), layer_codes(rounded))
    np.testing.assert_array_equal(layer_codes(others.variant("layers.1", "int4")), layer_codes(rounded))
    np.testing.assert_array_equal(
        layer_codes(kept.variant("layers.1", "int8")), layer_codes(checkpoint.variant("layers.1", "int8"))
    )
    assert kept.method("layers.1", "int4") == "awq"
    assert (others.method("layers.1", "int4"), kept.method("layers.1", "int8")) == ("rtn", "rtn")


@pytest.mark.parametrize("damage", ["byte", "shorter", "missing", "sums", "manifest", "weights", "group"])
def test_damaged_layers_are_rounded(
    checkpoint: Checkpoint, copied: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    data = max(
        (file for file in (copied / "int4" / "layers.1").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    if damage in ("byte", "shorter"):
        data.write_bytes(content if damage == "byte" else content[:-1])
    elif damage == "missing":
        data.unlink()
    elif damage == "sums":
        (copied / kept_module.SUMS).write_text("[1")
    elif damage == "manifest":
        (copied / "variants.json").write_text("{}")
    elif damage == "weights":
        checkpoint = replace(checkpoint, store=Poisoned())
    else:
        monkeypatch.setattr(kept_module, "_expected", lambda *arguments: {})
    kept = KeptLayers(checkpoint, copied, ("int4",))
    rounded = layer_codes(checkpoint.variant("layers.1", "int4"))
    np.testing.assert_array_equal(layer_codes(kept.variant("layers.1", "int4")), rounded)
    if damage != "group":
        assert kept_profile(kept) is None or "int4" not in kept_profile(kept).losses  # type: ignore[union-attr]
        assert missing(wanted_in(copied), checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "jaxserve.sensitivity", "version": 2}'])
def test_damaged_files_are_made_again(checkpoint: Checkpoint, copied: Path, text: str) -> None:
    for name in (FILE_NAME, COSTS, own_text.FILE_NAME):
        (copied / name).write_text(text)
    wanted = wanted_in(copied)
    assert kept_profile(KeptLayers(checkpoint, copied, ("int4",))) is None
    assert load_costs(copied / COSTS, lambda: "any") == {}
    assert missing(wanted, checkpoint)
    prepare(wanted, checkpoint, None, Writer())
    assert not missing(wanted, checkpoint)


def test_losses_of_layers_that_are_served_otherwise_do_not_count(checkpoint: Checkpoint, made: Path) -> None:
    served = kept_profile(KeptLayers(checkpoint, made, ()))
    assert served is not None
    assert set(served.losses) == {"int8"}, "int4 is rounded here, and was measured as AWQ makes it"


# -- what rounding costs


def test_cost_of_rounding_is_one_line(made: Path) -> None:
    content = json.loads((made / COSTS).read_text())
    costs = load_costs(made / COSTS, lambda: content["model"])
    assert load_costs(made / COSTS, lambda: "other") == {}
    assert costs["int3"].rounded > 0
    assert costs["int3"].layers == (0, 1, 2)
    cost = RoundingCost((0, 1), 0.193, 0.1004, 3.328)
    assert cost.text("int4", 2, "jaxserve quantize M") == (
        "layers rounded to int4 cost about 0.19 nats a token (+5.8 %) on the model's own text; "
        "`jaxserve quantize M` lowers it to 0.1"
    )
    assert replace(cost, prepared=0.2).text("int4", 3, "x").startswith("2 layers rounded to int4 cost about 0.19 nats")
    assert "lowers" not in replace(cost, prepared=0.2).text("int4", 3, "x")


def test_cost_of_rounding_is_what_the_plan_is_said_to_lose() -> None:
    cost = RoundingCost((1, 2), 0.2, 0.1, 4.0)
    loss = Sensitivity.of(4, (), None, {"int4": cost}).loss
    assert loss(["bfloat16", "int4", "int4", "bfloat16"]) == pytest.approx(0.05)
    assert loss.nats(["bfloat16", "int4", "int4", "bfloat16"]) == pytest.approx(0.2)


# -- where it is kept


def test_folder_is_beside_the_model_if_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    assert kept_folder(model, cache) == model / "variants" / "background"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    in_cache = kept_folder(model, cache)
    assert in_cache is not None
    assert in_cache.parent == cache / MODELS
    assert in_cache.name.startswith("model-")
    assert kept_folder(tmp_path / "other" / "model", cache) != in_cache
    assert kept_folder(model, None) is None


def test_few_models_are_kept_in_the_cache(tmp_path: Path) -> None:
    folders = [tmp_path / MODELS / str(number) for number in range(MAX_MODELS + 3)]
    for folder in folders:
        folder.mkdir(parents=True)
    make_room(folders[0])
    left = {folder.name for folder in (tmp_path / MODELS).iterdir()}
    assert len(left) == MAX_MODELS
    assert "0" in left
    beside = tmp_path / "variants" / "background"
    beside.mkdir(parents=True)
    (beside.parent / "int4").mkdir()
    make_room(beside)
    assert (beside.parent / "int4").exists()


def test_kept_layers_that_cannot_be_read_are_said_once(
    checkpoint: Checkpoint, copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptLayers(checkpoint, copied, ("int4",))
    assert kept.precisions == ("int4",)
    (copied / "int4" / "layers.1").rename(copied / "gone")  # after it was looked at
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(
            layer_codes(kept.variant("layers.1", "int4")), layer_codes(checkpoint.variant("layers.1", "int4"))
        )
    assert "layers.1 is rounded to int4" in caplog.text
