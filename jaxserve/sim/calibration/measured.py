"""A measured run of a server, as `jaxserve bench serve` or `bench trace` has saved it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.result import load
from jaxserve.bench.traces.trace import Trace
from jaxserve.core.errors import ConfigError
from jaxserve.sim.hardware import LATENCIES
from jaxserve.sim.request_columns import Floats
from jaxserve.sim.workload import SimWorkload

MIN_REQUESTS = 20
LISTS = ("start_times", "input_lens", "output_lens", "ttfts", "latencies", "errors")
MAX_FAILED = 0.02  # share of the requests: the simulator has no failures


@dataclass(frozen=True)
class MeasuredRun:
    """The requests of a run that were answered, and what is known of the server."""

    name: str
    workload: SimWorkload
    latencies: Mapping[str, Floats]  # s, by metric and request; NaN for the TPOT of an answer of one token
    kv_pages: int | None  # usable ones of all instances; None if the server did not say
    serve_args: str | None  # of a server that the run started
    gpus: str | None
    memory: int | None  # bytes of the machine
    date: str

    @classmethod
    def read(cls, path: Path) -> "MeasuredRun":
        """Read a result. Raise `ConfigError`, which names the file, if it is not of a run to calibrate with."""
        result = load(path)
        if result["kind"] not in ("serve", "trace") or result.get("simulated"):
            kind = "simulated" if result.get("simulated") else f"of bench {result['kind']}"
            raise ConfigError(f"{path} is {kind}: give a result of `jaxserve bench serve` or `trace` (--calibrate)")
        if missing := [name for name in LISTS if not isinstance(result.get(name), list)]:
            raise ConfigError(f"{path} has no {missing[0]} of requests: measure with `jaxserve bench` (--calibrate)")
        columns = {name: np.array(result[name]) for name in LISTS}
        good = (columns["errors"] == "") & (columns["ttfts"] > 0)
        if good.sum() < MIN_REQUESTS or (~good).mean() > MAX_FAILED:
            raise ConfigError(
                f"{path} has {good.sum()} answered and {(~good).sum()} failed requests: at least {MIN_REQUESTS} must "
                f"be answered, and at most {MAX_FAILED:.0%} may fail (--calibrate)"
            )
        return cls._of(path, result, {name: values[good] for name, values in columns.items()})

    @classmethod
    def _of(cls, path: Path, result: Mapping[str, Any], columns: Mapping[str, Any]) -> "MeasuredRun":
        order = np.argsort(columns["start_times"], kind="stable")
        start, inputs, outputs, ttft, whole = (columns[name][order] for name in LISTS[:5])
        trace = Trace.of(path.stem, start - start[0], inputs, outputs)
        gaps = outputs - 1
        tpot = np.divide(whole - ttft, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0)
        pages = (result.get("server") or {}).get("kv_pages_total") or ()
        environment = result.get("environment") or {}
        gib = str(environment.get("memory") or "").removesuffix(" GiB")
        return cls(
            name=path.name,
            workload=SimWorkload(trace, {"dataset": "trace", "trace": path.name}),
            latencies=dict(zip(LATENCIES, (ttft, tpot, whole), strict=True)),
            kv_pages=int(max(pages)) if pages and max(pages) > 0 else None,
            serve_args=result.get("serve_args"),
            gpus=environment.get("gpus"),
            memory=int(gib) << 30 if gib.isdecimal() else None,
            date=str(environment.get("date") or result.get("date") or ""),
        )

    @property
    def rate(self) -> float:
        """Requests per second."""
        trace = self.workload.trace
        return len(trace) / trace.duration_s if trace.duration_s else float("inf")
