"""Calibration text that a model writes itself, for a model that comes without any.

Pieces are sampled at temperature 1, so that they are text as the model itself expects it. Half of a chat model's pieces
continue the beginning of a user's message in its chat template, so that the model writes both the questions and the
answers. All others begin as any text does, with the tokenizer's bos token or a random token.

The module runs no model. The caller samples: `Sampler` may be an engine of its own, or a running one at low priority.

Axes: N pieces of L tokens.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxserve.checkpoint.variants import fingerprint
from jaxserve.core.errors import CheckpointError, RequestError
from jaxserve.core.files import read_json_object, write_file
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.checkpoint.loader import Checkpoint

FILE_NAME = "own-text.json"
FORMAT = 1
MARK = "JAXSERVE"  # stands for a user's message when a chat template is rendered
MAX_ROUNDS = 3
GRAM = 4  # tokens
MAX_REPEATED = 0.5  # share of a piece's groups of `GRAM` tokens that occurred before in the same piece


class Start(NamedTuple):
    """The beginning of a piece, and how to sample the rest of it."""

    tokens: tuple[int, ...]
    params: SamplingParams


Sampler = Callable[[Sequence[Start]], Sequence[Sequence[int]]]
"""A function that returns the `params.max_tokens` sampled tokens that follow each start, in order."""


@dataclass(frozen=True)
class Settings:
    """The amount of text, and the seed of all sampling. Text is written again when one of them changes."""

    pieces: int = 40
    length: int = 128  # tokens of a piece, at most as many as the model can read
    seed: int = 0


@dataclass(frozen=True)
class OwnText:
    """Text that a model has written. Pieces of all kinds alternate, so that any part of them resembles the whole."""

    model: str  # `checkpoint.variants.fingerprint` of its weights
    settings: Settings
    pieces: Int[np.ndarray, "N L"]  # int32

    def parts(self, held_out: int) -> tuple[Int[np.ndarray, "N L"], Int[np.ndarray, "H L"]]:
        """Return the pieces to calibrate on, and the last `held_out` pieces, on which to measure."""
        return self.pieces[:-held_out], self.pieces[-held_out:]

    def save(self, path: Path) -> None:
        """Write a JSON file. Raise `ConfigError` if that fails."""
        content = {"format": FORMAT, "model": self.model, **asdict(self.settings), "tokens": self.pieces.tolist()}
        write_file(path, json.dumps(content))

    @classmethod
    def load(cls, path: Path, model: str, settings: Settings) -> "OwnText | None":
        """Read a file, and return None if it has no text of this model and these settings."""
        try:
            content = read_json_object(path, missing_ok=True)
        except CheckpointError:
            return None
        wanted = {"format": FORMAT, "model": model, **asdict(settings)}
        if {name: content.get(name) for name in wanted} != wanted:
            return None
        try:
            pieces = np.array(content["tokens"], np.int32)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return cls(model, settings, pieces) if pieces.shape == (settings.pieces, settings.length) else None


def own_text(
    model: str, vocab_size: int, tokenizer: Tokenizer | None, sample: Sampler, settings: Settings, path: Path
) -> OwnText:
    """Return the text of a model that is kept in a file, or let the model write it and keep it there.

    `model` is the fingerprint of its weights. `sample` is only called if there is no such text. Raise `ConfigError` if
    the file cannot be written.
    """
    if (kept := OwnText.load(path, model, settings)) is not None:
        return kept
    written = OwnText(model, settings, write(sample, vocab_size, tokenizer, settings))
    written.save(path)
    return written


def text_of(
    checkpoint: "Checkpoint", tokenizer: Tokenizer | None, sample: Sampler, folder: Path, pieces: int = Settings.pieces
) -> OwnText:
    """Return the text of a model, which is kept in a folder, in pieces that are no longer than the model can read."""
    config = checkpoint.config
    settings = Settings(pieces, min(Settings.length, config.max_position))
    return own_text(fingerprint(checkpoint), config.vocab_size, tokenizer, sample, settings, folder / FILE_NAME)


def write(sample: Sampler, vocab_size: int, tokenizer: Tokenizer | None, settings: Settings) -> Int[np.ndarray, "N L"]:
    """Let a model write text, and return its pieces.

    A piece that mostly repeats itself says little about other text. Such pieces are written again with other seeds, at
    most `MAX_ROUNDS` times. If the model can do no better, the least repetitive ones are used.
    """
    good: list[np.ndarray] = []
    others: list[np.ndarray] = []
    for attempt in range(MAX_ROUNDS):
        seeded = replace(settings, pieces=settings.pieces - len(good), seed=settings.seed + attempt)
        begun = starts(vocab_size, tokenizer, seeded)
        for start, tokens in zip(begun, sample(begun), strict=True):
            piece = np.array([*start.tokens, *tokens], np.int32)
            (good if repeated(piece) <= MAX_REPEATED else others).append(piece)
        if len(good) == settings.pieces:
            break
    others.sort(key=repeated)
    return np.stack([*good, *others][: settings.pieces])


def starts(vocab_size: int, tokenizer: Tokenizer | None, settings: Settings) -> list[Start]:
    """Return the beginnings of all pieces. Without a tokenizer, each is a random token of the vocabulary.

    A token that ends an answer does not end a piece: models have learned from texts that follow one another.
    """
    rng = np.random.default_rng(settings.seed)
    ordinary = [token for token in tokenizer.ordinary_ids() if token < vocab_size] if tokenizer else []
    random = rng.choice(ordinary or vocab_size, settings.pieces).tolist()
    bos = tokenizer.bos_ids if tokenizer else ()
    message = message_start(tokenizer) if tokenizer else ()
    if not 0 < len(message) <= settings.length // 2:
        message = ()
    made = []
    for index, token in enumerate(random):
        tokens = message if message and index % 2 else bos or (token,)
        made.append(Start(tokens, _params(settings.length - len(tokens), int(rng.integers(1 << 62)))))
    return made


def message_start(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens up to the beginning of a user's first message, none if the model has no chat template."""
    if not tokenizer.has_chat_template:
        return ()
    try:
        text = tokenizer.conversation_text([{"role": "user", "content": MARK}], add_generation_prompt=False)
    except RequestError:
        return ()
    front, found, _ = text.partition(MARK)
    return tuple(tokenizer.encode(front, add_special_tokens=False)) if found else ()


def repeated(piece: Int[np.ndarray, "L"]) -> float:
    """Return the share of a piece's groups of `GRAM` neighbouring tokens that occurred before in it."""
    if len(piece) < GRAM:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(piece, GRAM)
    return 1 - len(np.unique(grams, axis=0)) / len(grams)


def _params(count: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, seed=seed, detokenize=False)
