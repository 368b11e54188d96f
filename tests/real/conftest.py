"""Tests of real weights, which `make test-real` installs: the folder is given as REAL_WEIGHTS. Others skip them."""

import os
from pathlib import Path

import pytest

WEIGHTS = os.environ.get("REAL_WEIGHTS")

if WEIGHTS is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face layout."""
    return Path(WEIGHTS or "", "smollm2").resolve()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M as a GGUF file."""
    return Path(WEIGHTS or "", "gemma3-270m.gguf").resolve()
