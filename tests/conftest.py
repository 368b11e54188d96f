"""Fixtures of all tests, eight virtual CPU devices, and settings with which programs compile quickly."""

import gc
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported anywhere

import hypothesis
import pytest

from jaxserve.planning.resolve import QUICK_COMPILATION

# Before JAX has a device, here and in processes that tests start.
flags = (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",  # which compiles in a quarter less time; native kernels do the large products
    *QUICK_COMPILATION,
)
os.environ["XLA_FLAGS"] = " ".join(flags).strip()
os.environ.setdefault("PJRT_NPROC", "32")  # as `resolve` asks for; the devices' programs would block each other

# A shell's background jobs ignore Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("jaxserve", deadline=None)
hypothesis.settings.load_profile("jaxserve")

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 500,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> Iterator[None]:
    """Leave what earlier modules made out of garbage collections: JAX keeps all it has traced, millions of objects."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Log as before after a test that has run a command, which sets the levels of its process."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("jaxserve", "jaxserve.hub"))}
    yield
    for logger, level in levels.items():
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config.json of a three-layer float32 Llama, for load_format="dummy"."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="session")
def reference(tiny_model: Path):
    """The tiny model run without an engine."""
    from tests.support.reference import Reference

    return Reference(tiny_model)
