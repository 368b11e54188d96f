"""Building a workload from options: which dataset or trace, how long the prompts, and when they arrive."""

from typing import Any

import numpy as np

from jaxserve.bench.arrivals import RampUp, arrivals
from jaxserve.bench.consistency import check_workload
from jaxserve.bench.datasets.generated import prefix_samples, random_samples
from jaxserve.bench.datasets.lengths import Lengths
from jaxserve.bench.datasets.sharegpt import sharegpt_samples
from jaxserve.bench.options import ArrivalOptions, DatasetOptions, TraceOptions
from jaxserve.bench.traces.formats import load_trace
from jaxserve.bench.traces.profiles import profile_named
from jaxserve.bench.traces.prompts import trace_samples
from jaxserve.bench.traces.scaling import (
    clip_lengths,
    fixed_lengths,
    replicate,
    scale_lengths,
    stretch,
    thin,
    window,
)
from jaxserve.bench.traces.synthetic import synthetic
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload import Sample, Workload
from jaxserve.core.errors import ConfigError

INPUT_LEN, OUTPUT_LEN, PREFIX_LEN = 512, 128, 256


def build_workload(
    dataset: DatasetOptions, arrival: ArrivalOptions, trace: TraceOptions, vocabulary: Vocabulary, *, as_text: bool
) -> Workload:
    """Return the requests that the options describe; equal options and seeds give equal requests.

    Raise ConfigError if the options do not make sense together.
    """
    check_workload(dataset, arrival, trace)
    rng = np.random.default_rng(dataset.seed)
    summary = {"dataset": dataset.dataset, "seed": dataset.seed, "as_text": as_text}
    if dataset.dataset == "trace":
        scaled = scaled_trace(trace, rng)
        samples = trace_samples(scaled, vocabulary, rng, as_text=as_text)
        return Workload.of(samples, scaled.arrival_s, summary | scaled.description())
    samples, description = _samples(dataset, vocabulary, rng, as_text)
    times = arrivals(len(samples), arrival.request_rate, arrival.burstiness, rng, ramp_up(arrival.ramp()))
    return Workload.of(samples, times, summary | description | {"ramp_up": arrival.ramp()})


def scaled_trace(options: TraceOptions, rng: np.random.Generator) -> Trace:
    """Return the trace that the options name, read or generated, after all scalings in the order of the options.

    `check_workload` has checked that they name exactly one.

    Raise ConfigError if a trace cannot be read or a scaling is out of range.
    """
    if options.trace is not None:
        trace = load_trace(options.trace)
    else:
        trace = synthetic(profile_named(str(options.synthetic)), options.duration, options.rate, rng)
    if options.window is not None:
        trace = window(trace, *_pair(options.window, ":", float, "--window start:length, in seconds"))
    if options.thin is not None:
        trace = thin(trace, options.thin, rng)
    if options.replicate is not None:
        trace = replicate(trace, options.replicate, rng)
    if options.stretch is not None:
        trace = stretch(trace, options.stretch)
    if options.fixed_lengths is not None:
        trace = fixed_lengths(trace, *_pair(options.fixed_lengths, "/", int, "--fixed-lengths in/out, in tokens"))
    if options.scale_lengths is not None:
        trace = scale_lengths(trace, options.scale_lengths)
    if options.clip_lengths is not None:
        trace = clip_lengths(trace, *_pair(options.clip_lengths, "/", int, "--clip-lengths in/out, in tokens"))
    return trace


def _samples(
    options: DatasetOptions, vocabulary: Vocabulary, rng: np.random.Generator, as_text: bool
) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of a dataset, and what the result says about them."""
    n = options.num_prompts
    if n < 1:
        raise ConfigError(f"the number of prompts is {n}: it must be at least 1 (--num-prompts)")
    if options.dataset == "sharegpt":
        if options.dataset_path is None:
            raise ConfigError("sharegpt needs conversations: give a JSON or JSONL file (--dataset-path)")
        length = None if options.output_len is None else _fixed(options.output_len, "--output-len")
        facts = {"dataset_path": str(options.dataset_path), "output_len": length}
        path = options.dataset_path
        return sharegpt_samples(vocabulary, n, rng, path=path, output_len=length, as_text=as_text), facts
    if options.dataset == "prefix-repetition":
        numbers = {
            "num_prefixes": options.num_prefixes,
            "prefix_len": PREFIX_LEN if options.prefix_len is None else options.prefix_len,
            "suffix_len": _fixed(options.input_len or str(PREFIX_LEN), "--input-len"),
            "output_len": _fixed(options.output_len or str(OUTPUT_LEN), "--output-len"),
        }
        return prefix_samples(vocabulary, n, rng, **numbers, as_text=as_text), numbers
    inputs = lengths(options.input_len, INPUT_LEN, options.range_ratio)
    outputs = lengths(options.output_len, OUTPUT_LEN, options.range_ratio)
    prefix = options.prefix_len or 0
    samples = random_samples(
        vocabulary, n, rng, input_len=inputs, output_len=outputs, prefix_len=prefix, as_text=as_text
    )
    return samples, {"input_len": str(inputs), "output_len": str(outputs), "prefix_len": prefix}


def lengths(text: str | None, default: int, range_ratio: float) -> Lengths:
    """Return the lengths that an option's text describes; `range_ratio` applies to a plain number alone.

    Raise ConfigError.
    """
    text = str(default) if text is None else text
    if text.isdecimal():
        return Lengths.around(int(text), range_ratio)
    if range_ratio:
        raise ConfigError(f"--range-ratio applies to a plain number of tokens, not to {text!r}")
    return Lengths.parse(text)


def _fixed(text: str, option: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{option} is {text!r}: this dataset takes one number of tokens")
    return int(text)


def _pair(text: str, separator: str, kind: type, form: str) -> tuple[Any, Any]:
    first, found, second = text.partition(separator)
    try:
        if found:
            return kind(first), kind(second)
    except ValueError:
        pass
    raise ConfigError(f"{text!r} does not have the form {form}")


def ramp_up(text: str | None) -> RampUp | None:
    """Return the ramp-up in text such as "linear:1:10" or "exponential:1:10" (requests per second).

    Raise ConfigError if the text has another form.
    """
    if text is None:
        return None
    strategy, _, rates = text.partition(":")
    start, end = _pair(rates, ":", float, "--ramp-up linear:START:END or exponential:START:END, in requests/s")
    return RampUp(strategy, start, end)
