"""Scalings of a trace: pure functions from trace to trace, each of which adds an entry to the trace's history."""

import math
from typing import Any

import numpy as np

from jaxserve.bench.traces.trace import MAX_REQUESTS, HashIds, Ints, Trace
from jaxserve.core.errors import ConfigError


def window(trace: Trace, start_s: float, length_s: float) -> Trace:
    """Keep the requests that arrive in [start_s, start_s + length_s), with `start_s` as the new time 0.

    Idle time at the start of the window remains. Raise ConfigError if the window has no requests.
    """
    first, last = np.searchsorted(trace.arrival_s, [start_s, start_s + length_s], side="left").tolist()
    if not (start_s >= 0 and length_s > 0 and first < last):
        raise ConfigError(
            f"the window {start_s:g}:{length_s:g} of {trace.name} has no requests; "
            f"the trace has {len(trace)} in {trace.duration_s:g} s (--window START:LENGTH)"
        )
    columns = trace.taken(range(first, last))
    columns["arrival_s"] = columns["arrival_s"] - start_s
    return trace.changed("window", {"start_s": start_s, "length_s": length_s}, **columns)


def thin(trace: Trace, share: float, rng: np.random.Generator) -> Trace:
    """Keep a random share of the requests at their times: the rate falls, the bursts stay.

    Raise ConfigError if `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share to keep is {share:g}: it must be above 0 and at most 1 (--thin)")
    chosen = rng.choice(len(trace), max(round(len(trace) * share), 1), replace=False)
    return trace.changed("thin", {"share": share}, **trace.taken(np.sort(chosen)))


def stretch(trace: Trace, factor: float) -> Trace:
    """Multiply times by `factor`: 2 halves the rate and doubles the length of bursts.

    Raise ConfigError if `factor` is not above 0.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"the factor on time is {factor:g}: it must be finite and above 0 (--stretch)")
    return trace.changed("stretch", {"factor": factor}, arrival_s=trace.arrival_s * factor)


def replicate(trace: Trace, copies: int, rng: np.random.Generator, *, jitter_s: float = 1.0) -> Trace:
    """Repeat every request `copies` times: once at its own time, and up to `jitter_s` seconds later, at random.

    The rate grows by the factor `copies`, and bursts longer than the jitter keep their shape. Each copy has its own
    hash ids: requests share prefixes within a copy as in the trace, but not between copies.

    Raise ConfigError if `copies` is below 1, `jitter_s` is below 0, or there would be too many requests.
    """
    if copies < 1 or not 0 <= jitter_s < math.inf:
        raise ConfigError(f"cannot replicate {copies} times with a jitter of {jitter_s:g} s (--replicate)")
    if copies * len(trace) > MAX_REQUESTS:
        raise ConfigError(f"{copies * len(trace)} requests are too many: the limit is {MAX_REQUESTS} (--replicate)")
    columns = trace.taken(np.tile(np.arange(len(trace)), copies))
    delays = rng.uniform(0, jitter_s, (copies, len(trace)))
    delays[0] = 0
    columns["arrival_s"] = columns["arrival_s"] + delays.ravel()
    if trace.hash_ids is not None:
        columns["hash_ids"] = _distinct(trace.hash_ids, copies)
    return trace.changed("replicate", {"copies": copies, "jitter_s": jitter_s}, **columns)


def fixed_lengths(trace: Trace, input_tokens: int | None = None, output_tokens: int | None = None) -> Trace:
    """Give all prompts or answers one length in tokens; None keeps the trace's. Raise ConfigError below 1."""
    _check(input_tokens, output_tokens, "--fixed-lengths")
    inputs = trace.input_tokens if input_tokens is None else np.full(len(trace), input_tokens)
    outputs = trace.output_tokens if output_tokens is None else np.full(len(trace), output_tokens)
    facts = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    return _with_lengths(trace, "fixed_lengths", facts, inputs, outputs, trace.block_tokens)


def clip_lengths(trace: Trace, max_input: int | None = None, max_output: int | None = None) -> Trace:
    """Limit the tokens of prompts and answers; None means no limit. Raise ConfigError for limits below 1."""
    _check(max_input, max_output, "--clip-lengths")
    inputs = trace.input_tokens if max_input is None else np.minimum(trace.input_tokens, max_input)
    outputs = trace.output_tokens if max_output is None else np.minimum(trace.output_tokens, max_output)
    facts = {"max_input": max_input, "max_output": max_output}
    return _with_lengths(trace, "clip_lengths", facts, inputs, outputs, trace.block_tokens)


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Multiply prompts, answers and shared blocks by `factor`, so that the shared part of a prompt stays the same.

    Raise ConfigError if `factor` is not above 0.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"the factor on lengths is {factor:g}: it must be finite and above 0 (--scale-lengths)")
    inputs, outputs = (np.rint(tokens * factor) for tokens in (trace.input_tokens, trace.output_tokens))
    block = max(round(trace.block_tokens * factor), 1)
    return _with_lengths(trace, "scale_lengths", {"factor": factor}, inputs, outputs, block)


def _check(input_tokens: int | None, output_tokens: int | None, option: str) -> None:
    for what, tokens in (("input", input_tokens), ("output", output_tokens)):
        if tokens is not None and tokens < 1:
            raise ConfigError(f"the {what} length is {tokens}: it must be at least 1 ({option})")


def _with_lengths(
    trace: Trace, operation: str, facts: dict[str, Any], inputs: Any, outputs: Any, block_tokens: int
) -> Trace:
    """Return the trace with other lengths, without the blocks beyond the ends of shorter prompts."""
    inputs = np.asarray(inputs, np.int64)
    ids = None if trace.hash_ids is None else _cut(trace.hash_ids, -(-inputs // block_tokens))
    columns = {"input_tokens": inputs, "output_tokens": outputs, "hash_ids": ids, "block_tokens": block_tokens}
    return trace.changed(operation, facts, **columns)


def _cut(hash_ids: HashIds, blocks: Ints) -> HashIds:
    return tuple(ids[:count] for ids, count in zip(hash_ids, blocks.tolist(), strict=True))


def _distinct(hash_ids: HashIds, copies: int) -> HashIds:
    """Return the ids of all copies, copy by copy, such that no two copies have an id in common."""
    step = 1 + max((id for ids in hash_ids for id in ids), default=0)
    return tuple(tuple(id + copy * step for id in ids) for copy in range(copies) for ids in hash_ids)
