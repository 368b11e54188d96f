"""Reading and writing of files that users name. Every fault raises a `ConfigError` of one line that names the file."""

import contextlib
import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxserve.core.errors import CheckpointError, ConfigError


def read_text(path: str | Path, *, encoding: str = "utf-8") -> str:
    """Return a file's text. Raise `ConfigError` if it cannot be read or has another encoding."""
    try:
        return Path(path).read_text(encoding=encoding)
    except (OSError, ValueError) as error:  # UnicodeError is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot read {path}: {reason}") from error


def is_lfs_pointer(head: bytes) -> bool:
    """Return whether a file with these first bytes is Git LFS's pointer to a file that was not fetched."""
    return head.startswith(b"version https://git-lfs")


def lfs_error(path: str | Path) -> CheckpointError:
    """Return the error for a file of a model's folder that is Git LFS's pointer to it."""
    return CheckpointError(f"{path}: is only Git LFS's pointer to the file: fetch the file itself with 'git lfs pull'")


def parse_json(text: str, name: str | Path) -> Any:
    """Return the value of a JSON text. Raise `ConfigError` with `name` if the text is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from error


def read_json_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of a model's folder, {} for a missing file if `missing_ok`.

    Raise `CheckpointError` naming the file if it cannot be read or holds anything but a JSON object.
    """
    if missing_ok and not path.is_file():
        return {}
    try:
        text = read_text(path)
        if is_lfs_pointer(text.encode()):
            raise lfs_error(path)
        value = parse_json(text, path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return `eos_token_id` as a tuple: config files hold an id, a list of ids, or null.

    Raise `CheckpointError` for any other value.
    """
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in ids):
        raise CheckpointError(f"eos_token_id is {value!r}: it must be a token id or a list of token ids")
    return ids


def parse_yaml(text: str, name: str | Path) -> Any:
    """Return the value of a YAML text.

    Raise `ConfigError` with `name` if the text is not valid YAML, or has a key twice in one mapping.
    """
    # Imported late: it is slow, and every command imports this module, even for --help.
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # in C where PyYAML has it, which is much faster
        node = loader.get_single_node()
        if (twice := _key_given_twice(node)) is not None:
            raise ConfigError(f"{name} has {twice.value!r} twice, the second time in line {twice.start_mark.line + 1}")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date or number
        reason = " ".join(str(error).split()).replace(' in "<unicode string>",', " in")
        raise ConfigError(f"{name} is not valid YAML: {reason}") from error


def _key_given_twice(node: Any) -> Any:
    """Return the node of a key that a mapping has twice, of which the last value would count; None if there is none."""
    seen, rest = set[int](), [node]
    while rest:
        node = rest.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))  # aliases make the same node a part of several others
        keys = set[tuple[str, str]]()
        for entry in node.value:
            if not isinstance(entry, tuple):
                rest.append(entry)
                continue
            key, value = entry
            if isinstance(key.value, str):
                if (key.tag, key.value) in keys:
                    return key
                keys.add((key.tag, key.value))
            rest.append(value)
    return None


def reading(name: str | Path) -> AbstractContextManager[None]:
    """Raise `ConfigError`, which names a file, for an error of reading it inside the block."""
    return _naming("read", name)


def writing(name: str | Path) -> AbstractContextManager[None]:
    """Raise `ConfigError`, which names a file, for an error of writing it inside the block."""
    return _naming("write", name)


@contextlib.contextmanager
def _naming(action: str, name: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot {action} {name}: {error.strerror or error}") from error


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, which appears whole or not at all unless it is a device or a pipe.

    Raise `ConfigError`, which names the file, if it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            replace_file(path.resolve(), data)  # what a link points to is replaced, not the link


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, which appears whole or not at all. Raise OSError if it cannot be written."""
    # A new name: threads, and processes of one id in several containers, may write the same file at once.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def ensure_folder(folder: Path, option: str) -> None:
    """Make a folder for results before they are computed. Raise `ConfigError` if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error} ({option})") from error


def ensure_file(file: Path, option: str) -> None:
    """Make the folder of a file that will be written. Raise `ConfigError` if the file cannot be written."""
    if file.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder ({option})")
    ensure_folder(file.parent, option)
