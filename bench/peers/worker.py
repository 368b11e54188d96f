"""One engine, one checkpoint, one process: `python -m bench.peers.worker ENGINE MODEL PRECISION ...`.

It prints lines of JSON: one when the engine is loaded, then an answer to each line that it reads, until there are none.
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

BANDWIDTH = "bandwidth"  # in an engine's place: how fast memory is read
PASSES = 10  # over memory, for an answer: a third of a second


def main() -> None:
    """Loads the engine, or says what is missing, and measures as it is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("model", type=Path)
    parser.add_argument("precision")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--longest", type=int, required=True, help="tokens of a sequence at most")
    args = parser.parse_args()
    limit_threads(args.threads)  # before anything that counts cores is imported
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer
    try:
        (measure_bandwidth if args.engine == BANDWIDTH else measure_engine)(args, answers)
    except Missing as missing:
        say(answers, skipped=str(missing))


class Missing(Exception):
    """What is to be measured needs something that is not there."""


def measure_engine(args: argparse.Namespace, answers: TextIO) -> None:
    """Reads `[batch, prompt tokens, answer tokens]`, answers with the seconds and the most memory so far."""
    from bench.peers.engines import ENGINES, NEEDS
    from bench.peers.workload import PREFILL_BATCH, first_tokens, generation, token_bytes
    from jaxserve.bench.environment import packages

    missing = [name for name in NEEDS[args.engine] if importlib.util.find_spec(name) is None]
    if missing:
        raise Missing(f"not installed: {', '.join(missing)}")
    import numpy as np

    most = max(*args.batches, PREFILL_BATCH)
    engine = ENGINES[args.engine](args.model, args.precision, args.threads, most, args.longest)
    sizes = {"weights": engine.weight_bytes / 1e6, "token": token_bytes(args.model) / 1e6}
    say(answers, first_tokens=first_tokens(engine), packages=packages(), **sizes)
    rng = np.random.default_rng(1)
    for line in sys.stdin:
        say(answers, seconds=generation(engine, rng, *json.loads(line)), memory=peak_resident_gb())


def measure_bandwidth(args: argparse.Namespace, answers: TextIO) -> None:
    """Answers any line with how fast memory is read at the moment."""
    from bench.bandwidth import compiled, measure

    try:
        read = compiled()
    except OSError as error:
        raise Missing(f"no compiler: {error}") from error
    say(answers)
    for _ in sys.stdin:
        say(answers, **asdict(measure(args.threads, passes=PASSES, read=read)))


def say(answers: TextIO, **answer: Any) -> None:
    """One line of JSON."""
    print(json.dumps(answer), file=answers, flush=True)


def peak_resident_gb() -> float:
    """The most memory that this process ever had resident, mapped files included, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def limit_threads(threads: int) -> None:
    """Every engine gets the same cores, and thread pools of that size."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)


if __name__ == "__main__":
    main()
