"""Reading files of text, on which weights are calibrated and layers are ranked, as texts or as rows of tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxserve.calibration.sensitivity.profile import Text
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json, read_text
from jaxserve.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, and the text that they are from. Each row is a sequence of S tokens and their targets."""

    tokens: Int[np.ndarray, "N S+1"]  # int32
    source: Text


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file: the "text" of each non-blank line of a .jsonl file, or the whole of any other file.

    Raise `ConfigError` if the file cannot be read, or a line is invalid.
    """
    text = read_text(path)
    if path.suffix != ".jsonl":
        return [text]
    # Not splitlines: JSON strings may contain Unicode's other line separators.
    lines = text.split("\n")
    return [_text_of(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def read_rows(
    path: Path, tokenizer: Tokenizer, length: int, count: int, part: tuple[float, float] = (0.0, 1.0)
) -> Rows:
    """Read `count` rows of `length` tokens and their targets, spread evenly over a part of a file.

    `part` is (begin, end) as shares of the file, which is plain text, or .jsonl with a "text" in each line. Each row
    begins with the special tokens that the tokenizer puts before a text. Raise `ConfigError` if the file cannot be read
    or is too short.
    """
    front = tokenizer.encode("")
    body = length + 1 - len(front)
    texts = (tokenizer.encode(text, add_special_tokens=False) for text in read_texts(path))
    tokens = np.array([token for text in texts for token in text], np.int32)
    stream = tokens[slice(*(round(share * len(tokens)) for share in part))]
    if len(stream) < body * count:
        raise ConfigError(
            f"{path}: has {len(stream)} tokens, but {count} rows of {length} need {body * count}: "
            "give a longer file, or ask for fewer tokens"
        )
    starts = np.linspace(0, len(stream) - body, count).astype(int)
    rows = stream[starts[:, None] + np.arange(body)]
    rows = np.concatenate([np.tile(np.array(front, np.int32), (count, 1)), rows], axis=1)
    return Rows(rows, Text(path.name, _sha256(path), part, count, length))


def _text_of(where: str, line: str) -> str:
    try:
        text = parse_json(line, where)["text"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f'{where} is not a JSON object with a "text" ({error!r})') from error
    if not isinstance(text, str):
        raise ConfigError(f'{where}: its "text" is not a string')
    return text


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
