"""Reading files of text, on which weights are calibrated and layers are ranked."""

from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json, read_text


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


def _text_of(where: str, line: str) -> str:
    try:
        text = parse_json(line, where)["text"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f'{where} is not a JSON object with a "text" ({error!r})') from error
    if not isinstance(text, str):
        raise ConfigError(f'{where}: its "text" is not a string')
    return text
