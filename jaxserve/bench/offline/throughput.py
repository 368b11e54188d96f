"""Throughput: all requests at once, until the last one has ended.

Besides requests and tokens per second, a row holds the median and 90th percentile of the time from one step's tokens to
the next one's, the mean number of sequences that a step decodes, Python's time per step, preemptions, and compilations,
of which there should be none.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxserve.bench.offline.engine import Job, OfflineEngine, RunFigures, jobs, random_prompts
from jaxserve.bench.offline.options import Row, ThroughputOptions
from jaxserve.bench.offline.steps import periods, sample_quantile, scaled
from jaxserve.bench.workload import Sample
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import Prompt, TextPrompt, TokensPrompt


def throughput(
    options: ThroughputOptions,
    samples: Sequence[Sample] | None = None,
    on_finished: Callable[[], None] | None = None,
) -> Iterator[Row]:
    """Yield one row; after KeyboardInterrupt it is marked as interrupted and counts what was done.

    Raise RequestError for a sample that the engine would refuse, and the errors of loading an engine.
    """
    with OfflineEngine(options.engine) as engine:
        rng = np.random.default_rng(options.seed)
        requests = _jobs(engine, options, samples, rng)
        if options.num_warmups:
            warm = random_prompts(
                rng, engine.info.vocab_size, options.num_warmups, min(32, engine.info.max_model_len - 8)
            )
            engine.run(jobs(warm, 4, detokenize=options.detokenize))
        yield row(engine.run(requests, on_finished), len(requests))


def row(run: RunFigures, num_prompts: int) -> Row:
    """Return the figures of one run."""
    steps = [step for instance in run.steps for step in instance]
    gaps = [gap for instance in run.steps for gap in periods(instance)]
    decodes = [step.decodes for step in steps if step.decodes]
    return {
        "num_prompts": num_prompts,
        "completed": run.finished,
        "duration_s": round(run.seconds, 3),
        "input_tokens": run.input_tokens,
        "output_tokens": run.output_tokens,
        "requests_per_s": round(run.finished / run.seconds, 3),
        "output_tok_s": round(run.output_tokens / run.seconds, 1),
        "total_tok_s": round((run.input_tokens + run.output_tokens) / run.seconds, 1),
        "steps": len(steps),
        "step_ms": scaled(sample_quantile(gaps, 0.5), 1e3),
        "step_p90_ms": scaled(sample_quantile(gaps, 0.9), 1e3),
        "mean_decodes": round(statistics.mean(decodes), 1) if decodes else None,
        "host_ms": scaled(sample_quantile([step.host_s for step in steps], 0.5), 1e3),
        "preemptions": run.preemptions,
        "compilations": run.compilations,
        "interrupted": run.interrupted,
    }


def _jobs(
    engine: OfflineEngine, options: ThroughputOptions, samples: Sequence[Sample] | None, rng: np.random.Generator
) -> list[Job]:
    if samples is None:
        prompts = random_prompts(rng, engine.info.vocab_size, options.num_prompts, options.input_len)
        lengths = [options.output_len] * len(prompts)
    else:
        prompts = [_prompt(sample) for sample in samples]
        lengths = [sample.output_tokens for sample in samples]
    return [
        (
            prompt,
            SamplingParams(
                temperature=0, ignore_eos=options.ignore_eos, max_tokens=length, detokenize=options.detokenize
            ),
        )
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def _prompt(sample: Sample) -> Prompt:
    return TextPrompt(sample.prompt) if isinstance(sample.prompt, str) else TokensPrompt(tuple(sample.prompt))
