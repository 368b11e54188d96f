"""Options that say nothing together, or nothing at all, are told before anything runs: no option is ignored."""

import math
from dataclasses import fields
from typing import Any

from jaxserve.bench.options import ArrivalOptions, DatasetOptions, LoadOptions, ServerOptions, TraceOptions
from jaxserve.core.errors import ConfigError

EVERY_DATASET = {"--dataset", "--seed"}
TAKEN = {  # by each dataset, besides those
    "random": {"--num-prompts", "--input-len", "--output-len", "--range-ratio", "--prefix-len"},
    "sharegpt": {"--num-prompts", "--dataset-path", "--output-len"},
    "prefix-repetition": {"--num-prompts", "--num-prefixes", "--prefix-len", "--input-len", "--output-len"},
    "trace": set[str](),
}
ONLY_SYNTHETIC = {"--duration", "--rate"}


def changed_options(options: Any) -> list[str]:
    """The options of a group that differ from their defaults, as they are written: --input-len."""
    return [f"--{f.name.replace('_', '-')}" for f in fields(options) if getattr(options, f.name) != f.default]


def check_workload(dataset: DatasetOptions, arrivals: ArrivalOptions, trace: TraceOptions) -> None:
    """Raises `ConfigError` for an option that the dataset does not take."""
    kind = dataset.dataset
    refused = [name for name in changed_options(dataset) if name not in TAKEN[kind] | EVERY_DATASET]
    if kind == "trace":
        if refused or changed_options(arrivals):
            name = [*refused, *changed_options(arrivals)][0]
            raise ConfigError(f"{name} is not for a trace, which has requests and times of its own (--window, --thin)")
        if trace.trace is not None and trace.synthetic is not None:
            raise ConfigError("a trace is read (--trace) or generated (--synthetic), not both")
        if trace.synthetic is None and (generated := ONLY_SYNTHETIC.intersection(changed_options(trace))):
            raise ConfigError(f"{min(generated)} is for a generated trace (--synthetic); a file is cut with --window")
        return
    if refused:
        raise ConfigError(f"{refused[0]} is not for --dataset {kind}")
    if names := changed_options(trace):
        raise ConfigError(f"{names[0]} is for --dataset trace, not for {kind}")
    if arrivals.ramp() is not None and arrivals.request_rate != math.inf:
        raise ConfigError("--ramp-up says the rate: leave out --request-rate")


def check_server(server: ServerOptions, load: LoadOptions) -> None:
    """Raises `ConfigError` for numbers that cannot be, and for options of a server that is or is not spawned."""
    if not server.timeout > 0 or not server.spawn_timeout > 0:
        raise ConfigError(
            f"--timeout is {server.timeout:g}, --spawn-timeout {server.spawn_timeout:g} s; they must be above 0"
        )
    if not load.metrics_interval >= 0:
        raise ConfigError(f"--metrics-interval is {load.metrics_interval:g} s, but must be 0 (none) or more")
    names = changed_options(server)
    place = [name for name in ("--base-url", "--host", "--port") if name in names]
    if server.spawn and place:
        raise ConfigError(f"a server is started (--spawn, --run) or found at {place[0]}, not both")
    if place[:1] == ["--base-url"] and len(place) > 1:
        raise ConfigError(f"--base-url says where the server listens: leave out {place[1]}")
    if server.backend and server.is_chat != (server.backend == "openai-chat"):
        raise ConfigError(f"--backend {server.backend} does not go with --endpoint {server.endpoint}")
    if not server.spawn and "--serve-args" in names:
        raise ConfigError("--serve-args is for a server that is started: --spawn; with --run, it says the arguments")
