"""What a grammar costs: decode steps with and without one, in one run, and the first use of a schema.

    python -m bench.structured [--models bundled,160m] [--batches 1,8,32] [--rounds N] [--out FILE]

All answers of a batch follow the same schema, an array of objects that is longer than the answers, so that all steps
have the same rows. Rounds with and without it take turns; the table has medians. Needs an otherwise idle machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.peers.checkpoints import ensure_checkpoint
from jaxserve import LLM, SamplingParams, StructuredOutput
from jaxserve.bench.environment import describe_environment
from jaxserve.core.bundled import bundled_model_path

TOKENS = 128  # of an answer
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "editor", "reader"]},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "active"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
FREE = SamplingParams(temperature=1.0, seed=0, max_tokens=TOKENS, ignore_eos=True)


def model_path(name: str) -> Path:
    """Return the folder of a model, made if it is missing."""
    cache = Path.home() / ".cache" / "jaxserve" / "bench"
    return bundled_model_path() if name == "bundled" else ensure_checkpoint(name, cache)


def seconds_per_step(llm: LLM, batch: int, params: SamplingParams) -> float:
    """Return the mean time (s) of a decode step with `batch` rows."""
    prompts = [[5 + number, 6, 7, 8] for number in range(batch)]
    outputs = llm.generate(prompts, [replace(params, seed=number) for number in range(batch)], use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
    first = max(output.metrics.first_token for output in outputs)
    last = min(output.metrics.last_token for output in outputs)
    return (last - first) / (TOKENS - 1)


def measured(name: str, batches: Sequence[int], rounds: int) -> list[str]:
    """Return the lines of a model's table."""
    lines = []
    with LLM(model_path(name), max_num_seqs=max(batches), max_model_len=256, memory_gb=4) as llm:
        llm.generate([[5, 6, 7]], FREE, use_tqdm=False)
        began = time.perf_counter()
        fresh = StructuredOutput(json={**SCHEMA, "description": "never seen"})
        llm.generate([[5, 6, 7]], replace(FREE, max_tokens=1, structured=fresh), use_tqdm=False)
        first = time.perf_counter() - began
        began = time.perf_counter()
        llm.generate([[5, 6, 7]], replace(FREE, max_tokens=1), use_tqdm=False)
        compiled = first - (time.perf_counter() - began)
        for batch in batches:
            free, bound = [], []
            for _ in range(rounds):
                free.append(seconds_per_step(llm, batch, FREE))
                bound.append(seconds_per_step(llm, batch, replace(FREE, structured=StructuredOutput(json=SCHEMA))))
            a, b = statistics.median(free), statistics.median(bound)
            low, high = np.percentile(np.array(bound) / np.array(free) - 1, (25, 75))
            lines.append(
                f"| {name} | {batch} | {a * 1e3:.3f} | {b * 1e3:.3f} | {b / a - 1:+.1%} ({low:+.1%} to {high:+.1%}) "
                f"| {compiled * 1e3:.1f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bundled,160m")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| model | batch | step, ms | with a grammar, ms | longer (quartiles) | first use of a schema, ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in options.models.split(","):
        lines += measured(name, [int(batch) for batch in options.batches.split(",")], options.rounds)
    lines += ["", json.dumps(describe_environment())]
    if options.out is None:
        print("\n".join(lines))
    else:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
