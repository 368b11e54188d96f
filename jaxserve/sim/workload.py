"""Requests of a simulation: a trace, or random lengths and arrivals; one after the other, and never all in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.bench.arrivals import arrivals
from jaxserve.bench.consistency import check_workload
from jaxserve.bench.options import ArrivalOptions, DatasetOptions, TraceOptions
from jaxserve.bench.traces.trace import HashIds, Trace
from jaxserve.bench.workload_builder import INPUT_LEN, OUTPUT_LEN, lengths, ramp_up, scaled_trace
from jaxserve.core.errors import ConfigError
from jaxserve.core.numeric import ceil_div
from jaxserve.sim.cluster import ANY_TOKEN
from jaxserve.sim.simulation import SimRequest

AT_ONCE = 4096  # requests whose numbers are taken from the arrays together


@dataclass(frozen=True)
class SimWorkload:
    """A trace, and how it was made. `distinct`: prompts are told apart even where they share nothing."""

    trace: Trace
    description: Mapping[str, Any]
    distinct: bool = False

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def shares(self) -> bool:
        """Whether the trace says what prompts have in common."""
        return self.trace.hash_ids is not None

    def requests(self) -> Iterator[SimRequest]:
        """In order of arrival; where the trace says 0 tokens, 1 is asked for, as `bench` does."""
        trace, prompts = self.trace, _Prompts(self.trace.hash_ids, self.trace.block_tokens)
        told_apart = self.shares or self.distinct
        for start in range(0, len(trace), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            times = trace.arrival_s[part].tolist()
            inputs = np.maximum(trace.input_tokens[part], 1).tolist()
            outputs = np.maximum(trace.output_tokens[part], 1).tolist()
            for number, (time, length, output) in enumerate(zip(times, inputs, outputs, strict=True), start):
                yield SimRequest(time, length, output, prompts.of(number, length) if told_apart else None)


def sim_workload(dataset: DatasetOptions, when: ArrivalOptions, options: TraceOptions) -> SimWorkload:
    """The requests that the options ask for. Raises `ConfigError`.

    A trace gives the requests that `bench` would send with the same seed. Random requests have the same lengths as
    there, and arrivals of another draw: `bench` draws the prompts' tokens in between.
    """
    if dataset.dataset == "random" and (options.trace is not None or options.synthetic is not None):
        dataset = replace(dataset, dataset="trace")
    check_workload(dataset, when, options)
    rng = np.random.default_rng(dataset.seed)
    about = {"dataset": dataset.dataset, "seed": dataset.seed, "as_text": False}
    if dataset.dataset == "trace":
        trace = scaled_trace(options, rng)
        return SimWorkload(trace, about | trace.description())
    if dataset.dataset != "random":
        raise ConfigError(f"--dataset {dataset.dataset} is of prompts; a simulation takes random lengths, or a trace")
    return _random(dataset, when, rng, about)


def _random(
    dataset: DatasetOptions, when: ArrivalOptions, rng: np.random.Generator, about: Mapping[str, Any]
) -> SimWorkload:
    if (n := dataset.num_prompts) < 1:
        raise ConfigError(f"the number of prompts is {n}, but must be at least 1 (--num-prompts)")
    inputs = lengths(dataset.input_len, INPUT_LEN, dataset.range_ratio)
    outputs = lengths(dataset.output_len, OUTPUT_LEN, dataset.range_ratio)
    prefix, ramp = dataset.prefix_len or 0, when.ramp()
    input_tokens, output_tokens = prefix + inputs.sample(rng, n), outputs.sample(rng, n)
    times = arrivals(n, when.request_rate, when.burstiness, rng, ramp_up(ramp))
    shared: dict[str, Any] = {"hash_ids": ((0,),) * n, "block_tokens": prefix} if prefix else {}
    trace = Trace.of("random", times, input_tokens, output_tokens, **shared)
    facts = {"input_len": str(inputs), "output_len": str(outputs), "prefix_len": prefix, "ramp_up": ramp}
    return SimWorkload(trace, dict(about) | facts)


class _Prompts:
    """Prompts in which every block that is shared is one token, again and again, and so is what nothing shares.

    Equal blocks are equal tokens and different ones differ in each, so that the prefix cache finds pages as it would
    with the service's own text.
    """

    def __init__(self, hash_ids: HashIds | None, block_tokens: int):
        self._hash_ids, self._size = hash_ids, block_tokens
        self._tokens: dict[int, int] = {}  # by id: those of a service may be larger than a token can

    def of(self, number: int, length: int) -> tuple[int, ...]:
        """The prompt of a request."""
        prompt: tuple[int, ...] = ()
        if self._hash_ids is not None:
            for block in self._hash_ids[number][: ceil_div(length, self._size)]:
                prompt += (self._tokens.setdefault(block, len(self._tokens)),) * self._size
        own = ANY_TOKEN - 1 - number
        return prompt[:length] + (own,) * (length - len(prompt))
