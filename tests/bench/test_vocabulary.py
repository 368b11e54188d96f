"""Random prompts: no special tokens, exact lengths, and clear errors for missing tokenizers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer as HfTokenizer, decoders, models, pre_tokenizers

from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.engine.tokenizer import Tokenizer
from tests.support.hub import LoopbackHub, reachable


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_default_is_the_bundled_model_also_by_name_folder_and_file(vocabulary):
    folder = bundled_model_path()
    for source in (folder.name, folder, folder / "tokenizer.json"):
        assert Vocabulary.load(source).random_ids(rng(), 5) == vocabulary.random_ids(rng(), 5)


def test_random_ids_are_neither_special_nor_added(tmp_path):
    tokenizer = HfTokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 3, "[u]": 2}, unk_token="[u]"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["[u]", AddedToken("<tool>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.size == 2
    assert set(vocabulary.random_ids(rng(), 100)) == {1, 3}


def test_random_ids_are_plain_integers_and_repeat_with_the_seed(vocabulary):
    ids = vocabulary.random_ids(rng(), 20)
    assert json.loads(json.dumps(ids)) == list(ids)
    assert ids == vocabulary.random_ids(rng(), 20) != vocabulary.random_ids(rng(1), 20)
    assert vocabulary.random_ids(rng(), 0) == ()


@pytest.mark.parametrize("n", [2, 3, 17, 256, 1000])
def test_text_encodes_to_the_wanted_number_with_special_tokens(vocabulary, n):
    assert vocabulary.num_special == 1
    for seed in range(20):
        text, count = vocabulary.text_of_length(rng(seed), n)
        assert count == n == len(vocabulary.encode(text))
        assert len(vocabulary.encode(text, special=False)) == n - 1


def test_text_begins_with_its_head(vocabulary):
    text, count = vocabulary.text_of_length(rng(), 50, head="def add(a, b):")
    assert text.startswith("def add(a, b):")
    assert count == 50


@pytest.mark.parametrize("head_tokens", [None, 3, 12, 30])
def test_text_after_a_head_has_its_length_also_if_that_of_the_head_was_a_guess(vocabulary, head_tokens):
    text, count = vocabulary.text_of_length(rng(), 50, head="def add(a, b):", head_tokens=head_tokens)
    assert count == 50 == len(vocabulary.encode(text))


def test_continuations_add_the_tokens_they_say(vocabulary):
    text = "".join(vocabulary.continuation(rng(seed), 16) for seed in range(50))
    assert len(vocabulary.encode(text, special=False)) == pytest.approx(50 * 16, abs=8)


def test_text_shorter_than_its_head_is_the_head_with_its_own_count(vocabulary):
    head = "def add(a, b): return a + b"
    assert vocabulary.text_of_length(rng(), 3, head=head) == (head, len(vocabulary.encode(head)))


def test_count_is_the_real_one_where_the_wanted_one_cannot_be_had():
    """Without spaces between them words of known letters are one unknown word."""
    tokenizer = HfTokenizer(models.WordLevel({"ab": 0, "cd": 1, "[U]": 2}, unk_token="[U]"))
    tokenizer.add_special_tokens(["[U]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    vocabulary = Vocabulary(Tokenizer(tokenizer), "words")
    text, count = vocabulary.text_of_length(rng(), 8)
    assert count == len(vocabulary.encode(text)) == 1


def test_random_text_has_no_broken_characters_and_no_line_ends(vocabulary):
    text, _ = vocabulary.text_of_length(rng(), 2000)
    assert text.isprintable()
    assert "\ufffd" not in text


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "one/two/three", "not valid!"])
def test_unknown_tokenizer_is_a_config_error_that_names_it(name):
    with pytest.raises(ConfigError, match=r"unknown tokenizer") as caught:
        Vocabulary.load(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub that has the bundled tokenizer, under a name without an organisation."""
    hub = LoopbackHub()
    hub.add("model", {"tokenizer.json": (bundled_model_path() / "tokenizer.json").read_bytes()})
    with reachable(hub, tmp_path / "home"):
        yield hub


def test_tokenizer_from_the_hub_is_kept(hub, vocabulary):
    assert Vocabulary.load("model").size == vocabulary.size
    hub.seen.clear()
    assert Vocabulary.load("model").size == vocabulary.size
    assert not hub.seen


def test_unreachable_hub_is_asked_once(hub):
    hub.answers["/"] = 503
    with pytest.raises(ConfigError, match=r"unknown tokenizer 'some/model'.* answers 503"):
        Vocabulary.load("some/model")
    assert len(hub.requests("/api/models/some/model")) == 1


def test_cached_tokenizer_needs_no_other_file(hub, tmp_path, vocabulary):
    model = tmp_path / "home" / "hub" / "models--some--model"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    shutil.copy(bundled_model_path() / "tokenizer.json", model / "snapshots" / "abc")
    assert Vocabulary.load("some/model").size == vocabulary.size
    assert not hub.seen


def test_folder_without_tokenizer_names_the_missing_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Vocabulary.load(tmp_path)
