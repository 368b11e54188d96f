"""Comparison of engines that take turns: prints one table per model; `--out` saves everything as JSON.

    python -m bench.peers --peer-python /path/to/peers/bin/python --models 160m 1.1b --precisions bf16 int8 int4

int8 and int4 are Q8_0 and Q4_0 in llama.cpp. Transformers runs in bf16 alone. After Ctrl-C or SIGTERM the tables show
what was measured until then.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.peers.checkpoints import SHAPES, ensure_checkpoint
from bench.peers.engines import PRECISIONS
from bench.peers.report import summary, table
from bench.peers.turns import OURS, PEERS, Outcome, Settings, measure_in_turn
from bench.peers.workload import CaseLengths
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.interrupts import signals_as_ctrl_c

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "bench"
INTERRUPTED = 130  # exit status of a program that SIGINT ended


def main() -> None:
    """Parse the options, measure every model and print the tables."""
    args = parse(sys.argv[1:])
    lengths = CaseLengths.of(args.context)
    report: dict = {
        "machine": describe_environment(),
        "threads": args.threads,
        "lengths": asdict(lengths),
        "models": {},
    }
    failed = interrupted = False
    for model in args.models:
        outcomes = {precision: Outcome() for precision in args.precisions}
        try:
            with keyboard_interrupt_on_signals():
                measure(args, lengths, model, outcomes, report)
        except KeyboardInterrupt:
            print("interrupted: the table shows what was measured until then", file=sys.stderr)
            interrupted = True
        print(table(model, summaries(outcomes, lengths), lengths), flush=True)
        failed |= any(outcome.failed for outcome in outcomes.values())
        if interrupted:
            break
    for key, value in report["machine"].items():
        print(f"- {key}: {value}")
    sys.exit(INTERRUPTED if interrupted else int(failed))


def measure(
    args: argparse.Namespace, lengths: CaseLengths, model: str, outcomes: dict[str, Outcome], report: dict
) -> None:
    """Measure one model in every precision, filling the outcomes; the report's file is updated after every round."""
    settings = Settings(args.engines, args.batches, lengths, args.threads, args.rounds, str(args.peer_python))

    def save() -> None:
        report["models"][model] = summaries(outcomes, lengths)
        if args.out:
            write(args.out, report)

    path = ensure_checkpoint(model, args.cache_dir)
    try:
        for precision, outcome in outcomes.items():
            measure_in_turn(settings, path, precision, outcome, save)
    finally:
        save()


@contextlib.contextmanager
def keyboard_interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP inside, so that what was measured is kept.

    This holds for SIGINT even if it is ignored. A shell without job control starts background jobs with SIGINT ignored,
    but a signal to this process itself is meant to end it. Call this in the main thread only.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals_as_ctrl_c():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def summaries(outcomes: Mapping[str, Outcome], lengths: CaseLengths) -> dict[str, dict]:
    """Return a summary by precision, for outcomes that contain anything."""
    return {name: summary(outcome, lengths) for name, outcome in outcomes.items() if outcome.samples or outcome.skipped}


def write(out: Path, report: dict) -> None:
    """Replace the file in one step, so that it is complete at every moment."""
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    os.replace(partial, out)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options. Ends the program with a message if they are not valid."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.splitlines()[0])
    known = ", ".join(f"{name} {'/'.join(found)}" for name, found in PRECISIONS.items())
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS[OURS], default=["bf16"], help=known)
    parser.add_argument(
        "--engines", nargs="+", choices=(OURS, *PEERS), help="default: all that have one of the precisions"
    )
    parser.add_argument("--peer-python", type=Path, default=sys.executable, help="Python interpreter with the peers")
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 8, 32])
    parser.add_argument("--context", type=positive, help="tokens of all prompts (default: 32, and 512 in prefill)")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument(
        "--rounds", type=positive, default=5, help="measurements of each case, with the engines in turn"
    )
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, help="JSON file for the results, rewritten after every round")
    args = parser.parse_args(arguments)
    for name in ("models", "precisions", "batches"):  # once each, in the order given
        setattr(args, name, tuple(dict.fromkeys(getattr(args, name))))
    args.engines = tuple(dict.fromkeys(args.engines)) if args.engines else _engines_of(args.precisions)
    for name in args.engines:
        if name not in _engines_of(args.precisions):
            parser.error(f"--engines has {name}, which supports {', '.join(PRECISIONS[name])} alone (--precisions)")
    return args


def _engines_of(precisions: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name, found in PRECISIONS.items() if set(found) & set(precisions))


def positive(text: str) -> int:
    """Return a whole number above 0 from an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


if __name__ == "__main__":
    main()
