"""Models by their names on a hub, in the library and in a server with a real engine."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save

from jaxserve import LLM, SamplingParams
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.local import with_local_files
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CheckpointError, ConfigError
from tests.server.process import server_process
from tests.support.hub import LoopbackHub, environment, reachable

NAME = "org/tiny"
OPTIONS = {"max_num_seqs": 2, "kv_pages": 16, "memory_gb": 2, "max_model_len": 64}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> dict[str, bytes]:
    dummy = open_checkpoint(tiny_model, "dummy")
    shapes = {n: shape for block in dummy.config.block_ids for n, shape in tensor_shapes(dummy.config, block).items()}
    weights = {name: dummy.store.get(name, shape) for name, shape in shapes.items()}
    return {"config.json": (tiny_model / "config.json").read_bytes(), "model.safetensors": save(weights)}


def test_library_and_server_run_a_model_by_its_name(files: dict[str, bytes], tmp_path: Path) -> None:
    hub = LoopbackHub()
    hub.add(NAME, files)
    reports = []
    with reachable(hub, tmp_path) as url:
        with LLM(NAME, warmup=False, progress=lambda *report: reports.append(report), **OPTIONS) as llm:
            (expected,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        size = len(files["model.safetensors"])
        assert ("downloading org/tiny (licence apache-2.0)", size, size) in reports
        hub.seen.clear()
        options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        arguments = ["serve", NAME, "--port=0", "--skip-tokenizer-init", "--no-warmup", "--no-prepare", *options]
        with server_process("-m", "jaxserve", *arguments, env=environment(url, tmp_path)) as server:
            models = httpx.get(f"{server.url}/v1/models").text
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
    assert json.loads(models)["data"][0]["id"] == answer["model"] == NAME
    assert str(tmp_path) not in models
    assert answer["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids)
    assert not hub.seen, "the server has found everything in the cache"


def test_dummy_weights_need_no_download_of_weights(files: dict[str, bytes], tmp_path: Path) -> None:
    hub = LoopbackHub()
    hub.add(NAME, {"config.json": files["config.json"]})
    with reachable(hub, tmp_path):
        config = with_local_files(EngineConfig(model=NAME, load_format="dummy"))
        assert os.listdir(config.model) == ["config.json"]
        with pytest.raises(CheckpointError, match="has no safetensors"):
            with_local_files(EngineConfig(model=NAME))


def test_unsupported_architecture_is_refused_before_the_weights_come(tmp_path: Path) -> None:
    hub = LoopbackHub()
    hub.add(NAME, {"config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": b"w"})
    with reachable(hub, tmp_path), pytest.raises(CheckpointError, match="BertModel"):
        with_local_files(EngineConfig(model=NAME))
    assert not hub.requests("model.safetensors")


def test_options_of_the_hub(files: dict[str, bytes], tmp_path: Path) -> None:
    hub = LoopbackHub()
    commit = hub.add(NAME, files, branch="v1", gated=True)
    hub.add("org/words", {"tokenizer.json": b"{}"})
    with reachable(hub, tmp_path):
        config = EngineConfig(
            model=NAME, revision="v1", download_dir=tmp_path / "models", hf_token="hf_valid", tokenizer="org/words@main"
        )
        assert "hf_valid" not in repr(config)
        local = with_local_files(config)
        assert local.model == tmp_path / f"models/models--org--tiny/snapshots/{commit}"
        assert Path(local.tokenizer).parent == tmp_path / "models/models--org--words/snapshots"
        assert (local.revision, local.hf_token) == (None, None)
        assert with_local_files(local) == local


def test_revision_of_a_model_that_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision is 'v1', but no model is given"):
        with_local_files(EngineConfig(revision="v1"))
    with pytest.raises(ConfigError, match="is a path"):
        with_local_files(EngineConfig(model=str(tmp_path), revision="v1"))
