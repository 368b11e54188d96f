"""Tokenizers from tokenizer.model alone. The expected ids are those of the sentencepiece library for that file."""

from pathlib import Path

import pytest

from jaxserve.core.errors import CheckpointError
from jaxserve.engine.tokenizer import Tokenizer
from tests.engine.sentencepiece_model import UNIGRAM, write_model

WORDS = ["▁t", "he", "▁the", "in", "▁a", "ing", "▁", "t", "h", "e", "i", "n", "g", "a", "s", "b"]
PLAIN = {
    "the thing": [261, 259, 267, 264],
    "  two": [265, 265, 259, 122, 114],
    "é": [265, 198, 172],
    "": [],
    "\nthe": [265, 13, 266, 260],
    "a  b ": [263, 265, 265, 274, 265],
    "\u2581a": [265, 263],
    "a<turn>b": [263, 63, 266, 120, 117, 270, 65, 274],
}
USER_DEFINED = {"a<turn>b": [264, 3, 275], "<turn><turn>": [266, 3, 3], "the thing": [262, 260, 268, 265]}
NO_PREFIX = {"the thing": [266, 260, 259, 267, 264], "\u2581a": [263], "  two": [265, 259, 122, 114]}
NO_EXTRA_SPACE = {"  two": [259, 122, 114], "a  b ": [263, 265, 274], "\nthe": [265, 13, 266, 260]}


def load(folder: Path, **options) -> Tokenizer:
    write_model(folder / "tokenizer.model", WORDS, **options)
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PLAIN),
        ({"algorithm": UNIGRAM}, PLAIN),
        ({"user_defined": ["<turn>"]}, USER_DEFINED),
        ({"algorithm": UNIGRAM, "user_defined": ["<turn>"]}, USER_DEFINED),
        ({"dummy_prefix": False}, NO_PREFIX),
        ({"remove_extra_whitespaces": True}, NO_EXTRA_SPACE),
    ],
)
def test_sentencepiece_tokenizer_gives_the_librarys_ids_and_text(tmp_path: Path, options: dict, expected: dict):
    tokenizer = load(tmp_path, **options)
    assert {text: tokenizer.encode(text, add_special_tokens=False) for text in expected} == expected
    if "remove_extra_whitespaces" not in options:
        texts = [text for text in expected if "\u2581" not in text]
        assert [tokenizer.decode(expected[text]) for text in texts] == texts


def test_sentencepiece_special_tokens_come_from_the_model_file(tmp_path: Path):
    tokenizer = load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("the") == [1, 261], "as LlamaTokenizer, which adds a bos by default"
    assert tokenizer.encode("the</s>the", add_special_tokens=False) == [261, 2, 261]
    assert tokenizer.decode([1, 261, 2]) == "the"
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert Tokenizer.load(tmp_path).encode("the") == [261, 2]


def test_non_legacy_configuration_adds_the_leading_space_once(tmp_path: Path):
    write_model(tmp_path / "tokenizer.model", WORDS)
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the</s>the", add_special_tokens=False) == [261, 2, 266, 260]


def test_tokenizer_json_is_preferred_to_tokenizer_model(tmp_path: Path):
    source = load(tmp_path)
    source.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    assert Tokenizer.load(tmp_path).encode("the thing", add_special_tokens=False) == PLAIN["the thing"]


@pytest.mark.parametrize("data", [b"", b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff", b"\x08\x01", bytes(100)])
def test_tokenizer_model_in_another_format_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is not a SentencePiece model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tekken.json", "merges.txt"])
def test_error_for_an_unreadable_sentencepiece_file_names_it(tmp_path: Path, name: str):
    (tmp_path / name).write_text("")
    with pytest.raises(CheckpointError, match=rf" has no tokenizer\.json or tokenizer\.model.*{name}"):
        Tokenizer.load(tmp_path)
