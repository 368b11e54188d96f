"""Collect the Python standard library's source and documentation as training text."""

import ast
import hashlib
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "ensurepip",
        "encodings",  # encodings: tables of code points
        "lib2to3",
        "data",
        "tokenizedata",
        "encoded_modules",
        "cjkencodings",
        "decimaltestdata",
    }
)
MAX_BYTES = 400_000
MAX_LINE = 400  # characters; longer lines are data: base64 blobs, tables, marshalled bytes
MAX_DATA_SHARE = 0.18  # share of characters that are digits, backslashes or not ASCII


@dataclass(frozen=True)
class Document:
    """One text of the corpus: a module, or one topic of `pydoc`."""

    name: str  # path relative to its stdlib folder, with "#topic" for a pydoc topic
    text: str

    @property
    def is_test(self) -> bool:
        """Return whether the document belongs to CPython's own test suite."""
        return re.search(r"(^|/)(test|tests|idle_test)/", self.name) is not None


def default_stdlib() -> Path:
    """Return the standard library folder of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def collect(folders: Iterable[Path]) -> list[Document]:
    """Return every usable document below `folders`, sorted by name, without exact duplicates."""
    seen: set[str] = set()
    documents = []
    for folder in folders:
        for document in _documents(folder):
            digest = hashlib.sha256(document.text.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                documents.append(document)
    return sorted(documents, key=lambda document: document.name)


def split(documents: Iterable[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Split into (training, held out) by a hash of the name, so that a document never moves between runs.

    A module of the same name from two Python versions lands on the same side, which keeps near copies out of the
    held-out set. `held_out` is the share of documents in [0, 1).
    """
    train: list[Document] = []
    test: list[Document] = []
    for document in documents:
        bucket = int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:4]) / 2**32
        (test if bucket < held_out else train).append(document)
    return train, test


def _documents(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        text = _read(path)
        if text is None:
            continue
        if relative.as_posix() == "pydoc_data/topics.py":
            yield from _topics(relative.as_posix(), text)
        elif _is_prose_or_code(text):
            yield Document(relative.as_posix(), text)


def _read(path: Path) -> str | None:
    """Return the text of a module, or None if it cannot be parsed (broken on purpose, or in another encoding)."""
    if path.stat().st_size > MAX_BYTES and path.name != "topics.py":
        return None
    try:
        with tokenize.open(path) as file:
            text = file.read().expandtabs(8).strip() + "\n"
        ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return None
    return text


def _is_prose_or_code(text: str) -> bool:
    if len(text) < 64 or max(map(len, text.splitlines())) > MAX_LINE:
        return False
    data = sum(character.isdigit() or character == "\\" or not character.isascii() for character in text)
    return data / len(text) <= MAX_DATA_SHARE


def _topics(name: str, text: str) -> Iterator[Document]:
    """Yield the topics of the language reference that `help()` shows, from a dictionary literal."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            for topic, body in ast.literal_eval(node).items():
                yield Document(f"{name}#{topic}", body.strip() + "\n")
