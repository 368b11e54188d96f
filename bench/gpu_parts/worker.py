"""The process of one part: `python -m bench.gpu_parts.worker PART ...` writes its messages as lines of JSON.

It writes {"row": {...}} for each row as soon as it is measured, and at the end {"end": "ok" | "skipped" | "failed",
"why": ...}. Messages go to the original standard output. Anything that a library prints there goes to standard error.
"""

import argparse
import importlib.util
import json
import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.gpu_parts import Row
from bench.gpu_parts.sizes import REAL, TINY, Model, Sizes
from bench.peers.checkpoints import ensure_checkpoint, ensure_configuration

NEEDS = {
    "ceilings": ("jax",),
    "kernels": ("jax",),
    "engine": ("jax",),
    "transitions": ("jax",),
    "samplers": ("jax",),
    "products": ("jax",),
    "steps": ("jax",),
    "bursts": ("jax",),
    "threads": ("jax",),
    "peer": ("torch", "transformers"),
}


def main() -> None:
    """Measure the part and exit with 0 in any case, because the last message holds the status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", help="ceilings, kernels, checkpoint, samplers, products:PRECISION, or KIND:MODEL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--cache-dir", type=Path, required=True)
    args = parser.parse_args()
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    kind, _, name = args.part.partition(":")
    missing = [package for package in NEEDS.get(kind, ()) if importlib.util.find_spec(package) is None]
    if missing:
        send({"end": "skipped", "why": f"not installed: {', '.join(missing)}"})
        return
    try:
        for row in rows(kind, name, TINY if args.tiny else REAL, args.device, args.cache_dir):
            send({"row": row})
        send({"end": "ok"})
    except Exception as error:
        traceback.print_exc()
        send({"end": "failed", "why": f"{type(error).__name__}: {error}"[:1000]})


def rows(kind: str, name: str, sizes: Sizes, device: str, cache: Path) -> Iterator[Row]:
    """Yield the rows of a part, importing only what it needs."""
    models: dict[str, Model] = {model.name: model for model in sizes.models}
    match kind:
        case "ceilings":
            from bench.gpu_parts import ceilings

            yield from ceilings.rows(sizes)
        case "kernels":
            from bench.gpu_parts import kernels

            yield from kernels.rows(sizes)
        case "checkpoint":
            for model in models.values():
                ensure_model(model, cache)
                yield {"case": "written" if model.written else "config.json", "model": model.name}
        case "engine":
            from bench.gpu_parts import engine

            yield from engine.rows(ensure_model(models[name], cache), models[name], sizes)
        case "transitions":
            from bench.gpu_parts import transitions

            model = shortened(models[name], sizes.changing.num_layers)
            yield from transitions.rows(ensure_model(model, cache), model, sizes)
        case "samplers":
            from bench.gpu_parts import samplers

            yield from samplers.rows(sizes)
        case "products":
            from bench.gpu_parts import products

            yield from products.rows(name, sizes)
        case "steps":
            from bench.gpu_parts import steps

            model = shortened(models[name], sizes.stepping.num_layers)
            yield from steps.rows(ensure_model(model, cache), model, sizes)
        case "bursts":
            from bench.gpu_parts import bursts

            yield from bursts.rows(ensure_model(models[name], cache), models[name], sizes)
        case "threads":
            from bench.gpu_parts import threads

            small = replace(models[name], name="threads", shape=sizes.threading.shape, written=False)
            yield from threads.rows(ensure_model(small, cache), small, sizes)
        case "peer":
            from bench.gpu_parts import peer

            yield from peer.rows(ensure_model(models[name], cache), models[name], sizes, device)
        case _:
            raise ValueError(f"unknown part {kind!r}: choose from ceilings, checkpoint, {', '.join(NEEDS)}")


def shortened(model: Model, num_layers: int) -> Model:
    """Return the model with fewer layers."""
    return replace(model, shape=replace(model.shape, layers=num_layers))


def ensure_model(model: Model, cache: Path) -> Path:
    """Return the folder of a model under `cache`, written if it is missing or was written for other sizes.

    Depending on `model.written` it holds a whole checkpoint, or the configuration and tokenizer alone.
    """
    name = f"{model.name}-{model.shape.hidden}x{model.shape.layers}"
    ensure = ensure_checkpoint if model.written else ensure_configuration
    return ensure(name, cache, model.shape)


if __name__ == "__main__":
    main()
