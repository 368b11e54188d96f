"""Efficiencies and links of A100 and H100 from public tables: `python -m bench.sim.fit_tables --traces FOLDER`.

Fits the figures of these two GPUs in configs/hardware, and prints them with their errors:

- calib_vidur_linear.csv.gz (Vidur, microsoft/vidur, MIT): the products, activations and norms of a decoder layer, in ms
  by tokens. Gives `efficiency.bfloat16` and `overheads.layer`.
- calib_vidur_network.csv.gz (Vidur): collectives by bytes. All-reduces give `links.nvlink`, copies between hosts give
  `links.rdma`.
- calib_splitwise_perf.csv.gz (Splitwise, Mutinifni/splitwise-sim, MIT): whole prompts and tokens of Llama-2-70B on a
  serving framework of 2023, which needs about 43 ms (A100) or 29 ms (H100) per token on any number of GPUs. Nothing is
  fitted to it; the prediction is printed for comparison. Rows that are faster than half their batch are left out.
"""

import argparse
import csv
import gzip
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from jaxserve.control.plan import block_chain, parallel_plan
from jaxserve.sim.cost_model import RooflineModel, StepLoad
from jaxserve.sim.hardware import Curve, Hardware, Link, load_hardware
from jaxserve.sim.shape import ModelShape

Floats = NDArray[np.float64]

GPUS = {"a100": "a100-80", "h100": "h100"}  # name in the tables: name in configs/hardware
MODELS = {
    "Meta-Llama-3-8B": "llama-3-8b",
    "Llama-2-7b-hf": "llama-2-7b",
    "CodeLlama-34b-Instruct-hf": "codellama-34b",
    "Llama-2-70b-hf": "llama-3-70b",  # with equal layers
}
PARTS = ("qkv_ms", "o_ms", "mlp_up_ms", "mlp_down_ms", "act_ms", "norms_add_ms")
KNOTS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
FEW = 64  # most tokens of a step that only decodes


@dataclass(frozen=True)
class Layers:
    """Times of a decoder layer, as arrays of equal length."""

    groups: list[tuple[str, int]]  # (model, tp)
    tokens: Floats
    rooflines: Floats  # seconds at full bandwidth and rate
    seconds: Floats

    def predicted(self, curve: Curve, overhead: float) -> Floats:
        """Return the predicted seconds."""
        shares: Floats = np.array([curve(n) for n in self.tokens])
        return np.asarray(self.rooflines / shares + overhead)


def main() -> None:
    """Print tables and fragments of YAML."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.fit_tables", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder with the calib_*.csv.gz files")
    folder = parser.parse_args().traces
    linear, network, whole = (
        list(read(folder / f"calib_{name}.csv.gz")) for name in ("vidur_linear", "vidur_network", "splitwise_perf")
    )
    for gpu, name in GPUS.items():
        hardware = load_hardware(name)
        layers = layers_of(linear, gpu, hardware)
        curve, overhead = fit_layers(layers)
        near, far = (fit_link(link_rows(network, f"{gpu}_dgx", kind)) for kind in ("all_reduce", "send_recv"))
        print_layers(name, layers, layers.predicted(curve, overhead))
        for title, link, kind in (("all-reduce", near, "all_reduce"), ("between hosts", far, "send_recv")):
            print_link(title, link, link_rows(network, f"{gpu}_dgx", kind))
        fitted = replace(
            hardware,
            efficiency={**hardware.efficiency, "bfloat16": curve},
            overheads=replace(hardware.overheads, layer=overhead),
            links={**hardware.links, "nvlink": near},
        )
        print_whole(whole, f"{gpu}-80gb", fitted)
        print_yaml(curve, overhead, near, far)


def read(path: Path) -> Iterable[dict[str, str]]:
    """Yield the rows of a gzipped CSV file."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


# -- layers


def layers_of(rows: Iterable[dict[str, str]], gpu: str, hardware: Hardware) -> Layers:
    """Return the layer times of one GPU. A layer's time is that of all its parts but attention."""
    shapes = {name: ModelShape.load(shape) for name, shape in MODELS.items()}
    groups, tokens, rooflines, seconds = [], [], [], []
    for row in rows:
        if row["gpu"] != gpu or row["model"] not in shapes:
            continue
        shape, tp, count = shapes[row["model"]], int(row["tp"]), int(row["tokens"])
        reading = shape.layer_bytes("bfloat16", tp) / hardware.bandwidth
        computing = count * shape.layer_ops(tp) / hardware.rate("bfloat16")
        groups.append((row["model"], tp))
        tokens.append(float(count))
        rooflines.append(max(reading, computing))
        seconds.append(1e-3 * sum(float(row[part]) for part in PARTS))
    return Layers(groups, np.array(tokens), np.array(rooflines), np.array(seconds))


def fit_layers(layers: Layers) -> tuple[Curve, float]:
    """Return the curve and the seconds per layer with the least squares of relative errors.

    Each octave of tokens has equal weight, because the tables have most of their rows at many tokens.
    """
    knots = np.array([knot for knot in KNOTS if knot <= layers.tokens.max()], float)
    places, logs = np.log(layers.tokens), np.log(knots)
    octaves = np.floor(np.log2(layers.tokens)).astype(int)
    weights = np.sqrt(1 / np.bincount(octaves)[octaves])

    def errors(x: Floats) -> Floats:
        shares = np.interp(places, logs, np.exp(x[:-1]))
        return np.asarray(weights * np.log((layers.rooflines / shares + np.exp(x[-1])) / layers.seconds))

    start = np.log(np.array([*np.full(len(knots), 0.6), 2e-5]))
    x = np.exp(least_squares(errors, start))
    return Curve(tuple((int(knot), round(float(share), 3)) for knot, share in zip(knots, x, strict=False))), float(
        x[-1]
    )


def least_squares(errors: Callable[[Floats], Floats], x: Floats) -> Floats:
    """Minimise the squares of `errors` near x by Levenberg and Marquardt's method with numerical derivatives."""
    now, damping, step = errors(x), 1e-2, 1e-6
    for _ in range(300):
        slopes = np.stack([(errors(x + step * unit) - now) / step for unit in np.eye(len(x))], axis=1)
        change = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), -slopes.T @ now)
        then = errors(x + change)
        if then @ then < now @ now:
            x, now, damping = x + change, then, damping / 3
        else:
            damping *= 4
        if np.abs(change).max() < 1e-9:
            break
    return x


# -- links


def link_rows(rows: Iterable[dict[str, str]], node: str, collective: str) -> Floats:
    """Return rows [bytes that each device sends, seconds, workers] of a collective.

    Collectives are all-reduces within a host, and copies from host to host.
    """
    found = []
    for row in rows:
        hosts = 1 if collective == "all_reduce" else 2
        workers = int(row["workers"])
        if row["node"] == node and row["collective"] == collective and int(row["devices_per_node"]) * hosts == workers:
            sent = 2 * (workers - 1) / workers if collective == "all_reduce" else 1
            found.append((sent * float(row["bytes"]), 1e-3 * float(row["median_ms"]), workers))
    return np.array(found)


def fit_link(rows: Floats) -> Link:
    """Return the link with the least mean relative error, by iteratively reweighted least squares."""
    size, seconds = rows[:, 0], rows[:, 1]
    columns = np.stack([size, np.ones_like(size)], axis=1) / seconds[:, None]
    weights = np.ones_like(seconds)
    for _ in range(50):
        x = np.linalg.lstsq(columns * weights[:, None], weights, rcond=None)[0]
        weights = np.maximum(np.abs(columns @ x - 1), 1e-3) ** -0.5
    return Link(bandwidth=float(1 / x[0]), latency=float(x[1]))


# -- printing


def print_layers(name: str, layers: Layers, predicted: Floats) -> None:
    """Print mean errors by model and degree of tensor parallelism."""
    off = np.abs(predicted / layers.seconds - 1)
    few = layers.tokens <= FEW
    print(f"\n## {name}\n\nA decoder layer without attention: mean relative error, % of {len(off)} times\n")
    print(f"| model | tp | all | up to {FEW} tokens |\n| --- | ---: | ---: | ---: |")
    for group in sorted(set(layers.groups)):
        mine = np.array([other == group for other in layers.groups])
        print(f"| {group[0]} | {group[1]} | {100 * off[mine].mean():.1f} | {100 * off[mine & few].mean():.1f} |")
    print(f"| all | | {100 * off.mean():.1f} | {100 * off[few].mean():.1f} |")


def print_link(title: str, link: Link, rows: Floats) -> None:
    """Print mean errors by number of workers."""
    off = np.abs((rows[:, 0] / link.bandwidth + link.latency) / rows[:, 1] - 1)
    large = rows[:, 0] > 1e6
    by_workers = ", ".join(f"{int(n)} workers {100 * off[rows[:, 2] == n].mean():.0f} %" for n in np.unique(rows[:, 2]))
    print(f"\n{title}: {link.bandwidth / 1e9:.1f} GB/s, {link.latency * 1e6:.0f} µs; mean relative error ", end="")
    print(f"{100 * off.mean():.0f} % ({by_workers}); above 1 MB {100 * off[large].mean():.0f} %")


def print_whole(rows: Iterable[dict[str, str]], gpu: str, hardware: Hardware) -> None:
    """Print Splitwise's prompts and tokens of Llama-2-70B with the predictions."""
    print("\nLlama-2-70B, Splitwise's measurements and the prediction, ms\n")
    print("| tp | prompt tokens | batch | prompt | predicted | token | predicted |")
    print("| ---: " * 7 + "|")
    off: dict[tuple[str, int], list[float]] = {}
    prompts: dict[tuple[int, int, int], float] = {}
    for row in rows:
        tp, tokens, batch = (int(row[key]) for key in ("tp", "prompt_tokens", "batch"))
        times = float(row["prompt_ms"]), float(row["token_ms"])
        if (
            row["model"] != "llama2-70b"
            or row["hardware"] != gpu
            or times[0] < prompts.get((tp, tokens, batch // 2), 0)
        ):
            continue
        prompts[tp, tokens, batch] = times[0]
        guess = whole_step(hardware, tp, tokens, batch)
        print(f"| {tp} | {tokens} | {batch} | {times[0]:.0f} | {guess[0]:.0f} | {times[1]:.1f} | {guess[1]:.1f} |")
        for kind, measured, predicted in zip(("prompt", "token"), times, guess, strict=True):
            off.setdefault((kind, tp), []).append(predicted / measured - 1)
    for (kind, tp), errors in sorted(off.items()):
        absolute, signed = 100 * np.median(np.abs(errors)), 100 * np.median(errors)
        print(f"\n{kind}, tp {tp}: median error {absolute:.0f} %, signed {signed:+.0f} %")


def whole_step(hardware: Hardware, tp: int, tokens: int, batch: int) -> tuple[float, float]:
    """Return the ms of a step with `batch` whole prompts, and of a step that then decodes them."""
    shape = replace(ModelShape.load("llama-3-70b"), vocab_size=32000)
    chain = block_chain(shape.dtype, (shape.dtype,) * shape.num_layers, shape.dtype)
    plan = parallel_plan(chain, kv_pages=2, tp=tp, pp=1, dp=1, devices=tp)
    time = RooflineModel(shape, hardware).of(plan.instances[0])
    prompt = StepLoad(batch * tokens, batch, 0, 0, batch * (tokens**2 + tokens))
    token = StepLoad(batch, batch, batch, batch * tokens, 0)
    return 1e3 * time.seconds(prompt), 1e3 * time.seconds(token)


def print_yaml(curve: Curve, overhead: float, near: Link, far: Link) -> None:
    """Print the fragment for the file of configs/hardware."""
    value = {
        "efficiency": {"bfloat16": dict(curve.knots)},
        "overheads": {"layer": overhead},
        "links": {"nvlink": asdict(near), "rdma": asdict(far)},
    }
    print("\n```yaml\n" + yaml.safe_dump(value, sort_keys=False) + "```")


if __name__ == "__main__":
    main()
