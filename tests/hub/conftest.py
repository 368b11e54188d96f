import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import LoopbackHub, reachable

INDEX = {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": bytes(range(250)) * 2000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"another form",
    "consolidated.safetensors": b"another form",
    "README.md": b"# a model",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub with the model org/name, and a fresh cache."""
    hub = LoopbackHub()
    hub.add("org/name", FILES)
    with reachable(hub, tmp_path / "home") as url:
        hub.url = url
        yield hub
