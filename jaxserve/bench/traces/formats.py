"""Readers of traces: jaxserve's CSV, and the files of Azure, BurstGPT and Mooncake, recognised by their fields."""

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxserve.bench.traces.trace import Trace
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json

GZIP_MAGIC = b"\x1f\x8b"
Entry = Mapping[str, Any]  # one request, as fields of a file


@dataclass(frozen=True)
class TraceFormat:
    """The names of the three fields that every trace has, and how its times are read."""

    name: str
    time: str
    input: str
    output: str
    seconds: Callable[[Any], float]  # reads a time; raises ValueError or TypeError
    from_zero: bool = True  # shift times so that the first request arrives at 0
    failures_are_zero: bool = False  # 0 output tokens mark a failed request

    @property
    def fields(self) -> set[str]:
        return {self.time, self.input, self.output}


def _wall_clock(value: str) -> float:
    """Return the seconds of a time such as "2023-11-16 18:15:46.6805900", which is UTC without a time zone."""
    moment = datetime.fromisoformat(value.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


FORMATS = (
    TraceFormat("jaxserve", "arrival_s", "input_tokens", "output_tokens", float, from_zero=False),
    TraceFormat("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _wall_clock),
    TraceFormat("burstgpt", "Timestamp", "Request tokens", "Response tokens", float, failures_are_zero=True),
    TraceFormat("mooncake", "timestamp", "input_length", "output_length", lambda value: float(value) / 1000),
)


def load_trace(path: str | Path) -> Trace:
    """Read a trace from a CSV file or JSON lines, gzipped or not.

    - jaxserve: arrival_s, input_tokens, output_tokens and, in JSON lines, hash_ids; times are not shifted;
    - Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens;
    - BurstGPT: Timestamp, Request tokens, Response tokens; failed requests are dropped, and the history counts them;
    - Mooncake: timestamp in ms, input_length, output_length, hash_ids of blocks of 512 tokens.

    Other fields are ignored. Raise ConfigError, naming the file, the line and the faulty field.
    """
    path = Path(path)
    lines = _lines(path)
    entries = iter(_json_entries(path, lines) if _first_line(lines).startswith("{") else _csv_entries(path, lines))
    first = next(entries, None)
    if first is None:
        raise ConfigError(f"{path} has no requests")
    form = _format_of(path, first[1])
    return _Reader(path, form).read([first, *entries])


class _Reader:
    def __init__(self, path: Path, form: TraceFormat):
        self._path, self._form = path, form
        self._times: list[float] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._hash_ids: list[tuple[int, ...]] = []
        self._failed = 0

    def read(self, entries: list[tuple[int, Entry]]) -> Trace:
        form = self._form
        with_ids = "hash_ids" in entries[0][1]
        for line, entry in entries:
            self._add(line, entry, with_ids)
        if not self._times:
            raise ConfigError(f"{self._path}: all {self._failed} requests failed")
        start = min(self._times) if form.from_zero else 0.0
        step: dict[str, Any] = {"operation": "load", "format": form.name, "file": self._path.name}
        step |= {"failed_dropped": self._failed} if form.failures_are_zero else {}
        return Trace.of(
            self._path.name.split(".")[0],
            [time - start for time in self._times],
            self._inputs,
            self._outputs,
            hash_ids=tuple(self._hash_ids) if with_ids else None,
            history=({**step, "requests": len(self._times)},),
        )

    def _add(self, line: int, entry: Entry, with_ids: bool) -> None:
        form = self._form
        output = self._tokens(line, entry, form.output)
        if form.failures_are_zero and output == 0:
            self._failed += 1
            return
        self._times.append(self._time(line, entry))
        self._inputs.append(self._tokens(line, entry, form.input))
        self._outputs.append(output)
        if with_ids:
            self._hash_ids.append(self._ids(line, entry))

    def _time(self, line: int, entry: Entry) -> float:
        value = entry.get(self._form.time)
        try:
            seconds = self._form.seconds(value)
        except (ValueError, TypeError) as error:
            raise self._error(line, self._form.time, value, "a time") from error
        if not math.isfinite(seconds) or (seconds < 0 and not self._form.from_zero):
            raise self._error(line, self._form.time, value, "a time of 0 or more")
        return seconds

    def _tokens(self, line: int, entry: Entry, field: str) -> int:
        value = entry.get(field)
        try:
            count = int(value) if isinstance(value, int | str) else -1
        except ValueError:
            count = -1
        if count < 0:
            raise self._error(line, field, value, "a whole number of tokens, 0 or more")
        return count

    def _ids(self, line: int, entry: Entry) -> tuple[int, ...]:
        value = entry.get("hash_ids")
        if not isinstance(value, list) or not all(isinstance(id, int) and id >= 0 for id in value):
            raise self._error(line, "hash_ids", value, "a list of whole numbers, 0 or more")
        return tuple(value)

    def _error(self, line: int, field: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {line}: {field} is {value!r}: it must be {wanted}")


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == GZIP_MAGIC else data).decode("utf-8-sig").split("\n")
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _first_line(lines: Iterable[str]) -> str:
    return next((line.strip() for line in lines if line.strip()), "")


def _csv_entries(path: Path, lines: list[str]) -> Iterator[tuple[int, Entry]]:
    # Blank lines before the header.
    blank = next((i for i, line in enumerate(lines) if line.strip()), 0)
    reader = csv.DictReader(lines[blank:])
    try:
        for entry in reader:
            yield blank + reader.line_num, entry
    except csv.Error as error:
        raise ConfigError(f"{path}, line {blank + reader.line_num} is not valid CSV: {error}") from error


def _json_entries(path: Path, lines: list[str]) -> Iterator[tuple[int, Entry]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            entry = parse_json(line, f"{path}, line {number}")
            if not isinstance(entry, dict):
                raise ConfigError(f"{path}, line {number} is not a JSON object")
            yield number, entry


def _format_of(path: Path, entry: Entry) -> TraceFormat:
    for form in FORMATS:
        if form.fields <= entry.keys():
            return form
    known = "; ".join(f"{form.name}: {form.time}, {form.input}, {form.output}" for form in FORMATS)
    fields = ", ".join(map(str, entry))
    raise ConfigError(f"{path} is not a trace of a known format: its fields are {fields}, expected {known}")
