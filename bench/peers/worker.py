"""One engine, one checkpoint, one process: `python -m bench.peers.worker ENGINE MODEL PRECISION ...` prints JSON."""

import argparse
import importlib.util
import json
import os
import resource
import sys
from pathlib import Path


def main() -> None:
    """Measures, or says what is missing, as the last line of standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("model", type=Path)
    parser.add_argument("precision")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    limit_threads(args.threads)  # before anything that counts cores is imported

    from bench.peers.engines import ENGINES, NEEDS
    from bench.peers.workload import PREFILL_BATCH, first_tokens, measure
    from jaxserve.bench.environment import packages

    missing = [name for name in NEEDS[args.engine] if importlib.util.find_spec(name) is None]
    if missing:
        print(json.dumps({"skipped": f"not installed: {', '.join(missing)}"}))
        return
    engine = ENGINES[args.engine](args.model, args.precision, args.threads, max(*args.batches, PREFILL_BATCH))
    tokens = first_tokens(engine)
    results = measure(engine, args.batches, args.repeats)
    results |= {"weights": engine.weight_bytes / 1e6, "memory": peak_resident_gb()}
    print(json.dumps({"results": results, "first_tokens": tokens, "packages": packages()}))


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
