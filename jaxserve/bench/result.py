"""The result of a measurement: one JSON document, with the keys that scripts for `vllm bench serve` read.

Besides those it holds `schema_version`, `kind`, `environment`, `workload` (how the load was made, with every scaling),
`client` (whether the client kept up) and `server` (series sampled from /metrics), so that a result explains itself.
Per-request lists (`start_times`, `ttfts`, `itls`, ...) are always there, because the report is drawn from them; they
hold the requests that ended, in order of arrival. Latencies count from `start_times`: when a request was due, which is
its arrival unless --max-concurrency held it back.
"""

import contextlib
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxserve.bench.record import RequestRecord
from jaxserve.bench.redaction import masked, masked_command
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json, read_text

SCHEMA_VERSION = 1
Result = dict[str, Any]  # the keys are described above
VLLM = {"completed", "duration", "request_throughput", "mean_ttft_ms", "mean_tpot_ms"}  # what its results all have
Kind = Literal["serve", "trace", "throughput", "latency", "startup", "compare"]
MICROSECONDS = 6  # decimals of times in seconds: no clock here is better, and files stay small


def build(
    kind: Kind,
    *,
    date: datetime,
    command: Sequence[str],
    environment: Mapping[str, str],
    seed: int | None = None,
    target: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    records: Sequence[RequestRecord] = (),
    client: Mapping[str, Any] | None = None,
    server: Mapping[str, Sequence[float]] | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    interrupted: bool = False,
    save_detailed: bool = False,
) -> dict[str, Any]:
    """A result that can be written as JSON as it is, without secrets, NaN or infinity.

    `target` (backend, label, model_id, tokenizer_id, num_prompts, request_rate, burstiness, max_concurrency, slo, ...)
    and `summary` become top-level keys. `rows` are an offline measurement's table. `save_detailed` keeps the texts.
    """
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "command": shlex.join(masked_command(command)),
        "seed": seed,
        **masked(target or {}),
        "interrupted": interrupted,
        **(summary or {}),
        "environment": environment,
        "workload": masked(workload or {}),
        "client": client or {},
        "server": server or {},
    }
    if rows is not None:
        result["rows"] = rows
    if records:
        result |= per_request(records, texts=save_detailed)
    plained: dict[str, Any] = plain(result)
    return plained


def per_request(records: Sequence[RequestRecord], *, texts: bool = False) -> dict[str, list[Any]]:
    """vLLM's per-request lists, in seconds. As there, a request without tokens has a ttft of 0 and an error."""
    ended = [record for record in records if record.end_s is not None or record.error is not None]
    lists: dict[str, list[Any]] = {
        "input_lens": [record.input_tokens for record in ended],
        "output_lens": [record.output_tokens for record in ended],
        "arrival_times": [round(record.arrival_s, MICROSECONDS) for record in ended],
        "start_times": [round(record.due_s, MICROSECONDS) for record in ended],
        "ttfts": [round(record.ttft_s or 0.0, MICROSECONDS) for record in ended],
        "itls": [[round(gap, MICROSECONDS) for gap in record.itl_s] for record in ended],
        "latencies": [round(_latency(record), MICROSECONDS) for record in ended],
        "errors": [record.error or "" for record in ended],
    }
    if texts:
        lists["generated_texts"] = [record.text for record in ended]
    return lists


def _latency(record: RequestRecord) -> float:
    """Until the last token, or until the request failed."""
    if record.e2el_s is not None:
        return record.e2el_s
    return record.end_s - record.due_s if record.end_s is not None else 0.0


def plain(value: Any) -> Any:
    """`value` in JSON's types: arrays become lists, NaN null, and infinity the string "inf", as vLLM writes a rate."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, Path) else value


def save(result: Mapping[str, Any], path: Path) -> None:
    """Writes a result, one line per top-level key. The file appears whole or not at all."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in result.items())
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def load(path: Path) -> dict[str, Any]:
    """Reads a result, also one of `vllm bench serve`; one without a label is called after its file.

    Raises ConfigError naming the file if it is not there, not a result, or of another version.
    """
    result = parse_json(read_text(path), path)
    if isinstance(result, dict) and "schema_version" not in result and result.keys() >= VLLM:
        result = _from_vllm(result)
    if not isinstance(result, dict) or "schema_version" not in result:
        raise ConfigError(f"{path}: not a result of `jaxserve bench`: it has no schema_version")
    if result["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(f"{path}: schema version {result['schema_version']}; this jaxserve reads {SCHEMA_VERSION}")
    return result | {"label": result.get("label") or path.stem}


def _from_vllm(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a foreign result, without its per-request lists: their clock is another one."""
    figures = {key: value for key, value in result.items() if not isinstance(value, list)}
    return {"schema_version": SCHEMA_VERSION, "kind": "serve", "interrupted": False, **figures}


def label(result: Mapping[str, Any]) -> str:
    """What to call a result: its label, else its model, else its kind."""
    return str(result.get("label") or result.get("model_id") or result["kind"])
