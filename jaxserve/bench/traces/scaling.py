"""Changes to a trace, each explicit: pure functions from trace to trace, which write themselves into its history."""

import math
from typing import Any

import numpy as np

from jaxserve.bench.traces.trace import MAX_REQUESTS, HashIds, Ints, Trace
from jaxserve.core.errors import ConfigError


def window(trace: Trace, start_s: float, length_s: float) -> Trace:
    """The requests that arrive in [start_s, start_s + length_s); `start_s` becomes 0, idle time after it is kept.

    Raises ConfigError if there are none.
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
    """A random share of the requests, at the times they have: the rate falls, the bursts stay.

    Raises ConfigError if `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share to keep is {share:g}, but must be above 0 and at most 1 (--thin)")
    kept = rng.choice(len(trace), max(round(len(trace) * share), 1), replace=False)
    return trace.changed("thin", {"share": share}, **trace.taken(np.sort(kept)))


def every(trace: Trace, k: int) -> Trace:
    """Every k-th request, beginning with the first. Raises ConfigError if `k` is below 1."""
    if k < 1:
        raise ConfigError(f"every {k}-th request cannot be kept: the number must be at least 1 (--thin)")
    return trace.changed("every", {"k": k}, **trace.taken(range(0, len(trace), k)))


def stretch(trace: Trace, factor: float) -> Trace:
    """Times multiplied by `factor`: 2 halves the rate, and makes bursts twice as long.

    Raises ConfigError if `factor` is not above 0.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"the factor on time is {factor:g}, but must be above 0 (--stretch)")
    return trace.changed("stretch", {"factor": factor}, arrival_s=trace.arrival_s * factor)


def replicate(trace: Trace, copies: int, rng: np.random.Generator, *, jitter_s: float = 1.0) -> Trace:
    """Every request `copies` times: once at its own time, the others up to `jitter_s` seconds later, at random.

    The rate grows by `copies` and bursts longer than the jitter keep their shape. Each copy has hash ids of its own:
    the users it stands for share prefixes among themselves as the real ones did, but not with those of other copies.

    Raises ConfigError if `copies` is below 1 or `jitter_s` is below 0.
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
    """All prompts, all answers or both of one length; None leaves the trace's. Raises ConfigError below 1."""
    _check(input_tokens, output_tokens, "--fixed-lengths")
    inputs = trace.input_tokens if input_tokens is None else np.full(len(trace), input_tokens)
    outputs = trace.output_tokens if output_tokens is None else np.full(len(trace), output_tokens)
    facts = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    return _with_lengths(trace, "fixed_lengths", facts, inputs, outputs, trace.block_tokens)


def clip_lengths(trace: Trace, max_input: int | None = None, max_output: int | None = None) -> Trace:
    """No prompt and no answer longer than this; None is no limit. Raises ConfigError below 1."""
    _check(max_input, max_output, "--clip-lengths")
    inputs = trace.input_tokens if max_input is None else np.minimum(trace.input_tokens, max_input)
    outputs = trace.output_tokens if max_output is None else np.minimum(trace.output_tokens, max_output)
    facts = {"max_input": max_input, "max_output": max_output}
    return _with_lengths(trace, "clip_lengths", facts, inputs, outputs, trace.block_tokens)


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Prompts, answers and shared blocks `factor` times as long, so that the shared part of a prompt stays the same.

    Raises ConfigError if `factor` is not above 0.
    """
    if not 0 < factor < math.inf:
        raise ConfigError(f"the factor on lengths is {factor:g}, but must be above 0 (--scale-lengths)")
    inputs, outputs = (np.rint(tokens * factor) for tokens in (trace.input_tokens, trace.output_tokens))
    block = max(round(trace.block_tokens * factor), 1)
    return _with_lengths(trace, "scale_lengths", {"factor": factor}, inputs, outputs, block)


def _check(input_tokens: int | None, output_tokens: int | None, option: str) -> None:
    for what, tokens in (("input", input_tokens), ("output", output_tokens)):
        if tokens is not None and tokens < 1:
            raise ConfigError(f"the {what} length is {tokens}, but must be at least 1 ({option})")


def _with_lengths(
    trace: Trace, operation: str, facts: dict[str, Any], inputs: Any, outputs: Any, block_tokens: int
) -> Trace:
    """Other lengths; blocks beyond the end of a shorter prompt are cut off."""
    inputs = np.asarray(inputs, np.int64)
    ids = None if trace.hash_ids is None else _cut(trace.hash_ids, -(-inputs // block_tokens))
    columns = {"input_tokens": inputs, "output_tokens": outputs, "hash_ids": ids, "block_tokens": block_tokens}
    return trace.changed(operation, facts, **columns)


def _cut(hash_ids: HashIds, blocks: Ints) -> HashIds:
    return tuple(ids[:count] for ids, count in zip(hash_ids, blocks.tolist(), strict=True))


def _distinct(hash_ids: HashIds, copies: int) -> HashIds:
    """The ids of all copies, one copy after the other, without any id that two copies have."""
    step = 1 + max((id for ids in hash_ids for id in ids), default=0)
    return tuple(tuple(id + copy * step for id in ids) for copy in range(copies) for ids in hash_ids)
