"""The workload of a simulation: a trace, or random lengths and arrivals, made into requests one by one."""

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

CHUNK_SIZE = 4096  # requests that are converted from the trace's arrays together


@dataclass(frozen=True)
class SimWorkload:
    """A trace and its description. Requests are made when they are needed, and are never all in memory."""

    trace: Trace
    description: Mapping[str, Any]
    distinct: bool = False  # prompts differ from each other even if the trace does not say what they share

    def __len__(self) -> int:
        return len(self.trace)

    @property
    def shares(self) -> bool:
        """True if the trace says which blocks prompts share."""
        return self.trace.hash_ids is not None

    def requests(self) -> Iterator[SimRequest]:
        """Yield the requests in order of arrival. Lengths of 0 in the trace become 1, as in `bench`."""
        trace, prompts = self.trace, _Prompts(self.trace.hash_ids, self.trace.block_tokens)
        with_prompts = self.shares or self.distinct
        for start in range(0, len(trace), CHUNK_SIZE):
            part = slice(start, start + CHUNK_SIZE)
            times = trace.arrival_s[part].tolist()
            inputs = np.maximum(trace.input_tokens[part], 1).tolist()
            outputs = np.maximum(trace.output_tokens[part], 1).tolist()
            for index, (time, length, output) in enumerate(zip(times, inputs, outputs, strict=True), start):
                yield SimRequest(time, length, output, prompts.of(index, length) if with_prompts else None)


def sim_workload(dataset: DatasetOptions, when: ArrivalOptions, options: TraceOptions) -> SimWorkload:
    """Return the workload that the options describe. Raise `ConfigError` if they do not fit together.

    A trace gives the requests that `bench` sends with the same seed. Random requests have the same lengths as in
    `bench`, but other arrivals, because `bench` draws the prompts' tokens before the arrivals.
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
        raise ConfigError(f"--dataset is {dataset.dataset!r}: a simulation has no prompts, choose random or trace")
    return _random(dataset, when, rng, about)


def _random(
    dataset: DatasetOptions, when: ArrivalOptions, rng: np.random.Generator, about: Mapping[str, Any]
) -> SimWorkload:
    if (n := dataset.num_prompts) < 1:
        raise ConfigError(f"the number of prompts is {n}: it must be at least 1 (--num-prompts)")
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
    """Prompts made of repeated token ids: one id for each shared block, and one for the unshared rest of a prompt.

    Equal blocks have equal tokens, and different blocks differ in every token. The prefix cache thus finds the pages
    that it would find with the original text.
    """

    def __init__(self, hash_ids: HashIds | None, block_tokens: int):
        self._hash_ids, self._size = hash_ids, block_tokens
        self._tokens: dict[int, int] = {}  # by hash id, which may be larger than a token id can be

    def of(self, index: int, length: int) -> tuple[int, ...]:
        prompt: tuple[int, ...] = ()
        if self._hash_ids is not None:
            for block in self._hash_ids[index][: ceil_div(length, self._size)]:
                prompt += (self._tokens.setdefault(block, len(self._tokens)),) * self._size
        own = ANY_TOKEN - 1 - index
        return prompt[:length] + (own,) * (length - len(prompt))
