"""The files of a batch, in OpenAI's format: requests as lines of JSON, and a file to which their answers are appended.

The id of an answer is a checksum of its request's line. A run that is started again therefore knows which requests of
the very same content are answered, whatever became of the run before.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, NamedTuple

from pydantic_core import from_json, to_json

from jaxserve.core.errors import ConfigError
from jaxserve.core.files import reading, writing

ID = "batch_req_"
START = b'{"id":"batch_req_'  # with which each answer's line begins
DIGEST_BYTES = 16
STREAM = "-"  # as a path: standard input or output
STANDARD_INPUT, STANDARD_OUTPUT = 0, 1
COPY_BYTES = 1024 * 1024  # of an input that are read at once


def digest(text: bytes) -> bytes:
    """Return a checksum by which texts are told apart."""
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Line:
    """A line of the input that is not blank. `text` is None if it is longer than the limit."""

    number: int  # from 1
    text: bytes | None

    @property
    def key(self) -> bytes:
        """A checksum of the line."""
        return digest(b"line %d" % self.number if self.text is None else self.text)

    @property
    def id(self) -> str:
        """The id of the line's answer."""
        return ID + self.key.hex()


def read_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """Yield the lines of an input, holding no more than `max_bytes` and a line's end of it in memory."""
    with path.open("rb") as file:
        number = 0
        while piece := file.readline(max_bytes + 1):
            number += 1
            too_long = len(piece.removesuffix(b"\n")) > max_bytes
            while too_long and piece and not piece.endswith(b"\n"):
                piece = file.readline(max_bytes + 1)
            if too_long or piece.strip():
                yield Line(number, None if too_long else piece.strip())


@dataclass(frozen=True)
class Batch:
    """The input and the output of a batch. `answered` has the keys of the lines that the output answers."""

    source: Path
    output: Path
    max_line_bytes: int
    total: int  # lines of the input
    remaining: int  # of these, lines without an answer
    answered: frozenset[bytes]

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the input."""
        return read_lines(self.source, self.max_line_bytes)


def is_stream(path: Path) -> bool:
    """Return whether a path is "-", a pipe or a device, which cannot be read twice or continued."""
    return str(path) == STREAM or (path.exists() and not path.is_file() and not path.is_dir())


@contextlib.contextmanager
def readable_twice(source: Path) -> Iterator[Path]:
    """Yield the path of an input, or of a copy of it while it is needed if the input is a stream ("-": stdin)."""
    if not is_stream(source):
        yield source
        return
    with tempfile.NamedTemporaryFile(prefix="jaxserve-batch-") as copy:
        with open(STANDARD_INPUT, "rb", closefd=False) if str(source) == STREAM else source.open("rb") as stream:
            _copy(stream, copy, "standard input" if str(source) == STREAM else source)
        yield Path(copy.name)


def _copy(stream: BinaryIO, copy: IO[bytes], name: str | Path) -> None:
    """Copy an input, which `name` names in errors."""
    with writing(f"a copy of {name}"):
        while True:
            with reading(name):
                part = stream.read(COPY_BYTES)
            if not part:
                break
            copy.write(part)
        copy.flush()


def open_batch(source: Path, output: Path, max_line_bytes: int, *, overwrite: bool = False) -> Batch:
    """Return a batch that continues what an earlier run has written to `output`, or replaces it with `overwrite`.

    Whatever is not a response with status 200 is removed from the output, to be done again: errors, and a line that
    was cut off. Raise ConfigError if a file is missing or the output belongs to another input.
    """
    if not source.is_file():
        raise ConfigError(f"no file {source} (--input-file)")
    if is_stream(output):  # which an earlier run may have written to, but nobody can read
        total = sum(1 for _ in read_lines(source, max_line_bytes))
        return Batch(source, output, max_line_bytes, total, total, frozenset())
    output = output.resolve()
    if source.resolve() == output:
        raise ConfigError(f"{source} is the input: give the answers a file of their own (--output-file)")
    if overwrite and output.is_file():
        output.unlink()
    answered, failed = set[bytes](), set[bytes]()
    for answer in _read_answers(output) if output.is_file() else ():
        (answered if answer.succeeded else failed).add(answer.key)
    total, remaining, known = 0, 0, False
    unseen = answered.copy()
    for line in read_lines(source, max_line_bytes):
        key = line.key
        total += 1
        remaining += key not in unseen  # the second of two equal lines is an error, which is written again
        known = known or key in answered or key in failed
        unseen.discard(key)
    if unseen or not (known or failed <= {b""}):
        raise ConfigError(
            f"{output} has answers to requests that are not in {source}: give another file (--output-file), or "
            "--overwrite to replace it"
        )
    if failed:
        _keep_successes(output)
    return Batch(source, output, max_line_bytes, total, remaining, frozenset(answered))


class AnswersFile:
    """The output of a batch, open for appending."""

    def __init__(self, path: Path):
        self._path = path
        # Unbuffered: each answer is one write, so that an interrupted run leaves whole lines.
        stdout = str(path) == STREAM
        self._file = os.fdopen(os.dup(STANDARD_OUTPUT), "wb", 0) if stdout else path.open("ab", buffering=0)

    def add(self, id: str, custom_id: str, status: int, request_id: str, body: bytes) -> None:
        """Append the response to a request. `id` is its line's, and `body` is JSON without line ends."""
        start = to_json({"id": id, "custom_id": custom_id})[:-1]
        response = to_json({"status_code": status, "request_id": request_id})[:-1]
        self._append(b'%b,"response":%b,"body":%b},"error":null}' % (start, response, body))

    def add_error(self, id: str, custom_id: str | None, code: str, message: str) -> None:
        """Append the error of a line that is no request."""
        error = {"code": code, "message": message}
        self._append(to_json({"id": id, "custom_id": custom_id, "response": None, "error": error}))

    def _append(self, answer: bytes) -> None:
        rest = memoryview(answer + b"\n")
        with writing("standard output" if str(self._path) == STREAM else self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def __enter__(self) -> "AnswersFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class _Answer(NamedTuple):
    """The content of a line of the output: the key of its request, and whether this has a response with status 200.

    The last line may have been cut off. Then its key is empty.
    """

    key: bytes
    succeeded: bool


def _read_answers(path: Path) -> Iterator[_Answer]:
    """Yield the answers in an output. Raise ConfigError if a line, other than a last one cut off, is no answer."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if (answer := _parse_answer(text)) is not None:
                yield answer
            elif not text.endswith(b"\n") and text[: len(START)] == START[: len(text)]:
                yield _Answer(b"", False)
            else:
                raise ConfigError(
                    f"line {number} of {path} is not an answer of run-batch: give another file (--output-file), or "
                    "--overwrite to replace it"
                )


def _parse_answer(text: bytes) -> _Answer | None:
    """Return the answer in a whole line, or None if there is none."""
    try:
        match from_json(text):
            case {"id": str() as id, "custom_id": _, "response": response} if text.endswith(b"\n"):
                key = bytes.fromhex(id.removeprefix(ID))
                return _Answer(key, isinstance(response, dict) and response.get("status_code") == 200)
    except ValueError:
        pass
    return None


def _keep_successes(path: Path) -> None:
    """Remove all lines but responses with status 200 from an output, which is complete at any moment."""
    rest = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            with path.open("rb") as old, rest.open("wb") as new:
                new.writelines(text for text in old if (answer := _parse_answer(text)) is not None and answer.succeeded)
                new.flush()
                os.fsync(new.fileno())
            rest.replace(path)
        finally:
            rest.unlink(missing_ok=True)
