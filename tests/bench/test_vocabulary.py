"""Random prompts: no special tokens, exact lengths, and clear errors for missing tokenizers."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer as HfTokenizer, decoders, models, pre_tokenizers

from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.engine.tokenizer import Tokenizer


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
    with pytest.raises(ConfigError, match="unknown tokenizer") as caught:
        Vocabulary.load(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


class Hub:
    """A hub that answers 503 to everything, and the requests that it received."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.requests.append(self.path)
                self.send_error(503)

            do_GET = do_HEAD

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def load_from(hub: Hub, home: Path, **environment: str) -> str:
    """Return what an interpreter that knows only this hub prints for `Vocabulary.load("some/model")`."""
    code = (
        "from jaxserve.bench.vocabulary import Vocabulary; from jaxserve.core.errors import ConfigError\n"
        "try: print(Vocabulary.load('some/model').size)\n"
        "except ConfigError as error: print(error)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    told = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}", "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | told | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_unreachable_hub_is_asked_once(hub, tmp_path):
    assert "the hub did not provide it" in load_from(hub, tmp_path)
    assert hub.requests.count("/some/model/resolve/main/tokenizer.json") == 1


def test_hub_is_not_asked_offline(hub, tmp_path):
    assert "HF_HUB_OFFLINE" in load_from(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert not hub.requests


def test_cached_tokenizer_is_used_when_the_hub_is_unreachable(hub, tmp_path, vocabulary):
    model = tmp_path / "hub" / "models--some--model"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    shutil.copy(bundled_model_path() / "tokenizer.json", model / "snapshots" / "abc")
    assert load_from(hub, tmp_path) == f"{vocabulary.size}\n"


def test_folder_without_tokenizer_names_the_missing_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Vocabulary.load(tmp_path)
