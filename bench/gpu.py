"""The speed of jaxserve on an NVIDIA GPU, measured in under 8 minutes: `python -m bench.gpu --out results.json`.

Measures the device's ceilings (copy bandwidth, products of large matrices), every kernel, decode and prefill of random
1B and 8B Llamas at several batch sizes, the throughput of many requests, and Transformers' continuous batching on the
same models. Prints two tables. The first shows the share of its ceiling that each row reaches: the time that the fewest
necessary bytes and operations would take, over the measured time. The second lists the targets for an H200 as met,
missed or not measured. Parts and cases with targets run first. The JSON is written after every row, so that an
interrupted run keeps its rows.

`--platform cpu --tiny` runs everything with tiny sizes on a CPU, which shows only that it works.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from bench.gpu_parts.parts import DEFAULT_PARTS, PARTS, Outcome, Part, default_settings, run_in_turns, run_parts
from bench.gpu_parts.table import table, with_shares
from bench.gpu_parts.targets import targets, targets_table
from bench.peers.__main__ import DEFAULT_CACHE
from jaxserve.bench.environment import describe_environment

SCHEMA_VERSION = 1


def main() -> None:
    """Measure, write the JSON and print the tables."""
    args = _options()
    # SIGTERM ends the run as Ctrl-C does, keeping what was measured.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [part for part in PARTS if {part.name, part.kind} & set(args.parts)] if args.parts else [*DEFAULT_PARTS]
    parts = scaled(chosen, args.minutes * 60)
    settings = default_settings(
        "cuda" if args.platform == "gpu" else "cpu", tiny=args.tiny, cache=args.cache_dir, peer_python=args.peer_python
    )
    environment, outcomes = describe_environment(), {}
    start = time.monotonic()

    def save(name: str) -> None:
        with_shares(outcomes)
        if args.out:
            write(args.out, environment, args.tiny, time.monotonic() - start, outcomes)
        outcome = outcomes[name]
        latest = outcome.rows[-1]["case"] if outcome.status == "running" else outcome.status
        print(f"{time.monotonic() - start:5.0f} s  {name}: {latest}", file=sys.stderr, flush=True)

    try:
        (run_in_turns if args.overlap else run_parts)(parts, settings, outcomes, save)
    except KeyboardInterrupt:
        print("interrupted: the tables show what was measured until then", file=sys.stderr)
    print(table(outcomes))
    print(targets_table(outcomes))
    for key, value in environment.items():
        print(f"- {key}: {value}")
    sys.exit(0 if outcomes and all(o.status in ("ok", "skipped") for o in outcomes.values()) else 1)


def scaled(parts: list[Part], seconds: float) -> list[Part]:
    """Return the parts with their times scaled to a total of `seconds`."""
    factor = seconds / sum(part.seconds for part in parts)
    return [replace(part, seconds=part.seconds * factor) for part in parts]


def write(out: Path, environment: dict[str, str], tiny: bool, seconds: float, outcomes: dict[str, Outcome]) -> None:
    """Replace the file in one step, so that it is complete at every moment."""
    report = {
        "schema_version": SCHEMA_VERSION,
        "kind": "gpu",
        "command": shlex.join(sys.argv),
        "environment": environment,
        "tiny": tiny,
        "seconds": round(seconds, 1),
        "targets": [{**asdict(target), "verdict": target.verdict} for target in targets(outcomes)],
        "parts": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    os.replace(partial, out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    names = sorted({name for part in PARTS for name in (part.name, part.kind)})
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check that the script works")
    parser.add_argument("--parts", nargs="+", choices=names, help="default: those with targets, and peers")
    parser.add_argument(
        "--overlap", action="store_true", help="let all parts load and compile together, and measure in turn"
    )
    parser.add_argument("--minutes", type=float, default=7.75, help="for all parts together")
    parser.add_argument("--peer-python", help="Python interpreter with torch and transformers; default: this one")
    parser.add_argument(
        "--cache-dir", type=Path, default=DEFAULT_CACHE, help="folder for checkpoints and compiled programs"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
