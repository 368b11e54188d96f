"""Latency of a batch: prefill, decode step and whole answer, by batch size and prompt length.

Every case runs once unmeasured, and then `repeats` times with fresh random prompts that all arrive at once:

- answers of one token, for the prefill: prefill_ms until the last prompt's token, prefill_tok_s = prompt tokens /
  prefill time;
- answers of `output_len` tokens: latency_ms until the last token of the batch. The steps that only decode the whole
  batch give step_ms (from one step's tokens to the next one's), decode_tok_s = batch / mean step time, and host_ms, the
  time that Python takes per step, most of it while the device computes the step before.

If the prompts of a case take more steps than `output_len`, the whole batch is never decoded together, and the decode
columns are empty.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from jaxserve.bench.offline.engine import OfflineEngine, RunFigures, jobs, random_prompts
from jaxserve.bench.offline.options import LatencyOptions, Row
from jaxserve.bench.offline.steps import decode_steps, periods, sample_quantile, scaled
from jaxserve.core.errors import ConfigError

Progress = Callable[[], None]  # called after every run


def cases(options: LatencyOptions) -> list[tuple[int, int]]:
    """Return the batch size and prompt length of each row."""
    return [(batch, length) for length in options.input_lens for batch in options.batches]


def latency(options: LatencyOptions, on_run: Progress | None = None) -> Iterator[Row]:
    """Measure every case on one engine and yield its row.

    Raise ConfigError for data parallelism or a batch above max_num_seqs, and the errors of loading an engine.
    """
    if options.engine.dp > 1:
        raise ConfigError(f"latency is measured on one instance, but dp is {options.engine.dp}: use `throughput`")
    seqs = options.engine.max_num_seqs or max(options.batches)
    if seqs < max(options.batches):
        raise ConfigError(f"max_num_seqs is {seqs}: it must be at least the largest batch, {max(options.batches)}")
    rng = np.random.default_rng(options.seed)
    with OfflineEngine(replace(options.engine, max_num_seqs=seqs)) as engine:
        for batch, length in cases(options):
            yield measure(engine, batch, length, options, rng, on_run)


def measure(
    engine: OfflineEngine,
    batch: int,
    length: int,
    options: LatencyOptions,
    rng: np.random.Generator,
    on_run: Progress | None = None,
) -> Row:
    """Measure one case on an engine whose `max_num_seqs` is at least `batch`, and return its row."""

    def run(output_len: int) -> RunFigures:
        prompts = random_prompts(rng, engine.info.vocab_size, batch, length)
        done = engine.run(jobs(prompts, output_len))
        if done.interrupted:
            raise KeyboardInterrupt
        if on_run is not None:
            on_run()
        return done

    run(options.output_len)
    prefills, wholes = [], []
    for _ in range(options.repeats):
        prefills.append(run(1))
        wholes.append(run(options.output_len))
    return row(batch, length, options.output_len, prefills, wholes)


def row(batch: int, input_len: int, output_len: int, prefills: list[RunFigures], wholes: list[RunFigures]) -> Row:
    """Return the figures of one case from its runs."""
    prefill = statistics.median(run.seconds for run in prefills)
    whole = [run.seconds for run in wholes]
    gaps = [gap for run in wholes for gap in periods(run.steps[0], batch)]
    host = [step.host_s for run in wholes for step in decode_steps(run.steps[0], batch)]
    return {
        "batch": batch,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_ms": scaled(prefill, 1e3),
        "prefill_tok_s": round(batch * input_len / prefill, 1),
        "step_ms": scaled(sample_quantile(gaps, 0.5), 1e3),
        "step_p90_ms": scaled(sample_quantile(gaps, 0.9), 1e3),
        "decode_tok_s": round(batch / statistics.mean(gaps), 1) if gaps else None,
        "host_ms": scaled(sample_quantile(host, 0.5), 1e3),
        "latency_ms": scaled(sample_quantile(whole, 0.5), 1e3),
        "latency_p90_ms": scaled(sample_quantile(whole, 0.9), 1e3),
        "compilations": sum(run.compilations for run in (*prefills, *wholes)),
    }
