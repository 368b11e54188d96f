"""The tokenizer and the chat template that an engine gets, and the messages for models without one."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer, models

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CheckpointError, NoTokenizer
from jaxserve.engine.model_tokenizer import check_serves_text, load_tokenizer
from jaxserve.engine.tokenizer import Tokenizer
from tests.conftest import TINY
from tests.support.internals import example_prompt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def add_tokenizer(folder: Path, size: int = 10, **config: object) -> None:
    HfTokenizer(models.BPE({f"t{i}": i for i in range(size)}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def loaded(folder: Path, **options: object) -> Tokenizer | None:
    return load_tokenizer(EngineConfig(model=folder, **options), folder, TINY["vocab_size"])


def test_model_without_a_tokenizer_is_served_only_on_request(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json or tokenizer\.model.*tekken\.json.*--tokenizer"):
        check_serves_text(EngineConfig(model=folder))
    check_serves_text(EngineConfig(model=folder, skip_tokenizer_init=True))
    check_serves_text(EngineConfig(model=folder, tokenizer="elsewhere"))
    check_serves_text(EngineConfig(model=folder, load_format="dummy"))
    assert loaded(folder) is None
    assert "prompts must be token ids" in caplog.text


def test_skip_tokenizer_init_reads_no_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "tokenizer.json").write_text("broken")
    assert loaded(folder, skip_tokenizer_init=True) is None
    assert not caplog.records


def test_model_without_a_chat_template_gives_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_tokenizer(folder)
    loaded(folder, chat_template="chatml")
    assert not caplog.records, "it was chosen"
    loaded(folder)
    assert "has no chat template: conversations are written in the built-in format 'plain'" in caplog.text


def test_tokenizer_larger_than_the_models_vocabulary_gives_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_tokenizer(folder, TINY["vocab_size"], chat_template="{{ messages }}")
    loaded(folder)
    assert not caplog.records
    add_tokenizer(folder, TINY["vocab_size"] + 1, chat_template="{{ messages }}")
    loaded(folder)
    assert "has 501 tokens and the model 500" in caplog.text


def test_example_prompt_is_text_or_token_ids_as_the_model_needs() -> None:
    class Client:
        def __init__(self, tokenizer: object):
            self._tokenizer = tokenizer

        @property
        def tokenizer(self) -> object:
            if self._tokenizer is None:
                raise NoTokenizer
            return self._tokenizer

    assert isinstance(example_prompt(Client("any")), str)
    token_ids = example_prompt(Client(None))
    assert token_ids
    assert all(isinstance(token, int) for token in token_ids)
