"""The commands `jaxserve pull` and `jaxserve models`, and the names on a hub that other commands take."""

import json
import os
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from jaxserve.cli.main import app
from jaxserve.hub import HubName, fetch
from jaxserve.sim.shape import ModelShape
from tests.conftest import TINY

CONFIG = json.dumps(TINY).encode()
SINGLE = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"w" * 1_500_000}


def run(*arguments: str, status: int = 0, text: str | None = None) -> Result:
    done = CliRunner().invoke(app, list(arguments), input=text, env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == status, done.output
    return done


@pytest.fixture
def several(hub) -> dict[str, str]:
    """Commits in the cache: a model in two revisions, one that is not supported, and one that is not complete."""
    main = hub.add("org/single", SINGLE)
    fetch(HubName("org/single"))
    other = hub.add("org/single", SINGLE | {"config.json": CONFIG + b" "}, branch="v1")
    fetch(HubName("org/single", "v1"))
    bert = hub.add("org/bert", {"config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": b"b"})
    fetch(HubName("org/bert"))
    half = hub.add("org/half", SINGLE | {"model.safetensors": b"h" * 1000})
    (fetch(HubName("org/half")).folder / "model.safetensors").unlink()
    return {"main": main, "v1": other, "bert": bert, "half": half}


def test_pull_prints_folders_and_brings_models_up_to_date(hub):
    hub.add("org/single", SINGLE)
    done = run("pull", "org/single")
    assert Path(done.stdout.strip()) == fetch(HubName("org/single")).folder
    assert "org/single: 1.5 MB, licence apache-2.0, revision" in done.stderr
    newer = hub.add("org/single", SINGLE | {"config.json": CONFIG + b" "})
    assert newer in run("pull", "org/single").stdout
    assert len([seen for seen in hub.requests("/cdn/") if seen.method == "GET"]) == 1


def test_pull_of_several_models_with_a_revision_into_another_folder(hub, tmp_path):
    commit = hub.add("org/single", SINGLE, branch="v1")
    hub.add("org/other", SINGLE)
    done = run("pull", "org/single@v1", "org/other", "--download-dir", str(tmp_path / "models"))
    first, second = map(Path, done.stdout.split())
    assert first == tmp_path / "models/models--org--single/snapshots" / commit
    assert (second / "model.safetensors").is_file()


def test_pull_says_what_is_wrong(hub):
    assert "is no name on a hub" in run("pull", "./folder", status=1).output
    assert "no such model" in run("pull", "org/nothing", status=1).output
    hub.add("org/bert", {"config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": b"b"})
    assert "BertModel" in run("pull", "org/bert", status=1).output
    assert not hub.requests("model.safetensors")


def test_list_names_each_revision_and_why_it_cannot_be_served(several, hub):
    hub.seen.clear()
    done = run("models")
    shown = done.stdout + done.stderr
    assert not hub.seen
    rows = [line.split() for line in shown.splitlines() if line.startswith("org/single")]
    assert sorted(rows) == [["org/single", name, "1.5", "MB", "Llama", "float32", "today"] for name in ("main", "v1")]
    assert f"org/half@{several['half'][:8]}: not complete: model.safetensors is missing" in shown
    assert f"org/bert@{several['bert'][:8]}: " in shown


def test_list_as_json(several):
    listed = json.loads(run("models", "--json").stdout)
    assert [(entry["id"], entry["supported"]) for entry in listed] == [
        ("org/bert", False),
        ("org/half", False),
        ("org/single", True),
        ("org/single", True),
    ]
    entry = next(entry for entry in listed if entry["branches"] == ["v1"])
    assert entry["commit"] == several["v1"]
    assert entry["bytes"] == 1_500_000 + len(CONFIG) + 1 + 2
    assert (entry["architecture"], entry["precision"]) == ("LlamaForCausalLM", "float32")
    assert Path(entry["folder"], "config.json").is_file()


def test_last_use_is_when_a_file_was_read(several):
    folder = fetch(HubName("org/bert")).folder
    then = time.time() - 3 * 86_400
    for file in folder.iterdir():
        os.utime(file, (then, then))
    (row,) = [line for line in run("models").stdout.splitlines() if line.startswith("org/bert ")]
    assert row.rstrip().endswith("3 days ago")


def test_empty_list_says_how_to_get_a_model(hub):
    assert "`jaxserve pull ORG/NAME` downloads one" in run("models").stderr
    assert json.loads(run("models", "--json").stdout) == []


def test_removal_asks_and_frees_what_no_other_revision_needs(several, hub):
    assert "give --yes" in run("models", "remove", "org/single", status=1).output
    folder = fetch(HubName("org/single", "v1")).folder
    assert folder.is_dir()
    freed = run("models", "remove", "org/single@v1", "--yes").stderr
    assert f"{len(CONFIG) + 1} B freed in " in freed
    assert not folder.exists()
    hub.seen.clear()
    assert fetch(HubName("org/single")).commit == several["main"]
    assert not hub.seen
    assert "1.5 MB freed" in run("models", "remove", f"org/single@{several['main'][:8]}", "-y").stderr
    assert "org/single is not in the cache" in run("models", "remove", "org/single", "-y", status=1).output


def test_removal_takes_prepared_layers_and_unfinished_downloads_along(several):
    folder = Path(json.loads(run("models", "--json").stdout)[1]["folder"])
    (folder / "variants/background").mkdir(parents=True)
    (folder / "variants/background/layer").write_bytes(b"v" * 10_000)
    (folder.parents[1] / "blobs/0123.incomplete").write_bytes(b"p" * 20_000)
    freed = run("models", "remove", "org/half", "--yes").stderr
    assert "30." in freed
    assert not folder.parents[1].exists()


def test_removal_of_an_unknown_revision_names_the_known_ones(several):
    done = run("models", "remove", "org/single@v9", "--yes", status=1)
    assert "which has the revisions" in done.output
    assert "v1" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "text", "--model"],
        ["chat", "--model"],
        ["quantize"],
        ["profile"],
        ["run-batch", "-i", "batch.jsonl", "-o", "answers.jsonl"],
        ["bench", "latency", "--model"],
        ["bench", "throughput", "--model"],
        ["bench", "startup", "--model"],
        ["generate", "text", "--tokenizer"],
        ["sim", "--hardware", "h100", "--model"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_every_command_looks_a_name_up(hub, monkeypatch, tmp_path, arguments):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(request))
    shown = run(*arguments, "org/nothing", status=1).output
    assert "org/nothing: no such directory, and not in the cache" in shown
    assert "`jaxserve pull org/nothing`" in shown


def test_pull_without_a_network_names_the_model(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (
        run("pull", "org/name", status=1).output == "jaxserve: org/name cannot be downloaded: HF_HUB_OFFLINE is set\n"
    )


def test_path_is_never_looked_up(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for arguments in (["quantize"], ["bench", "latency", "--model"], ["generate", "text", "--model"]):
        assert "no such directory. A model is a folder" in run(*arguments, "./org/name", status=1).output
    assert not hub.seen


def test_simulator_needs_the_configuration_alone(hub):
    hub.add("org/single", SINGLE)
    shape = ModelShape.load("org/single")
    assert (shape.name, shape.num_layers) == ("org/single", TINY["num_hidden_layers"])
    assert [seen.path.rpartition("/")[2] for seen in hub.requests("/resolve/")] == ["config.json"] * 2
