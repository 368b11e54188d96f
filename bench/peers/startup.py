"""Seconds from the start of a process to its first token: jaxserve with empty and warm cache, and llama.cpp.

    python -m bench.peers.startup --peer-python /path/to/peers/bin/python --models 160m 1.1b --precisions bf16 int4

Each row is a fresh process, with the model's files in the page cache. llama.cpp is skipped if the peers' Python has no
llama_cpp.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.peers.__main__ import DEFAULT_CACHE
from bench.peers.checkpoints import SHAPES, ensure_checkpoint
from bench.peers.engines import PRECISIONS
from jaxserve.bench.offline.options import Row, StartupOptions
from jaxserve.bench.offline.startup import startup
from jaxserve.core.clock import SystemClock
from jaxserve.core.config import EngineConfig

LLAMA = "llama.cpp"


def main() -> None:
    """Parse the options, measure every model in every precision, and print one line of JSON per row."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["160m", "1.1b"])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS["jaxserve"], default=["bf16"])
    parser.add_argument("--peer-python", type=Path, default=sys.executable, help="Python interpreter with llama_cpp")
    parser.add_argument("--repeats", type=int, default=1, help="starts of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="folder for checkpoints")
    args = parser.parse_args()
    for name in args.models:
        path = ensure_checkpoint(name, args.cache_dir)
        for precision in args.precisions:
            for row in rows(path, precision, args):
                print(json.dumps({"model": name, "precision": precision, **row}), flush=True)


def rows(path: Path, precision: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of one model in one precision."""
    ours = "bfloat16" if precision == "bf16" else precision
    engine = EngineConfig(model=path, precision=ours)
    for row in startup(StartupOptions(engine, args.repeats, server=False)):
        yield {"engine": "jaxserve", **row}
    command = [str(args.peer_python), "-m", "bench.peers.worker", LLAMA, str(path), precision]
    command += ["--threads", str(args.threads), "--batches", "1", "--longest", "64"]
    answer, _ = first_answer(command)  # writes the GGUF file and brings it into the page cache
    if "skipped" in answer:
        print(f"{LLAMA}: {answer['skipped']}", file=sys.stderr)
        return
    taken = sorted(first_answer(command)[1] for _ in range(args.repeats))
    yield {"engine": LLAMA, "repeats": args.repeats, "first_token_s": round(taken[len(taken) // 2], 2)}


def first_answer(command: list[str]) -> tuple[dict, float]:
    """Return a worker's first message, which follows its first tokens, and the seconds until then."""
    clock = SystemClock()
    started = clock.now()
    done = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with done:
        assert done.stdout is not None
        line = done.stdout.readline()
        taken = clock.now() - started
        done.communicate("")
    return (json.loads(line) if line else {"skipped": "it did not start"}), taken


if __name__ == "__main__":
    main()
