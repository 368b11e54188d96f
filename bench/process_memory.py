"""The ledger of a server on CPU compared with its resident memory: `python -m bench.process_memory [--cells NAME ...]`.

Each cell is a configuration, started twice: with an empty compilation cache, and with what that start compiled. The
server then answers requests that use all its slots and fill all its KV pages, so that everything in the ledger is in
use. Its peak resident memory (VmHWM, mapped libraries included) is compared with the ledger's sum over all devices.
"""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from bench.peers.checkpoints import SHAPES, Shape, hf_config, write_tokenizer
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.spawn import SERVE, spawned
from jaxserve.core.bundled import bundled_model_path

KV_PAGES = 200
REQUESTS = 64
ALWAYS = f"--memory-gb 8 --kv-pages {KV_PAGES}"
DEEP = Shape(hidden=256, layers=32, heads=4, kv_heads=2, intermediate=768, tied=True)
MODELS = {"160m": SHAPES["160m"], "deep": DEEP}  # with dummy weights, besides the bundled model
CELLS = {
    "static": "bundled",
    "morph": "bundled --policy morph",
    "morph-performance": "bundled --policy morph-performance",
    "morph dp 2": "bundled --policy morph --dp 2",
    "static tp 2": "bundled --tp 2",
    "static pp 2": "bundled --pp 2",
    "static int8 KV": "bundled --kv-cache-dtype int8",
    "static xla": "bundled --kernel-backend xla",
    "morph xla": "bundled --policy morph --kernel-backend xla",
    "static 8 sequences": "bundled --max-num-seqs 8",
    "morph 8 sequences": "bundled --policy morph --max-num-seqs 8",
    "160m static": "160m",
    "160m morph": "160m --policy morph",
    "deep static": "deep",
    "deep morph": "deep --policy morph",
}


def main() -> None:
    """Measure the chosen cells, print a line for each start, and write everything to `--out`."""
    parser = argparse.ArgumentParser(prog="python -m bench.process_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("bench/out/process-memory.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in args.cells:
        for row in measure(CELLS[name]):
            rows.append({"cell": name, **row})
            print(table_line(rows[-1]), flush=True)
            result = {"environment": describe_environment(), "kv_pages": KV_PAGES, "rows": rows}
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def table_line(row: dict[str, Any]) -> str:
    """Return the row of a table: megabytes of the ledger and of the process, and the difference."""
    error = row["ledger"] / row["peak"] - 1
    cells = (row["cell"], row["cache"], *(f"{row[key] / 1e6:.0f}" for key in ("runtime", "ledger", "peak")))
    return f"| {' | '.join(cells)} | {100 * error:+.1f} % |"


def measure(cell: str) -> Iterator[dict[str, Any]]:
    """Yield the figures, in bytes, of a start with an empty and one with a warm compilation cache."""
    model, _, options = cell.partition(" ")
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        path = bundled_model_path() if model == "bundled" else _dummy(MODELS[model], Path(folder))
        load = "" if model == "bundled" else "--load-format dummy"
        args = [str(path), *shlex.split(f"{ALWAYS} {load} {options}"), "--compile-cache", f"{folder}/xla"]
        for cache in ("empty", "warm"):
            yield {"cache": cache, **_started(args, Path(folder) / "pid")}


def _dummy(shape: Shape, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(hf_config(shape)))
    write_tokenizer(folder, shape.vocab)
    return folder


def _started(args: list[str], pid_file: Path) -> dict[str, Any]:
    """Return the ledger's bytes on all devices, and the resident bytes of a server when ready and at its peak."""
    # The shell becomes the server, so that its own process id is the server's.
    script = f'echo $$ > {shlex.quote(str(pid_file))}; exec {shlex.join(SERVE)} "$@"'
    with spawned(args, timeout_s=600, command=("sh", "-c", script, "sh")) as url:
        status = Path("/proc") / pid_file.read_text().strip() / "status"
        ready = _resident(status)["VmRSS"]
        with httpx2.Client(base_url=url, timeout=600, trust_env=False) as client:
            _fill(client)
            ledger = client.get("/admin/ledger").raise_for_status().json()
        devices = _devices(args)
        resident = _resident(status)
    entries = {name: size * devices for name, size in ledger["entries"].items()}
    return {
        "runtime": entries["runtime"],
        "ledger": sum(entries.values()),
        "entries": entries,
        "ready": ready,
        "peak": resident["VmHWM"],
        "resident": resident,
    }


def _devices(args: list[str]) -> int:
    """Return the number of virtual devices, whose ledgers are equal."""
    product = 1
    for option in ("--tp", "--pp", "--dp"):
        if option in args:
            product *= int(args[args.index(option) + 1])
    return product


def _fill(client: httpx2.Client) -> None:
    """Send more requests at once than there are slots, whose tokens need more KV pages than there are."""
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def request(index: int) -> None:
        body = {"model": model, "prompt": [3 + index] * (40 + 4 * index), "max_tokens": 48, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(request, range(REQUESTS)))


def _resident(status: Path) -> dict[str, int]:
    """Return the fields of a process's status that describe its resident memory, in bytes."""
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    names = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")
    return {name: int(fields[name].split()[0]) * 1024 for name in names}


if __name__ == "__main__":
    main()
