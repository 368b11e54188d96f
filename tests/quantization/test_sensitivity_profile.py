"""The sensitivity profile as a file, and the command that makes it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxserve.calibration.sensitivity import SensitivityProfile
from jaxserve.calibration.sensitivity.profile import (
    BACK,
    FRONT,
    LIS,
    MDS,
    RANDOM,
    LayerLosses,
    LayerScores,
    QualityCurve,
    Text,
    Weights,
)
from jaxserve.calibration.texts import read_rows
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.cli.main import app
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.engine.tokenizer import Tokenizer
from tests.support.thorough import THOROUGH

MODEL = bundled_model_path()
TEXT = "def area(width: float, height: float) -> float:\n    return width * height\n\n\n"

PROFILE = SensitivityProfile(
    model="tiny",
    model_sha256="ab" * 32,
    num_layers=3,
    methods={"int4": "rtn"},
    weights=Weights(),
    positions="all",
    calibration=Text("calib.txt", "cd" * 32, (0.0, 0.5), 4, 256),
    held_out=Text("calib.txt", "cd" * 32, (0.5, 1.0), 4, 256),
    losses={"int8": LayerLosses((0.001, 0.002, 0.0005), 0.0035, 2.0)},
    scores={
        "int4": LayerScores(
            (1, 0, 2), (0.5, 0.9, 0.4), (0.99, 1.0, 0.98), (1.0, 1.0, 0.9), (0.9, 0.8, 0.7), (1.0, 0.99, 0.9)
        )
    },
    curves={"int4": {"lis": (QualityCurve((0, 3), (2.0, 2.5), (0.0, 0.4), (1.0, 0.9)),)}},
)


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "sensitivity.json"
    PROFILE.save(path)
    return path


def changed(path: Path, **values) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return path


# -- the file


def test_profile_survives_saving_and_loading(saved):
    assert SensitivityProfile.load(saved) == PROFILE
    assert [path.name for path in saved.parent.iterdir()] == ["sensitivity.json"]


def test_profile_has_an_order_for_each_precision():
    assert PROFILE.order("int4") == (1, 0, 2)
    with pytest.raises(ConfigError, match=r"of tiny has no 'int3', only int4, int8; .*--precisions int3"):
        PROFILE.order("int3")


def test_profile_of_other_weights_is_refused():
    PROFILE.check_model("ab" * 32, 3)
    with pytest.raises(ConfigError, match=r"other weights \(tiny, sha256 abababababab\) than these \(sha256 00000"):
        PROFILE.check_model("00" * 32, 3)
    with pytest.raises(ConfigError, match="of a model of 3 layers, this one has 4"):
        PROFILE.check_model("ab" * 32, 4)


def test_missing_profile_error_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.json: there is no sensitivity profile; `jaxserve profile`"):
        SensitivityProfile.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", '{"format": "other", "version": 2}'])
def test_file_that_is_not_a_profile_is_refused(saved, text):
    saved.write_text(text)
    with pytest.raises(CheckpointError, match=r"sensitivity\.json: is not a sensitivity profile"):
        SensitivityProfile.load(saved)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 1}, "has version 1: this jaxserve reads version 2"),
        ({"weights": {"lts": 1}, "calibration": None}, "missing or of the wrong type"),
        ({"scores": {"int4": {"order": [0, 1, 2]}}}, "missing or of the wrong type"),
        ({"num_layers": 4, "losses": {}}, r"the order of int4 is \(1, 0, 2\): .* from 0 to 3"),
        ({"num_layers": 4}, "the losses of int8 must be a finite number for each layer"),
        (
            {"losses": {"int8": {"alone": [0.1, float("nan"), 0.1], "together": 1, "cross_entropy": 2}}},
            "must be a finite",
        ),
    ],
)
def test_error_for_an_invalid_profile_names_the_file_and_the_value(saved, values, message):
    with pytest.raises(CheckpointError, match=rf"sensitivity\.json: .*{message}"):
        SensitivityProfile.load(changed(saved, **values))


def test_loading_a_profile_loads_no_jax(saved):
    code = (
        "import sys; from jaxserve.calibration.sensitivity import SensitivityProfile; "
        f"SensitivityProfile.load({str(saved)!r}); assert not {{'jax', 'numpy'}} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- texts


def test_calibration_rows_are_spread_evenly_over_their_part_of_the_text(tmp_path):
    tokenizer, path = Tokenizer.load(MODEL), tmp_path / "text.txt"
    path.write_text(TEXT * 20)
    tokens = tokenizer.encode(TEXT * 20, add_special_tokens=False)
    half = round(len(tokens) / 2)
    rows = read_rows(path, tokenizer, length=15, count=3, part=(0.5, 1.0))
    assert rows.tokens.shape == (3, 16)
    front = tokenizer.encode("")
    body = 16 - len(front)
    assert rows.tokens[0].tolist() == [*front, *tokens[half : half + body]]
    assert rows.tokens[-1].tolist() == [*front, *tokens[-body:]]
    assert (rows.source.rows, rows.source.length, rows.source.part) == (3, 15, (0.5, 1.0))


def test_calibration_texts_are_read_from_json_lines(tmp_path):
    tokenizer, plain, lines = Tokenizer.load(MODEL), tmp_path / "text.txt", tmp_path / "text.jsonl"
    plain.write_text(TEXT * 20)
    lines.write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(20)))
    found = [read_rows(path, tokenizer, length=15, count=2) for path in (plain, lines)]
    np.testing.assert_array_equal(found[0].tokens[0], found[1].tokens[0])
    assert found[0].source.sha256 != found[1].source.sha256


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.txt", b"def", r"short\.txt: has \d tokens, but 2 rows of 15 need 3\d"),
        ("text.txt", b"\xff\xfe", r"cannot read .*text\.txt: "),
        ("text.jsonl", b'{"words": 1}', r'text\.jsonl: line 1 is not a JSON object with a "text"'),
    ],
)
def test_unusable_calibration_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path / name, Tokenizer.load(MODEL), length=15, count=2)


# -- the command


QUICK = ("--calib-tokens", "64", "--length", "32")
SMALL = (*QUICK, "--compare-orders", "--held-out-tokens", "64", "--seeds", "2")


def run(*args) -> str:
    """Return what the command prints, joined to one line."""
    done = CliRunner().invoke(app, ["profile", *map(str, args)])
    return f"{done.exit_code}: " + " ".join(done.output.split())


@pytest.fixture(scope="module")
def calib(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calib.txt"
    source = Path(json.__file__).read_text()
    path.write_text(source)
    return path


@pytest.mark.parametrize(
    "option",
    ["--plot a.png", "--held-out a.txt", "--held-out-tokens 4096", "--positions last", "--weights 1,1,1", "--seeds 2"],
)
def test_options_of_orders_are_refused_where_none_are_compared(option):
    done = CliRunner().invoke(app, ["profile", *option.split()])
    assert done.exit_code
    said = f"{done.output}{done.exception}"
    assert f"{option.split()[0]} concerns orders of swapping alone: add --compare-orders" in " ".join(said.split())


def test_profile_command_measures_each_layer_alone(calib, tmp_path):
    out = tmp_path / "profile.json"
    printed = run(MODEL, "--calib", calib, "--precisions", "int4", "--out", out, *QUICK)
    assert printed.startswith("0: int4: loss of 10 sets of layers: done in "), printed
    assert "done in" in printed, "progress is shown where the output is no terminal"
    profile = SensitivityProfile.load(out)
    profile.check_model(fingerprint(open_checkpoint(MODEL)), 8)
    losses = profile.losses["int4"]
    assert profile.order("int4") == tuple(sorted(range(8), key=lambda layer: losses.alone[layer]))
    assert 0 < min(losses.alone) < losses.together
    assert f"change to int4 in this order: {', '.join(map(str, profile.order('int4')))}" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_profile_command_writes_a_profile_and_a_plot(calib, tmp_path):
    out = tmp_path / "profile.json"
    printed = run(MODEL, "--calib", calib, "--precisions", "int4,int3", "--out", out, *SMALL)
    assert printed.startswith("0: "), printed
    profile = SensitivityProfile.load(out)
    profile.check_model(fingerprint(open_checkpoint(MODEL)), 8)
    assert profile.precisions == ("int4", "int3")
    assert profile.calibration.part == (0.0, 0.5)
    assert profile.held_out.part == (0.5, 1.0)
    assert profile.curves["int3"].keys() == {LIS, MDS, FRONT, BACK, RANDOM}
    name, layers = profile.order_name("int3"), ", ".join(map(str, profile.order("int3")))
    assert f"swap to int3 in this order ({name}): {layers}" in printed
    for precision in profile.precisions:
        curves = profile.curves[precision]
        assert [len(group) for group in curves.values()] == [1, 1, 1, 1, 2]
        for curve in (curve for group in curves.values() for curve in group):
            assert curve.swapped == tuple(range(9))
            assert curve.kl[0] == pytest.approx(0, abs=1e-6)
            assert curve.top1[0] == 1
        scores = profile.of(precision)
        assert scores.lis[0] == pytest.approx(
            0.25 * scores.lts[scores.order[0]] + 0.25 * scores.lrs[scores.order[0]] + 0.5 * scores.chosen_mds[0]
        )
    assert min(profile.of("int3").lrs) < min(profile.of("int4").lrs)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it: profiles are computed twice")
def test_profile_command_is_reproducible(calib, tmp_path):
    args = (MODEL, "--calib", calib, "--held-out", Path(__file__), "--precisions", "int4", *SMALL)
    for name in ("a.json", "b.json"):
        assert run(*args, "--out", tmp_path / name).startswith("0: ")
    first, second = (SensitivityProfile.load(tmp_path / name) for name in ("a.json", "b.json"))
    assert first == second
    assert replace(first.held_out, name="") != replace(first.calibration, name="")


def test_profile_of_prepared_variants_equals_that_of_rounded_ones(calib, tmp_path):
    prepare = ["quantize", str(MODEL), "--precisions", "int4", "--method", "rtn", "--out", str(tmp_path / "variants")]
    of_text = ["--calib", str(calib), "--calib-samples", "2", "--calib-length", "64"]
    assert CliRunner().invoke(app, [*prepare, *of_text]).exit_code == 0
    args = (MODEL, "--calib", calib, "--precisions", "int4", *SMALL)
    assert run(*args, "--out", tmp_path / "loaded.json").startswith("0: ")
    assert run(*args, "--out", tmp_path / "stored.json", "--variants", tmp_path / "variants").startswith("0: ")
    loaded, stored = (SensitivityProfile.load(tmp_path / f"{name}.json") for name in ("loaded", "stored"))
    assert stored == loaded
    assert stored.methods == {"int4": "rtn"}


@pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it: profiles are computed twice")
def test_profile_command_uses_and_names_prepared_variants(calib, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("variants"))
    of_text = ["--method", "gptq", "--calib", str(calib), "--calib-samples", "2", "--calib-length", "64"]
    assert CliRunner().invoke(app, ["quantize", str(model), "--precisions", "int4", *of_text]).exit_code == 0
    args = (model, "--calib", calib, *SMALL)
    assert run(*args, "--precisions", "int4,int3", "--out", tmp_path / "beside.json").startswith("0: ")
    named = ("--precisions", "int4", "--variants", model / "variants")
    assert run(*args, *named, "--out", tmp_path / "named.json").startswith("0: ")
    beside, named = (SensitivityProfile.load(tmp_path / f"{name}.json") for name in ("beside", "named"))
    assert beside.methods == {"int4": "gptq", "int3": "rtn"}
    assert beside.of("int4") == named.of("int4")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--precisions", "int5"), "'int5' is not quantised: choose from int8, int4, int3"),
        (("--precisions", ","), "--precisions is empty: name at least one of int8, int4, int3"),
        (("--weights", "1,2"), "--weights is '1,2': give three numbers with commas"),
        (("--weights", "0,0,0"), "each must be at least 0, and one of them above 0"),
        (("--weights", "1,-1,1"), "each must be at least 0, and one of them above 0"),
        (("--held-out-tokens", "1000000"), "tokens, but"),
        (("--variants", "/nowhere"), "/nowhere: has no variants.json"),
        (("--out", "/proc/profile.json"), "cannot write into /proc: "),
    ],
)
def test_profile_command_refuses_invalid_options_before_computing(calib, args, message):
    printed = run(MODEL, "--calib", calib, *SMALL, *args)
    assert printed.startswith("1: ")
    assert message in printed


def test_profile_command_refuses_held_out_text_equal_to_the_calibration(calib):
    printed = run(MODEL, "--calib", calib, "--held-out", calib, *SMALL)
    assert printed.startswith("1: ")
    assert "is the calibration text" in printed


def test_profile_command_needs_no_text(tmp_path, monkeypatch):
    def sample(starts):
        rng = np.random.default_rng(0)
        return [rng.integers(3, 4000, start.params.max_tokens).tolist() for start in starts]

    monkeypatch.setattr("jaxserve.cli.own_text.sampler", lambda folder, begin: sample)
    monkeypatch.setattr("jaxserve.calibration.sensitivity.run.kept_folder", lambda folder, cache: tmp_path / "kept")
    args = (MODEL, "--precisions", "int4", "--calib-tokens", "128")
    for name in ("a.json", "b.json"):
        printed = run(*args, "--out", tmp_path / name)
        assert printed.startswith("0: "), printed
        monkeypatch.setattr("jaxserve.cli.own_text.sampler", lambda folder, begin: lambda starts: 1 / 0)
    first, second = (SensitivityProfile.load(tmp_path / name) for name in ("a.json", "b.json"))
    assert first == second, "the text is written once"
    assert (first.calibration.name, first.calibration.rows) == ("own-text.json", 1)
    assert "--calib FILE" in run(MODEL, "--compare-orders")
