"""A model's own calibration text: it is reproducible, kept, made again for another model, and never one long loop."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from jaxserve import LLM
from jaxserve.calibration.own_text import (
    MAX_REPEATED,
    MAX_ROUNDS,
    OwnText,
    Settings,
    message_start,
    own_text,
    repeated,
    starts,
    write,
)
from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer

FEW = Settings(pieces=6, length=24)


def drawn(starts, vocab_size=1000):
    """Sample tokens that depend on the seed alone."""
    made = (np.random.default_rng(start.params.seed) for start in starts)
    return [rng.integers(vocab_size, size=s.params.max_tokens).tolist() for rng, s in zip(made, starts, strict=True)]


def looping(starts):
    """Sample the same token again and again."""
    return [[7] * start.params.max_tokens for start in starts]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(bundled_model_path())


def test_an_engine_writes_the_same_text_for_the_same_seed(tokenizer):
    with LLM(warmup=False, max_num_seqs=8, max_model_len=64) as llm:

        def sample(starts):
            outputs = llm.generate([list(start.tokens) for start in starts], [s.params for s in starts], use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        vocab_size = tokenizer.vocab_size
        texts = [write(sample, vocab_size, tokenizer, Settings(6, 24, seed)) for seed in (0, 0, 1)]
    assert texts[0].shape == (6, 24)
    assert texts[0].dtype == np.int32
    np.testing.assert_array_equal(texts[0], texts[1])
    assert (texts[0] != texts[2]).any()
    assert texts[0].max() < vocab_size


def test_text_is_kept_and_written_again_only_for_another_model_or_seed(tmp_path):
    path, calls = tmp_path / "own-text.json", []

    def sample(starts):
        calls.append(len(starts))
        return drawn(starts)

    make = partial(own_text, vocab_size=1000, tokenizer=None, sample=sample, path=path)
    first = make(model="a", settings=FEW)
    np.testing.assert_array_equal(make(model="a", settings=FEW).pieces, first.pieces)
    assert calls == [6]
    make(model="b", settings=FEW)
    make(model="b", settings=Settings(6, 24, seed=1))
    assert calls == [6, 6, 6]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "tokens": 3}', "\xff"])
def test_a_file_that_is_no_text_of_this_model_is_replaced(tmp_path, content):
    path = tmp_path / "own-text.json"
    path.write_text(content, encoding="latin-1")
    made = own_text("a", 1000, None, drawn, FEW, path)
    np.testing.assert_array_equal(OwnText.load(path, "a", FEW).pieces, made.pieces)


@pytest.mark.parametrize("tokens", [[[1, 2], [3]], [["a"]], [[2**40]], [[1] * 24] * 5])
def test_damaged_tokens_are_written_again(tmp_path, tokens):
    made = own_text("a", 1000, None, drawn, FEW, tmp_path / "own-text.json")
    OwnText("a", FEW, np.array(tokens, object)).save(tmp_path / "own-text.json")
    assert OwnText.load(tmp_path / "own-text.json", "a", FEW) is None
    assert own_text("a", 1000, None, drawn, FEW, tmp_path / "own-text.json").pieces.shape == made.pieces.shape


def test_half_of_a_chat_models_pieces_begin_with_a_users_message(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}")
    chat = Tokenizer.load(bundled_model_path(), file)
    message = message_start(chat)
    assert chat.decode(message) == "<u>"
    begun = [start.tokens for start in starts(chat.vocab_size, chat, Settings(8, 64))]
    assert begun.count(message) == 4
    file.write_text("{{ raise_exception('no') }}")
    plain = Tokenizer.load(bundled_model_path(), file)
    assert message_start(plain) == ()
    assert len(starts(plain.vocab_size, plain, FEW)) == 6


def test_pieces_that_repeat_themselves_are_written_again():
    calls = []

    def sample(starts):
        calls.append(len(starts))
        return drawn(starts) if len(calls) == 2 else looping(starts[:3]) + drawn(starts[3:])

    pieces = write(sample, 1000, None, FEW)
    assert calls == [6, 3]
    assert max(map(repeated, pieces)) <= MAX_REPEATED


def test_a_model_that_only_repeats_itself_ends_with_what_there_is():
    calls = []

    def sample(starts):
        calls.append(len(starts))
        return looping(starts)

    assert write(sample, 1000, None, FEW).shape == (6, 24)
    assert calls == [6] * MAX_ROUNDS


@hypothesis_settings(max_examples=40, deadline=None)
@given(vocab_size=st.integers(1, 300), count=st.integers(1, 9), length=st.integers(2, 40), seed=st.integers(0, 2**32))
def test_any_vocabulary_and_size_give_whole_pieces(vocab_size, count, length, seed):
    pieces = write(partial(drawn, vocab_size=vocab_size), vocab_size, None, Settings(count, length, seed))
    assert pieces.shape == (count, length)
    assert 0 <= pieces.min() <= pieces.max() < vocab_size


@given(period=st.integers(1, 8), length=st.integers(32, 128))
def test_loops_are_recognised(period, length):
    piece = np.resize(np.arange(period), length)
    assert repeated(piece) > MAX_REPEATED
    assert repeated(np.arange(length)) == 0


def test_held_out_pieces_are_not_calibrated_on(tmp_path: Path):
    text = own_text("a", 1000, None, drawn, FEW, tmp_path / "own-text.json")
    calibration, held_out = text.parts(2)
    np.testing.assert_array_equal(np.concatenate([calibration, held_out]), text.pieces)
    assert len(held_out) == 2
