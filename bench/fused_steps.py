"""Decode steps in the block tier and in the fused tier: `python -m bench.fused_steps [MODEL ...] [--precision P]`.

Each model (by default the bundled one) is loaded twice, with and without the fused tier, and both generate in turn. A
step's time is the additional time of 128 more tokens, divided by 128. The table shows medians of `--repeats`.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.bench.environment import describe_environment
from jaxserve.core.bundled import bundled_model_path

PROMPT = 64  # tokens
FEW, MANY = 4, 132  # tokens of an answer


def step_ms(llm: LLM, batch: int) -> float:
    """Return the milliseconds of a step that decodes `batch` sequences."""

    def seconds(tokens: int) -> float:
        prompts = [{"prompt_token_ids": list(range(10 + i, 10 + i + PROMPT))} for i in range(batch)]
        params = [SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)] * batch
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    few = seconds(FEW)
    return 1e3 * (seconds(MANY) - few) / (MANY - FEW)


def compare(
    model: Path, precision: str, batches: Sequence[int], repeats: int, **options: Any
) -> list[dict[str, float]]:
    """Return ms per step for each batch size, in the block tier (`blocks`) and in the fused tier (`fused`).

    `options` are passed to `LLM`.
    """
    llm = partial(
        LLM, model, precision=precision, max_model_len=PROMPT + MANY, max_num_seqs=max(batches), memory_gb=4, **options
    )
    found = []
    with llm(fuse=False) as blocks, llm() as fused:
        for batch in batches:
            times = [(step_ms(blocks, batch), step_ms(fused, batch)) for _ in range(repeats)]
            blocks_ms, fused_ms = (statistics.median(each) for each in zip(*times, strict=True))
            found.append({"batch": batch, "blocks": blocks_ms, "fused": fused_ms})
    return found


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--precision", default="auto", help="of the layers; default: the checkpoint's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for model in args.models or [bundled_model_path()]:
        print(f"{model.name}, precision {args.precision}: ms per decode step")
        for row in compare(model, args.precision, args.batches, args.repeats):
            print(
                f"  batch {row['batch']:<3} block by block {row['blocks']:6.2f}   fused {row['fused']:6.2f}", flush=True
            )
    for key, value in describe_environment().items():
        print(f"- {key}: {value}")


if __name__ == "__main__":
    main()
