"""From options to a workload: which dataset or trace, how long, and when."""

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
    dataset: DatasetOptions, when: ArrivalOptions, trace: TraceOptions, vocabulary: Vocabulary, *, as_text: bool
) -> Workload:
    """The requests that the options ask for; the same options and seed give the same ones. Raises `ConfigError`."""
    check_workload(dataset, when, trace)
    rng = np.random.default_rng(dataset.seed)
    about = {"dataset": dataset.dataset, "seed": dataset.seed, "as_text": as_text}
    if dataset.dataset == "trace":
        scaled = scaled_trace(trace, rng)
        samples = trace_samples(scaled, vocabulary, rng, as_text=as_text)
        return Workload.of(samples, scaled.arrival_s, about | scaled.description())
    samples, description = _samples(dataset, vocabulary, rng, as_text)
    times = arrivals(len(samples), when.request_rate, when.burstiness, rng, ramp_up(when.ramp()))
    return Workload.of(samples, times, about | description | {"ramp_up": when.ramp()})


def scaled_trace(options: TraceOptions, rng: np.random.Generator) -> Trace:
    """The trace that is asked for, read or generated, after every scaling in the order of the options."""
    if (options.trace is None) == (options.synthetic is None):
        raise ConfigError("which trace: give a file (--trace), or the profile of a generated one (--synthetic)")
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
    """The samples of a dataset, and what the result says of them."""
    n = options.num_prompts
    if n < 1:
        raise ConfigError(f"the number of prompts is {n}, but must be at least 1 (--num-prompts)")
    if options.dataset == "sharegpt":
        if options.dataset_path is None:
            raise ConfigError("which conversations: give a JSON or JSONL file (--dataset-path)")
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
    """From an option's text. A number takes the range ratio, a distribution says it all itself. Raises ConfigError."""
    text = str(default) if text is None else text
    if text.isdecimal():
        return Lengths.around(int(text), range_ratio)
    if range_ratio:
        raise ConfigError(f"--range-ratio is for a plain number of tokens, not for {text!r}")
    return Lengths.parse(text)


def _fixed(text: str, option: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{option} {text!r}: this dataset takes one number of tokens")
    return int(text)


def _pair(text: str, separator: str, kind: type, form: str) -> tuple[Any, Any]:
    first, found, second = text.partition(separator)
    try:
        if found:
            return kind(first), kind(second)
    except ValueError:
        pass
    raise ConfigError(f"{text!r} is not of the form {form}")


def ramp_up(text: str | None) -> RampUp | None:
    """From "linear:1:10" or "exponential:1:10", in requests per second. Raises ConfigError."""
    if text is None:
        return None
    strategy, _, rates = text.partition(":")
    start, end = _pair(rates, ":", float, "--ramp-up linear:START:END or exponential:START:END, in requests/s")
    return RampUp(strategy, start, end)
