"""The process of one engine with one checkpoint: `python -m bench.peers.worker ENGINE MODEL PRECISION ...`.

It prints lines of JSON: one when the engine is loaded, then an answer to each line that it reads, until its input ends.
"""

import argparse
import importlib.util
import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

BANDWIDTH = "bandwidth"  # in place of an engine: measures how fast memory is read
PASSES = 10  # over memory for each answer, about a third of a second


def main() -> None:
    """Load the engine, or report what is missing, and measure on request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("model", type=Path)
    parser.add_argument("precision")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--longest", type=int, required=True, help="most tokens of a sequence")
    args = parser.parse_args()
    limit_threads(args.threads)  # before anything that counts cores is imported
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not an answer
    try:
        (measure_bandwidth if args.engine == BANDWIDTH else measure_engine)(args, answers)
    except Missing as missing:
        send(answers, skipped=str(missing))


class Missing(Exception):
    """A requirement of the measurement is missing."""


def measure_engine(args: argparse.Namespace, answers: TextIO) -> None:
    """Read lines `[batch, prompt tokens, answer tokens]`; answer with the seconds and the peak memory in GB."""
    from bench.peers.engines import ENGINES, NEEDS
    from bench.peers.workload import PREFILL_BATCH, first_tokens, generation, token_bytes
    from jaxserve.bench.environment import packages

    missing = [name for name in NEEDS[args.engine] if importlib.util.find_spec(name) is None]
    if missing:
        raise Missing(f"not installed: {', '.join(missing)}")
    import numpy as np

    max_batch = max(*args.batches, PREFILL_BATCH)
    engine = ENGINES[args.engine](args.model, args.precision, args.threads, max_batch, args.longest)
    sizes = {"weights": engine.weight_bytes / 1e6, "token": token_bytes(args.model) / 1e6}
    send(answers, first_tokens=first_tokens(engine), packages=packages(), **sizes)
    rng = np.random.default_rng(1)
    for line in sys.stdin:
        send(answers, seconds=generation(engine, rng, *json.loads(line)), memory=peak_resident_gb())


def measure_bandwidth(args: argparse.Namespace, answers: TextIO) -> None:
    """Answer every line with the speed at which memory is read at the moment."""
    from bench.bandwidth import compiled, measure

    try:
        read = compiled()
    except OSError as error:
        raise Missing(f"no compiler: {error}") from error
    send(answers)
    for _ in sys.stdin:
        send(answers, **asdict(measure(args.threads, passes=PASSES, read=read)))


def send(answers: TextIO, **answer: Any) -> None:
    """Write one line of JSON."""
    print(json.dumps(answer), file=answers, flush=True)


def peak_resident_gb() -> float:
    """Return the peak resident memory of this process in GB, mapped files included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def limit_threads(threads: int) -> None:
    """Limit this process to the first `threads` cores, and thread pools to that size, as for every engine."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)


if __name__ == "__main__":
    main()
