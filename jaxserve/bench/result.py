"""The result of a measurement: one JSON document, with the keys that scripts for `vllm bench serve` read.

It also holds `schema_version`, `kind`, `environment`, `workload` (how the load was made, with every scaling), `client`
(whether the client kept up) and `server` (series sampled from /metrics), so that a result explains itself.

Per-request lists (`start_times`, `ttfts`, `itls`, ...) are always included, because the report is drawn from them. They
hold the requests that ended, in order of arrival. Latencies count from `start_times`: when a request was due, which is
its arrival unless --max-concurrency held it back.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxserve.bench.record import RequestRecord
from jaxserve.bench.redaction import masked, masked_command
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json, read_text, write_file, writing

SCHEMA_VERSION = 1
Result = dict[str, Any]
"""A result as a JSON document, with the keys described above."""

VLLM_KEYS = {"completed", "duration", "request_throughput", "mean_ttft_ms", "mean_tpot_ms"}  # in every result of vLLM
Kind = Literal["serve", "trace", "throughput", "latency", "startup", "compare"]
DECIMALS = 6  # of times in seconds: microseconds, because no clock here is better and files stay small


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
    """Return a result without secrets, NaN or infinity, ready to be written as JSON.

    `target` (backend, label, model_id, tokenizer_id, num_prompts, request_rate, burstiness, max_concurrency, slo, ...)
    and `summary` become top-level keys. `rows` is the table of an offline measurement. `save_detailed` keeps the texts.
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
    as_json: dict[str, Any] = plain(result)
    return as_json


def per_request(records: Sequence[RequestRecord], *, texts: bool = False) -> dict[str, list[Any]]:
    """Return vLLM's per-request lists, in seconds.

    As in vLLM, a request without tokens has a ttft of 0 and an error.
    """
    ended = [record for record in records if record.end_s is not None or record.error is not None]
    lists: dict[str, list[Any]] = {
        "input_lens": [record.input_tokens for record in ended],
        "output_lens": [record.output_tokens for record in ended],
        "arrival_times": [round(record.arrival_s, DECIMALS) for record in ended],
        "start_times": [round(record.due_s, DECIMALS) for record in ended],
        "ttfts": [round(record.ttft_s or 0.0, DECIMALS) for record in ended],
        "itls": [[round(gap, DECIMALS) for gap in record.itl_s] for record in ended],
        "latencies": [round(_latency(record), DECIMALS) for record in ended],
        "errors": [record.error or "" for record in ended],
    }
    if texts:
        lists["generated_texts"] = [record.text for record in ended]
    return lists


def _latency(record: RequestRecord) -> float:
    """Return the time until the last token, or until the request failed."""
    if record.e2el_s is not None:
        return record.e2el_s
    return record.end_s - record.due_s if record.end_s is not None else 0.0


def plain(value: Any) -> Any:
    """Return `value` in JSON's types: arrays become lists, NaN becomes null, and infinity becomes "inf" as in vLLM."""
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
    """Write a result, one line per top-level key. The file appears whole or not at all.

    Raise ConfigError if the file cannot be written.
    """
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in result.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)


def load(path: Path) -> dict[str, Any]:
    """Read a result, also one of `vllm bench serve`. A result without a label gets the name of its file.

    Raise ConfigError, naming the file, if it is missing, not a result, or of another schema version.
    """
    result = parse_json(read_text(path), path)
    if isinstance(result, dict) and "schema_version" not in result and result.keys() >= VLLM_KEYS:
        result = _from_vllm(result)
    if not isinstance(result, dict) or "schema_version" not in result:
        raise ConfigError(f"{path} is not a result of `jaxserve bench`: it has no schema_version")
    if result["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(f"{path} has schema version {result['schema_version']}: this jaxserve reads {SCHEMA_VERSION}")
    return result | {"label": result.get("label") or path.stem}


def _from_vllm(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's figures without its per-request lists, whose times are on another clock."""
    figures = {key: value for key, value in result.items() if not isinstance(value, list)}
    return {"schema_version": SCHEMA_VERSION, "kind": "serve", "interrupted": False, **figures}


def label(result: Mapping[str, Any]) -> str:
    """Return the name of a result: its label, else its model, else its kind."""
    return str(result.get("label") or result.get("model_id") or result["kind"])
