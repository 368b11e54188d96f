"""One server with a fake engine for the tests that leave no trace in it; a model; a browser."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.server.routes import dashboard
from tests.server.fake import END, FakeClient, byte_tokenizer
from tests.server.pages import Pages, headless
from tests.server.serving import serving

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def fake():
    return FakeClient()


@pytest.fixture(scope="session")
def address(fake):
    with serving(fake) as address:
        yield address


@pytest.fixture(scope="session")
def http(address):
    with httpx.Client(base_url=address.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A folder with a configuration and a tokenizer, to be loaded with random weights."""
    return write_model(tmp_path_factory.mktemp("tiny"))


def write_model(folder: Path, **changes: Any) -> Path:
    """Writes such a folder, with changes to the configuration, and returns it."""
    byte_tokenizer().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture(scope="module")  # its event loop is in nobody else's way
def browser() -> Iterator[Any]:
    with headless() as browser:
        yield browser


@pytest.fixture
def open_page(browser, monkeypatch) -> Iterator[Pages]:
    """Opens a server's dashboard; at the end nothing must have failed in the page, nor gone to another server.

    Servers of this process send more than one event a second, for tests wait for them.
    """
    monkeypatch.setattr(dashboard, "EVENT_INTERVAL", 0.1)
    pages = Pages(browser)
    yield pages
    pages.close()
    assert pages.problems == []
