"""One server with a fake engine for the tests that leave no trace in it."""

import json

import httpx
import pytest

from tests.server.fake import END, FakeClient, byte_tokenizer
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
    folder = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
