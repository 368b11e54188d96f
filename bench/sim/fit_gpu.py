"""Hardware files of GPUs from the times of jaxserve's kernels on an H200: `python -m bench.sim.fit_gpu [--write]`.

Without --write, it compares the files of configs/hardware with the results in bench/results, and exits with 1 if a file
differs from what follows from them. With --write, it writes the fitted numbers into the files. It prints measured and
simulated times of the H200 in both cases.

**H200 (fitted).** gpu/h200.json has the products of an 8B layer, attention and whole steps of the executor;
gpu-serving/h200.json has the decode steps of a loaded server.

- Products: between measured rows, and up to the kernels' 256 rows, their time is linear in the rows. Of int8, and of
  some rows in other precisions, only the largest product was measured. The others take `LAUNCH` and the remaining time
  in proportion to their weights.
- `overheads.layer` is the rest of the decode steps at batch 1. What the prefill step takes beyond that is norms and
  activations. It is proportional to the tokens, and part of the products' curve.
- `overheads.step` and `overheads.sequence` are what decode steps of the loaded server take longer. The sampler of that
  day is subtracted (gpu-adaptation/h200.json has its times), and one that draws without masks, as of gpu-changes, is
  added.
- `overheads.loop`, `program`, `array` and `answer` are the host's (`host_overheads`).
- `overheads.transition`: gpu-transitions/h200.json has layers that change one after the other while 16 streams decode.
  A change takes its copy, paced to 8 GB/s, and waits for steps, as in the simulator. The rest is this overhead.
- The kernels and XLA's products have changed since. gpu-adaptation has the products as they were when three systems
  were measured under a burst, which h200.yaml beside it stands for, and gpu-changes as they are now. Expanding weights
  takes as long for any number of rows. XLA's own product of 2,048 rows is taken to have gained what that of 512 has.
- int3 was not measured. XLA computes it as it does all precisions above 256 rows: it writes the weight in bfloat16 and
  multiplies that.

**Other GPUs (derived, not measured).** Their curves of bfloat16 are not changed.

- Where XLA multiplies (everything before Hopper, 3 bits, and more than 256 rows), a product in fewer bits takes the
  time in bfloat16, and that of expanding the weight: reading codes and writing bfloat16, at the share of the bandwidth
  that XLA reached on the H200.
- Up to 256 rows, other Hopper GPUs run the H200's kernels. They take the H200's time in proportion to the number of
  multiprocessors, and what slower memory and slower tensor cores add.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from jaxserve.control.plan import block_chain, parallel_plan
from jaxserve.core.bundled import configs_path
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.cost_model import RooflineModel
from jaxserve.sim.cost_model_fit import robust_fit
from jaxserve.sim.hardware import Curve, Hardware, load_hardware
from jaxserve.sim.host_work import ARRAYS, FUSED_PROGRAMS, OTHER_PROGRAMS, SCALES
from jaxserve.sim.shape import ModelShape

RESULTS = Path(__file__).resolve().parents[1] / "results"
BEFORE = RESULTS / "gpu-adaptation" / "h200.yaml"  # the H200 as it was under the measured burst
SHAPE = ModelShape.load("llama-3-8b")
FULL, FEWER, QUANTISED = "bfloat16", ("int8", "int4"), ("int8", "int4", "int3")
PARTS = ("qkv", "o", "gate_up", "down")
LARGEST = "gate_up"
SAMPLER = 1e-4  # s: a draw without masks from up to 64 rows
STREAMS, STREAM_LAYERS = 16, 16  # of the steps of gpu-transitions
LOOP_SEQUENCES, LOOP_LAYERS = 16, 8  # of the step loop of gpu-changes
LAUNCH = 7e-6  # s: start and end of a product (docs/kernels.md)
MAX_KERNEL_ROWS = 256  # of the kernels for fewer bits; XLA computes more rows
ROWS = 8  # of a decode step at batch 1
CONTEXT = 257  # tokens of that step
PROMPT = 2048  # tokens of the prefill step
PACE = 8e9  # bytes/s of copies while layers changed
MOST_LAYERS = 16  # that changed one after the other
STEPS_WAITED = 1.75  # by a change: until the next boundary, and for the steps dispatched before it
HOPPER = {"h100": 132, "h800": 132, "h20": 78}  # GPUs with the H200's kernels: multiprocessors
H200_PROCESSORS = 132
XLA_ONLY = ("a100-40", "a100-80", "a800", "l4")
MAX_ERROR = 0.014  # of a curve between its knots
MAX_ROWS = 8192  # of a curve
# Numbers of rows at which a curve may have a knot.
CANDIDATES = sorted(
    {MAX_KERNEL_ROWS + 1, *(round(step * 2**power) for power in range(13) for step in (1, 1.5)), MAX_ROWS}
)

Seconds = Callable[[float], float]  # of a decoder layer's products, by rows


# -- what was measured


@dataclass(frozen=True)
class Change:
    """A change of several layers' precision while streams decode."""

    layers: int
    after: str  # precision
    seconds: float
    step_seconds: float  # of the steps meanwhile
    step_before: float  # s: of the steps before it

    @property
    def copy_seconds(self) -> float:
        """The seconds of a layer's copy."""
        return SHAPE.layer_bytes(self.after) / PACE

    @property
    def layer_seconds(self) -> float:
        """The seconds of a layer's change."""
        return self.seconds / self.layers


@dataclass(frozen=True)
class Results:
    """The measured seconds of one GPU."""

    cases: Mapping[str, Mapping[str, Any]]  # rows of `python -m bench.gpu`, by case; of a step, those of the fused tier
    blocks: Mapping[str, float]  # seconds of steps that run block by block, by case
    served: Sequence[Mapping[str, Any]]  # decode steps of a loaded server, with today's sampler
    changes: Sequence["Change"]
    newer: Mapping[str, Mapping[int, float]]  # seconds of the largest product by rows, which replace those of `cases`
    prefill: float  # seconds of the prefill step
    loop: float  # seconds of a step of a small model in a step loop alone

    @classmethod
    def load(cls, folder: Path, name: str, *, before: bool = False) -> "Results":
        """Load the results of GPU `name` from bench/results; with `before`, as of the day before the changes."""
        gpu = json.loads((folder / "gpu" / f"{name}.json").read_text(encoding="utf-8"))
        rows = [row for part in gpu["parts"].values() for row in part["rows"] if row.get("through") != "LLM"]
        served = json.loads((folder / "gpu-serving" / f"{name}.json").read_text(encoding="utf-8"))
        changed = json.loads((folder / "gpu-transitions" / f"{name}.json").read_text(encoding="utf-8"))
        cases = {row["case"]: row for row in rows if row.get("tier") != "block"}
        blocks = {row["case"]: row["seconds"] for row in rows if row.get("tier") == "block"}
        burst = json.loads((folder / "gpu-adaptation" / f"{name}.json").read_text(encoding="utf-8"))
        steps = _with_sampler(served["steps"], burst["steps"]["rows"])
        old = {bits: {int(n): us / 1e6 for n, us in burst["products"][bits].items()} for bits in ("int8", "int4")}
        largest = {FULL: {n: cases[f"8b {LARGEST}, {n} rows"]["seconds"] for n in (512, PROMPT)}, **old}
        prefill = cases[f"prefill step, {PROMPT} tokens"]["seconds"]
        now = json.loads((folder / "gpu-changes" / f"{name}.json").read_text(encoding="utf-8"))
        parts = {part: found for run in now["runs"] for part, found in run["parts"].items()}
        if not before:
            largest, prefill = _now(largest, parts)
        for bits in ("int8", "int4"):
            longer = largest[bits][512] - largest[FULL][512]
            largest[bits] = largest[bits] | {PROMPT: largest[FULL][PROMPT] + longer}
        loop = 1 / parts["threads:1b"]["rows"][0]["total_steps_s"]
        return cls(cases, blocks, steps, list(changes(changed["rows"])), largest, prefill, loop)

    def seconds(self, case: str) -> float:
        """Return the seconds of a case."""
        return float(self.cases[case]["seconds"])

    def decode(self, precision: str) -> float:
        """Return the seconds of a decode step at batch 1 with all layers in a precision."""
        return self.seconds("decode, batch 1" if precision == FULL else f"decode, batch 1, layers in {precision}")

    def products(self, precision: str) -> dict[int, float]:
        """Return the seconds of all products of a layer by rows, from the fewest rows that steps on GPU have."""
        label = "" if precision == FULL else f" in {precision}"
        found = {}
        for case in self.cases:
            if match := re.fullmatch(rf"8b {LARGEST}{label}, (\d+) rows", case):
                rows = int(match[1])
                found[rows] = sum(self._product(part, label, rows) for part in PARTS)
        for rows, seconds in self.newer[precision].items():
            found[rows] = sum(self._share(part, seconds) for part in PARTS)
        return {rows: found[rows] for rows in sorted(found) if rows >= ROWS}

    def _product(self, part: str, label: str, rows: int) -> float:
        case, largest = (f"8b {name}{label}, {rows} rows" for name in (part, LARGEST))
        if case in self.cases:
            return self.seconds(case)
        return self._share(part, self.seconds(largest))

    def _share(self, part: str, seconds: float) -> float:
        """Return the seconds of a product in proportion to its weights, of which the largest one takes `seconds`."""
        return LAUNCH + (seconds - LAUNCH) * self._weights(part) / self._weights(LARGEST)

    def _weights(self, part: str) -> float:
        return float(self.cases[f"8b {part}, 1 rows"]["flops"])

    def attention_shares(self, hardware: Hardware) -> list[float]:
        """Return the shares of the bandwidth that decode attention reached from undivided bfloat16 pools."""
        decodes = [self.cases[case] for case in self.cases if re.fullmatch(r"8b decode, \d+ x \d+", case)]
        return [row["bytes"] / hardware.bandwidth / row["seconds"] for row in decodes if row["bytes"] > 1e8]


def _with_sampler(served: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps of a loaded server as they would be with a sampler that takes no more than `SAMPLER`."""
    traces = [
        row for row in steps if row["case"] == "trace" and row["what"].startswith("decode") and "T 1" in row["what"]
    ]
    took = {int(row["what"].split()[1].rstrip(",")): row["classes_ms"]["sampler"] / 1e3 for row in traces}
    sizes = sorted(took)
    return [
        {
            **row,
            "measured_s": row["median_decode_s"],
            "median_decode_s": row["median_decode_s"]
            - np.interp(row["concurrency"], sizes, [took[n] for n in sizes])
            + SAMPLER,
        }
        for row in served
    ]


def _now(
    largest: Mapping[str, Mapping[int, float]], parts: Mapping[str, Any]
) -> tuple[dict[str, dict[int, float]], float]:
    """Return the seconds of the largest product by precision and rows since the changes, and of the prefill step.

    Calls of up to 32 rows were bound by their dispatch there, so that the earlier times are left.
    """
    found = {name: dict(seconds) for name, seconds in largest.items()}
    for name, label in ((FULL, "bf16"), ("int8", "int8"), ("int4", "int4")):
        rows = {row["rows"]: row["us"] / 1e6 for row in parts[label] if row["case"] == LARGEST and row["rows"] > 32}
        found[name] |= rows
    found[FULL][PROMPT] *= found[FULL][512] / largest[FULL][512]
    prefill = next(row["ms"] for row in parts["steps"] if row["case"] == f"prefill {PROMPT}" and not row["temperature"])
    return found, prefill / 1e3


def changes(rows: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Yield the changes of layers in the results of `bench.gpu_parts.transitions`.

    The memory after each change names the plan, and thereby how many layers had fewer bits before they were restored.
    """
    plans = [row["plan"] for row in rows if row["case"] == "memory"][1:]  # without the start
    layers = 0
    for plan, row in zip(plans, (row for row in rows if row["case"] == "change"), strict=False):
        layers = int(match[1]) if (match := re.match(r"(\d+) layers", plan)) else layers
        if not row["after"].endswith("pages"):
            yield Change(layers, row["after"], row["seconds"], row["step_during_s"], row["step_before_s"])


# -- the H200


def fitted(known: Hardware, results: Results) -> Hardware:
    """Return the hardware with efficiencies and overheads from the results."""
    full = linear(results.products(FULL))
    kernels = {precision: measured_products(precision, known, results) for precision in ("int8", "int4")}
    products = {FULL: full, **kernels, "int3": expanded(full, "int3", known, results)}
    pairs = (PROMPT**2 + PROMPT) * SHAPE.attention_ops()
    attention = {
        "attention": median(results.attention_shares(known)),
        "prefill": pairs / known.rate(FULL) / results.seconds(f"8b prefill, {PROMPT} tokens"),
    }
    shares = {name: Curve(((1, float(f"{share:.3g}")),)) for name, share in attention.items()}
    none = replace(known.overheads, layer=0.0, step=0.0, sequence=0.0)
    bare = replace(known, efficiency=shares | curves(products, known), overheads=none)
    rest = [results.decode(precision) - decode_step(bare, precision) for precision in (FULL, *kernels)]
    layer = mean(rest) / SHAPE.num_layers
    token = (results.prefill - prefill_step(bare)) / SHAPE.num_layers - layer
    whole = {name: _plus(seconds, token / PROMPT) for name, seconds in products.items()}
    device = replace(bare, efficiency=shares | curves(whole, known), overheads=replace(none, layer=_rounded(layer)))
    step, sequence = served_overheads(device, results)
    rest = [measured - waited for measured, waited in change_times(results).values()]
    transition = mean(rest)
    overheads = {"step": step, "sequence": sequence, "transition": transition, **host_overheads(results)}
    rounded = {name: _rounded(value) for name, value in overheads.items()}
    return replace(device, overheads=replace(device.overheads, **rounded), measured=True)


def measured_products(precision: str, hardware: Hardware, results: Results) -> Seconds:
    """Return the seconds of a layer's products in fewer bits, by the kernels and, for more rows, by XLA."""
    measured, first = results.products(precision), MAX_KERNEL_ROWS + 1
    xla = {first: expanded(linear(results.products(FULL)), precision, hardware, results)(first)}
    xla |= {rows: seconds for rows, seconds in measured.items() if rows > MAX_KERNEL_ROWS}
    return _either(linear({rows: measured[rows] for rows in measured if rows <= MAX_KERNEL_ROWS}), linear(xla))


def change_times(results: Results) -> dict[str, tuple[float, float]]:
    """Return the seconds of a layer's change, and those of its copy and of the steps that it waits for, by precision.

    Only changes of `MOST_LAYERS` layers count, in which the time of a decision is a small part.
    """
    found = {}
    for precision in (FULL, "int8", "int4"):
        most = [change for change in results.changes if (change.layers, change.after) == (MOST_LAYERS, precision)]
        waited = STEPS_WAITED * mean(change.step_seconds for change in most)
        found[precision] = (mean(change.layer_seconds for change in most), most[0].copy_seconds + waited)
    return found


def host_overheads(results: Results) -> dict[str, float]:
    """Return the host's seconds for a step, and for each program, array of layers and sequence of it.

    They are fitted to steps that the host bounds: of layers in fewer bits, block by block and fused; of a small model
    in a step loop alone; of 16 streams, block by block; and of a loaded server, whose device was hardly ever idle.
    """
    busiest = max(results.served, key=lambda row: row["concurrency"])
    few, full, half = ARRAYS + SCALES, ARRAYS, STREAM_LAYERS
    equations = [  # loop, programs, arrays, sequences; seconds
        *(
            (0, 32 + OTHER_PROGRAMS, 32 * few, 0, results.blocks[f"decode, batch 1, layers in {name}"])
            for name in FEWER
        ),
        (0, FUSED_PROGRAMS, 32 * few, 0, results.decode("int4")),
        (1, FUSED_PROGRAMS, LOOP_LAYERS * full, LOOP_SEQUENCES, results.loop),
        (
            1,
            half + OTHER_PROGRAMS,
            half * (few + full) / 2,
            STREAMS,
            mean(each.step_before for each in results.changes),
        ),
        (1, FUSED_PROGRAMS, 32 * full, busiest["concurrency"], busiest["measured_s"]),
    ]
    table = np.array(equations)
    relative = table / table[:, -1:]
    found = robust_fit(relative[:, :-1], relative[:, -1], np.zeros((1, 4)))
    return dict(zip(("loop", "program", "array", "answer"), found.tolist(), strict=True))


def served_overheads(device: Hardware, results: Results) -> tuple[float, float]:
    """Return what the steps of a loaded server take longer: seconds for each step, and for each sequence."""
    columns = np.array([(1.0, row["concurrency"]) for row in results.served])
    longer = [row["median_decode_s"] - served_step(device, row) for row in results.served]
    step, sequence = robust_fit(columns, np.maximum(longer, 1e-6), np.zeros((1, 2))).tolist()
    return step, sequence


def decode_step(hardware: Hardware, precision: str) -> float:
    """Return the seconds of a decode step at batch 1 on the device alone."""
    return _device_seconds(hardware, precision, StepLoad(ROWS, ROWS, 1, CONTEXT, 0))


def prefill_step(hardware: Hardware) -> float:
    """Return the seconds of a step with one prompt on the device alone."""
    return _device_seconds(hardware, FULL, StepLoad(PROMPT, ROWS, 0, 0, PROMPT**2 + PROMPT))


def served_step(hardware: Hardware, row: Mapping[str, Any]) -> float:
    """Return the seconds of a decode step of the loaded server."""
    rows, sequences = int(row["decode_rows"]), int(row["concurrency"])
    return step_seconds(hardware, FULL, StepLoad(rows, rows, sequences, round(row["mean_context"]), 0))


def step_seconds(hardware: Hardware, precision: str, load: StepLoad) -> float:
    """Return the seconds of a step of the 8B model with its layers in a precision."""
    chain = block_chain(SHAPE.dtype, (precision,) * SHAPE.num_layers, SHAPE.dtype)
    plan = parallel_plan(chain, kv_pages=2, tp=1, pp=1, dp=1, devices=1)
    return RooflineModel(SHAPE, hardware).of(plan.instances[0]).seconds(load)


def _device_seconds(hardware: Hardware, precision: str, load: StepLoad) -> float:
    alone = replace(hardware.overheads, step=0.0, sequence=0.0)
    return step_seconds(replace(hardware, overheads=alone), precision, load)


# -- GPUs that were not at hand


def derived(known: Hardware, h200: Hardware, results: Results) -> Hardware:
    """Return a GPU with curves of fewer bits that follow from its bfloat16 and from the H200."""
    found = {}
    for precision in QUANTISED:
        xla = expanded(products_of(known, FULL), precision, known, results)
        if known.name in HOPPER and precision != "int3":
            kernel = _kernel(known, h200, precision)
            found[precision] = _either(kernel, xla)
        else:
            found[precision] = xla
    overheads = replace(known.overheads, transition=h200.overheads.transition)
    return replace(known, efficiency={**known.efficiency, **curves(found, known)}, overheads=overheads)


def expanded(full: Seconds, precision: str, hardware: Hardware, results: Results) -> Seconds:
    """Return the seconds of products before which XLA expands a layer's weights to bfloat16."""
    added = expansion_bytes(precision) / (hardware.bandwidth * expansion_share(precision, results))
    return lambda rows: full(rows) + added


def expansion_bytes(precision: str) -> int:
    """Return the bytes that expanding a layer reads and writes. Reading the result is part of the product."""
    return SHAPE.layer_bytes(precision) + SHAPE.layer_bytes(FULL)


def expansion_share(precision: str, results: Results) -> float:
    """Return the share of the H200's bandwidth at which XLA expands codes; int3 is taken to be like int8."""
    measured = "int8" if precision == "int3" else precision
    full, fewer = (results.products(name) for name in (FULL, measured))
    longer = mean(fewer[rows] - full[rows] for rows in fewer if rows > MAX_KERNEL_ROWS)
    return expansion_bytes(measured) / load_hardware("h200").bandwidth / longer


def products_of(hardware: Hardware, precision: str) -> Seconds:
    """Return the seconds of a layer's products by the curve of a hardware."""
    curve = hardware.curve(precision)
    return lambda rows: roofline(hardware, precision, rows) / curve(rows)


def _kernel(known: Hardware, h200: Hardware, precision: str) -> Seconds:
    """Return the seconds of the H200's kernels on another Hopper GPU."""
    processors = H200_PROCESSORS / HOPPER[known.name]
    slower_memory = 1 / known.bandwidth - 1 / h200.bandwidth
    slower_products = 1 / known.rate(FULL) - 1 / h200.rate(FULL)
    there = products_of(h200, precision)

    def seconds(rows: float) -> float:
        added = SHAPE.layer_bytes(precision) * slower_memory + rows * SHAPE.layer_ops() * slower_products
        return there(rows) * processors + added

    return seconds


# -- curves


def roofline(hardware: Hardware, precision: str, rows: float) -> float:
    """Return the seconds of a layer's products at full bandwidth and rate."""
    reading = SHAPE.layer_bytes(precision) / hardware.bandwidth
    return max(reading, rows * SHAPE.layer_ops() / hardware.rate(precision))


def linear(seconds: Mapping[int, float]) -> Seconds:
    """Return a function that is linear between the given rows and beyond the last two, and constant below the first.

    Where fewer rows took longer, which is noise, they take what more rows took.
    """
    rows, times = list(seconds), np.minimum.accumulate(list(seconds.values())[::-1])[::-1]
    slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
    return lambda n: float(np.interp(n, rows, times)) + slope * max(0.0, n - rows[-1])


def curves(products: Mapping[str, Seconds], hardware: Hardware) -> dict[str, Curve]:
    """Return the efficiency of each precision."""
    return {name: curve_of(seconds, hardware, name) for name, seconds in products.items()}


def curve_of(seconds: Seconds, hardware: Hardware, precision: str) -> Curve:
    """Return a curve with as few knots as reproduce `seconds` within `MAX_ERROR`."""
    # The roofline has a kink, so that the share has one too.
    kink = hardware.rate(precision) * SHAPE.layer_bytes(precision) / hardware.bandwidth / SHAPE.layer_ops()
    kept = {1, round(kink), MAX_ROWS}
    shares = {n: roofline(hardware, precision, n) / seconds(n) for n in sorted({*CANDIDATES, *kept})}
    while True:
        curve = Curve(tuple((n, float(f"{shares[n]:.3g}")) for n in sorted(kept)))
        off = {n: abs(curve(n) / share - 1) for n, share in shares.items() if n not in kept}
        if not off or max(off.values()) <= MAX_ERROR:
            return curve
        kept.add(max(off, key=lambda n: off[n]))


def _plus(seconds: Seconds, token: float) -> Seconds:
    return lambda rows: seconds(rows) + token * rows


def _either(kernel: Seconds, xla: Seconds) -> Seconds:
    """Return the seconds of a kernel, and of XLA for more rows. These never take less time."""
    return lambda rows: kernel(rows) if rows <= MAX_KERNEL_ROWS else max(xla(rows), kernel(MAX_KERNEL_ROWS))


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


# -- files


def rewritten(text: str, hardware: Hardware) -> str:
    """Return a hardware file's text with the fitted numbers of `hardware`. Everything else stays as it is."""
    for name, curve in hardware.efficiency.items():
        if len(curve.knots) == 1:
            text = re.sub(rf"(?m)^(  {name}: )[\d.e+-]+", rf"\g<1>{curve.knots[0][1]:g}", text)
        else:
            knots = ", ".join(f"{tokens:g}: {share:g}" for tokens, share in curve.knots)
            line = textwrap.fill(f"  {name}: {{{knots}}}", 118, subsequent_indent="    ", break_on_hyphens=False)
            text = re.sub(rf"(?m)^  {name}: \{{[^}}]*\}}", line, text)
    for name in ("step", "layer", "sequence", "transition", "loop", "program", "array", "answer"):
        text = re.sub(rf"(?m)^(  {name}: )[\d.e+-]+", rf"\g<1>{getattr(hardware.overheads, name):.1e}", text)
    return text


def files(results: Results, before: Results) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each hardware file as it follows from the results."""
    h200 = fitted(load_hardware("h200"), results)
    yield BEFORE, rewritten(BEFORE.read_text(encoding="utf-8"), fitted(load_hardware(BEFORE), before))
    for name in ("h200", *HOPPER, *XLA_ONLY):
        path = configs_path("hardware") / f"{name}.yaml"
        hardware = h200 if name == "h200" else derived(load_hardware(name), h200, results)
        yield path, rewritten(path.read_text(encoding="utf-8"), hardware)


# -- comparison


def comparison(hardware: Hardware, results: Results) -> list[tuple[str, float, float]]:
    """Return (case, measured seconds, simulated seconds). Simulated products contain norms and activations."""
    lines = [
        (f"decode at batch 1, {name}", results.decode(name), decode_step(hardware, name))
        for name in (FULL, "int8", "int4")
    ]
    lines += [(f"prefill of {PROMPT} tokens", results.prefill, prefill_step(hardware))]
    for row in sorted(results.served, key=lambda row: row["concurrency"]):
        lines.append(
            (f"decode on a server, {row['concurrency']} at once", row["median_decode_s"], served_step(hardware, row))
        )
    for name, (measured, waited) in change_times(results).items():
        simulated = waited + hardware.overheads.transition
        lines.append((f"change of a layer to {name}, of {MOST_LAYERS}", measured, simulated))
    for name in (FULL, "int8", "int4"):
        products = products_of(hardware, name)
        for rows, seconds in results.products(name).items():
            lines.append((f"a layer's products, {name}, {rows} rows", seconds, products(rows)))
    return lines


def main() -> None:
    """Print measured and simulated times, and compare or write the files."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.fit_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results; default: bench/results")
    parser.add_argument("--write", action="store_true", help="write the hardware files")
    options = parser.parse_args()
    results = Results.load(options.results, "h200")
    changed = []
    for path, text in files(results, Results.load(options.results, "h200", before=True)):
        if text != path.read_text(encoding="utf-8"):
            changed.append(path)
            if options.write:
                path.write_text(text, encoding="utf-8")
    print("| H200 | measured, ms | simulated, ms | error |\n| --- | ---: | ---: | ---: |")
    for case, measured, simulated in comparison(fitted(load_hardware("h200"), results), results):
        print(f"| {case} | {1e3 * measured:.3f} | {1e3 * simulated:.3f} | {simulated / measured - 1:+.1%} |")
    for path in changed:
        print(f"{path}: {'written' if options.write else 'differs from the results: run with --write'}")
    sys.exit(bool(changed) and not options.write)


if __name__ == "__main__":
    main()
