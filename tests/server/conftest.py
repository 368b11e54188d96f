"""Fixtures: a shared server with a fake engine (for tests that do not change its state), a tiny model, a browser."""

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
    """Return the folder of a tiny model without weights, which is loaded with random ones."""
    return write_model(tmp_path_factory.mktemp("tiny"))


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a configuration, with `changes`, and a tokenizer to a folder, and return the folder."""
    byte_tokenizer().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


# Per module, since the event loop of Playwright would disturb other tests.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless() as browser:
        yield browser


@pytest.fixture
def open_page(browser, monkeypatch) -> Iterator[Pages]:
    """Open dashboards, and check at the end that no page had an error or called another server.

    Servers of this process send ten events a second instead of one, since tests wait for events.
    """
    monkeypatch.setattr(dashboard, "EVENT_INTERVAL", 0.1)
    pages = Pages(browser)
    yield pages
    pages.close()
    assert pages.problems == []
