"""What cannot be tried yet, each with its reason."""

from pathlib import Path

import pytest


@pytest.mark.skip(reason="GGUF files are not read yet: SmolLM2 is converted by tests/real/convert.py")
def test_gguf_file_is_served(gemma3: Path) -> None: ...


@pytest.mark.skip(reason="the architecture of Gemma 3 is not supported yet")
def test_gemma_answers(gemma3: Path) -> None: ...
