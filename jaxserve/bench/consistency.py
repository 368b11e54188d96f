"""Checks that options fit together, made before anything runs, so that no option is silently ignored."""

import math
from dataclasses import fields
from typing import Any

from jaxserve.bench.options import ArrivalOptions, DatasetOptions, LoadOptions, ServerOptions, TraceOptions
from jaxserve.core.errors import ConfigError

EVERY_DATASET = {"--dataset", "--seed"}
# Options that each dataset takes besides EVERY_DATASET.
OPTIONS_OF_DATASET = {
    "random": {"--num-prompts", "--input-len", "--output-len", "--range-ratio", "--prefix-len"},
    "sharegpt": {"--num-prompts", "--dataset-path", "--output-len"},
    "prefix-repetition": {"--num-prompts", "--num-prefixes", "--prefix-len", "--input-len", "--output-len"},
    "trace": set[str](),
}
ONLY_SYNTHETIC = {"--duration", "--rate"}


def changed_options(options: Any) -> list[str]:
    """Return the flags of the options that differ from their defaults, such as --input-len."""
    return [f"--{f.name.replace('_', '-')}" for f in fields(options) if getattr(options, f.name) != f.default]


def check_workload(dataset: DatasetOptions, arrivals: ArrivalOptions, trace: TraceOptions) -> None:
    """Raise ConfigError if an option does not belong to the chosen dataset, or a trace is not given or missing."""
    kind = dataset.dataset
    refused = [name for name in changed_options(dataset) if name not in OPTIONS_OF_DATASET[kind] | EVERY_DATASET]
    if kind == "trace":
        if refused or changed_options(arrivals):
            name = [*refused, *changed_options(arrivals)][0]
            raise ConfigError(
                f"{name} does not apply to a trace, which says how many requests arrive when: "
                "scale it with --window or --thin"
            )
        if trace.trace is not None and trace.synthetic is not None:
            raise ConfigError("a trace is read (--trace) or generated (--synthetic): give one of the two, not both")
        if trace.synthetic is None and (generated := ONLY_SYNTHETIC.intersection(changed_options(trace))):
            raise ConfigError(f"{min(generated)} applies to a generated trace (--synthetic): cut a file with --window")
        if trace.trace is None and trace.synthetic is None:
            raise ConfigError("give the file of a trace (--trace), or the profile of a generated one (--synthetic)")
        if trace.trace is not None and not trace.trace.is_file():
            raise ConfigError(f"cannot read the trace {trace.trace}: no such file")
        return
    if refused:
        raise ConfigError(f"{refused[0]} does not apply to --dataset {kind}")
    if names := changed_options(trace):
        raise ConfigError(f"{names[0]} applies to --dataset trace, not to {kind}")
    if arrivals.ramp() is not None and arrivals.request_rate != math.inf:
        raise ConfigError("--ramp-up sets the rate: leave out --request-rate")


def check_server(server: ServerOptions, load: LoadOptions) -> None:
    """Raise ConfigError if an option is out of range, or does not apply to a server that is (or is not) spawned."""
    if not server.timeout > 0 or not server.spawn_timeout > 0:
        raise ConfigError(
            f"--timeout is {server.timeout:g} s and --spawn-timeout {server.spawn_timeout:g} s: both must be above 0"
        )
    if not load.metrics_interval >= 0:
        raise ConfigError(f"--metrics-interval is {load.metrics_interval:g} s: it must be 0 (no samples) or more")
    names = changed_options(server)
    place = [name for name in ("--base-url", "--host", "--port") if name in names]
    if server.spawn and place:
        raise ConfigError(f"a server is either started (--spawn, --run) or found at {place[0]}: leave out one")
    if place[:1] == ["--base-url"] and len(place) > 1:
        raise ConfigError(f"--base-url already says where the server listens: leave out {place[1]}")
    if server.backend and server.is_chat != (server.backend == "openai-chat"):
        raise ConfigError(
            f"--backend {server.backend} and --endpoint {server.endpoint} contradict each other: give one"
        )
    if not server.spawn and "--serve-args" in names:
        raise ConfigError("--serve-args needs --spawn; with --run, give the arguments in --run LABEL=ARGS")
