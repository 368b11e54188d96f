"""Files of text: what weights are calibrated and layers are ranked on."""

from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json, read_text


def read_texts(path: Path) -> list[str]:
    """The texts of a file: its whole, or of .jsonl the "text" of every line that is not blank. Raises `ConfigError`."""
    text = read_text(path)
    if path.suffix != ".jsonl":
        return [text]
    lines = text.split("\n")  # and not splitlines: JSON may hold what Unicode calls the end of a line
    return [_text_of(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _text_of(where: str, line: str) -> str:
    try:
        text = parse_json(line, where)["text"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f'{where} is no JSON object with a "text" ({error!r})') from error
    if not isinstance(text, str):
        raise ConfigError(f'{where}: its "text" is no string')
    return text
