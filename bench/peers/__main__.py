"""Runs the engines in turn and prints one table per model; `--out` keeps everything as JSON.

python -m bench.peers --peer-python /path/to/peers/bin/python --models 160m 1.1b --rounds 3
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from bench.peers.checkpoints import SHAPES, ensure_checkpoint
from bench.peers.report import agreement, combine, table
from jaxserve.bench.environment import describe

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "bench"
PEERS = ("transformers", "llama.cpp")


def main() -> None:
    """Parses options, measures every model and prints the tables."""
    args = _options()
    report = {"machine": describe(), "threads": args.threads, "models": {}}
    for model in args.models:
        path = ensure_checkpoint(model, args.cache_dir)
        answers, skipped, interrupted = measure_in_turn(args, path)
        measured = {name: combine([a["results"] for a in found]) for name, found in answers.items()}
        print(table(model, measured, skipped))
        print(agreement({name: found[0]["first_tokens"] for name, found in answers.items()}), flush=True)
        versions = {name: found[0]["packages"] for name, found in answers.items()}
        report["models"][model] = {"measured": measured, "skipped": skipped, "packages": versions, "rounds": answers}
        if args.out:
            args.out.write_text(json.dumps(report, indent=2) + "\n")
        if interrupted:
            break
    for key, value in report["machine"].items():
        print(f"- {key}: {value}")


def measure_in_turn(args: argparse.Namespace, model: Path) -> tuple[dict[str, list[dict]], dict[str, str], bool]:
    """Every engine once, and again, `rounds` times over, so that a drift of the machine meets all of them alike.

    Returns the workers' answers by engine, why an engine was skipped, and whether Ctrl-C ended it before its time.
    """
    answers: dict[str, list[dict]] = {}
    skipped: dict[str, str] = {}
    turns = [(number, name) for number in range(1, args.rounds + 1) for name in args.engines]
    for number, name in turns:
        if name in skipped:
            continue
        print(f"{model.name}: round {number}/{args.rounds}: {name}", file=sys.stderr, flush=True)
        try:
            answer = run_worker(args, name, model)
        except KeyboardInterrupt:
            return answers, skipped, True
        if "skipped" in answer:
            skipped[name] = answer["skipped"]
        else:
            answers.setdefault(name, []).append(answer)
    return answers, skipped, False


def run_worker(args: argparse.Namespace, engine: str, model: Path) -> dict:
    """One engine in a process of its own; its standard error passes through. Raises CalledProcessError if it fails."""
    python = args.peer_python if engine in PEERS else sys.executable
    command = [str(python), "-m", "bench.peers.worker", engine, str(model)]
    command += ["--threads", str(args.threads), "--repeats", str(args.repeats)]
    command += ["--batches", *map(str, args.batches)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--engines", nargs="+", choices=("jaxserve", *PEERS), default=["jaxserve", *PEERS])
    parser.add_argument("--peer-python", type=Path, default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="processes per engine, alternating")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a case within a process")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="where the checkpoints are kept")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
