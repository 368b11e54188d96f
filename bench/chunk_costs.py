"""Fits the cost of chunks that forms microbatches, and prints its error: `python -m bench.chunk_costs [MODEL]`.

An engine of one device records its steps: one chunk after prefixes of several lengths, which come from the prefix
cache; several chunks at once; and chunks beside sequences that decode. a, b and g of `scheduler.chunk_cost` are fitted
to four fifths of the cases, and the error is that of the others. A case is what a step computes, and its time that of
its fastest step, since other programs only make steps longer. Beside it are the errors of costs that count tokens
alone. Which tokens a step computes depends on the kernels (`COUNTS`): the count that fits the fitted cases best is
used. With `--log`, the steps of a step log (`--step-log`) of any engine of one device are fitted instead.
"""

import argparse
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxserve import EngineConfig, SamplingParams
from jaxserve.bench.environment import describe_environment
from jaxserve.build import build_engine
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.step_log import Step, read_log
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.scheduler.chunk_cost import ChunkCost

HELD_OUT = 5  # every fifth case
LEAST = 3  # steps of a case; the time of one that was seen less often may be another program's
FLOOR = 3  # first token that prompts may have
ALONE = "decodes alone"
Case = tuple[str, int, float]  # kind of the step, pairs of tokens that attention multiplies, tokens
Cost = Callable[[float, float], float]


def _padding(step: Step, tile: int) -> int:
    return step.tiles * tile - step.prompt_tokens


# The tokens of a step that are computed, by what of its padding the kernels leave out.
COUNTS: Mapping[str, Callable[[Step, int], float]] = {
    "all padding of the step's shape is computed": lambda step, tile: step.tokens,
    "the padding of tiles is computed": lambda step, tile: step.tiles * tile + step.sequences,
    # Native CPU kernels leave out what no prompt follows. Chunks of a step have about the same padding here.
    "the padding of tiles between two prompts is computed": lambda step, tile: (
        step.tiles * tile - _padding(step, tile) / max(1, step.chunks) + step.sequences
    ),
}


def record(config: EngineConfig, budget: int, repeats: int) -> Path:
    """Run the load on an engine, and return its step log."""
    log = Path(tempfile.mkdtemp(prefix="jaxserve-")) / "steps.jsonl"
    # Without overlap each step has the device for itself, and is not fetched late because the host has other work.
    engine = build_engine(replace(config, step_log=log, overlap=False))
    try:
        load = Load(engine, budget, config.page_size)
        for _ in range(repeats):
            load.run()
    finally:
        engine.close()
    return log


class Load:
    """Requests that make an engine take steps of every kind."""

    def __init__(self, engine: SyncEngine, budget: int, page: int):
        """`budget`: prompt tokens of a step. The longest prefix is as long as the model allows."""
        self._engine, self._budget = engine, budget
        room = engine.info.max_model_len - budget - 2
        self._prefixes = [int(share * room) // page * page for share in (0.0, 0.25, 0.5, 1.0)]
        self._lengths = sorted({max(1, budget * part // 16) for part in (1, 2, 3, 4, 6, 8, 12, 16)})
        self._random = random.Random(0)
        self._shared = self._tokens(max(self._prefixes))

    def run(self) -> None:
        """Compute every case once, in random order."""
        cases = [(prefix, length) for prefix in self._prefixes for length in self._lengths]
        counted = [(prefix, length, 2 + number % 4) for number, (prefix, length) in enumerate(cases)]
        self._random.shuffle(counted)
        self._serve([([*self._shared, FLOOR], 1)])  # in the prefix cache from now on
        for prefix, length, count in counted:
            self._serve([(self._shared[:prefix] + self._tokens(length), 1)])
            each = max(1, length // count)
            self._serve([(self._shared[:prefix] + self._tokens(each), 1) for _ in range(count)])
        for running in (1, 4, 12):
            answer = 2 * len(self._lengths)
            self._serve([(self._tokens(40), answer)] * running, arriving=self._lengths)

    def _serve(self, requests: Sequence[tuple[list[int], int]], arriving: Sequence[int] = ()) -> None:
        """Answer requests, each of (prompt, tokens of the answer). A prompt arrives after every second step."""
        for prompt, answer in requests:
            self._add(prompt, answer)
        waiting = list(arriving)
        while not self._engine.idle:
            for _ in range(2):
                self._engine.step()
            if waiting:
                self._add(self._tokens(waiting.pop()), 1)

    def _add(self, prompt: list[int], answer: int) -> None:
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        self._engine.add(TokensPrompt(tuple(prompt)), params)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(FLOOR, self._engine.info.vocab_size) for _ in range(count)]


def cases_of(steps: Sequence[Step], count: Callable[[Step], float]) -> dict[Case, float]:
    """Return the least seconds of each case, from the end of the step before or from the begin. `count`: its tokens."""
    seconds: dict[Case, list[float]] = defaultdict(list)
    for before, step in zip((None, *steps), steps, strict=False):
        start = step.begun if before is None else max(before.ended, step.begun)
        attended = step.prefill + step.context + step.sequences
        seconds[kind(step), attended, count(step)].append(step.ended - start)
    return {case: min(times) for case, times in seconds.items() if len(times) >= LEAST}


def kind(step: Step) -> str:
    """Return what a step computes, in words."""
    if step.chunks == 0:
        return ALONE
    if step.sequences:
        return "chunks and decodes"
    return "one chunk" if step.chunks == 1 else "several chunks"


def fits(cases: Mapping[Case, float]) -> Iterator[tuple[str, Cost, str]]:
    """Yield the costs that are fitted to cases: a name, the cost, and its coefficients in words."""
    attended, tokens = (np.array([case[index] for case in cases], float) for index in (1, 2))
    seconds = np.array(list(cases.values()))
    cost = ChunkCost.fit_steps(attended, tokens, seconds)
    words = f"--microbatch-cost {cost.a:.4g},{cost.b:.4g},{cost.g:.4g}"
    yield "a, b and g", lambda q, c: cost.a * q + cost.b * c + cost.g, words
    columns = np.stack([tokens, np.ones_like(tokens)], axis=1) / seconds[:, None]
    b, g = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
    yield "tokens and g", lambda q, c: b * c + g, f"b {b:.3g}, g {g:.3g} s"
    share = tokens / seconds
    each = float(share.sum() / (share @ share))
    yield "tokens alone", lambda q, c: each * c, f"b {each:.3g} s"


def best_count(steps: Sequence[Step], tile: int, *, decodes: bool) -> tuple[str, dict[Case, float]]:
    """Return the count of tokens with the smallest error on the cases that are fitted, and all cases with it."""
    by_count = {
        name: {
            case: seconds
            for case, seconds in cases_of(steps, partial(count, tile=tile)).items()
            if decodes or case[0] != ALONE
        }
        for name, count in COUNTS.items()
    }
    return min(by_count.items(), key=lambda item: error_of_fit(item[1]))


def divided(cases: Mapping[Case, float]) -> tuple[dict[Case, float], dict[Case, float]]:
    """Return the cases that are fitted, and those that are held out."""
    ordered = sorted(cases.items())
    return (
        {case: seconds for index, (case, seconds) in enumerate(ordered) if index % HELD_OUT},
        {case: seconds for index, (case, seconds) in enumerate(ordered) if index % HELD_OUT == 0},
    )


def error_of_fit(cases: Mapping[Case, float]) -> float:
    """Return the mean relative error of a, b and g on the cases that they are fitted to."""
    fitted, _ = divided(cases)
    _, cost, _ = next(fits(fitted))
    errors = [abs(cost(attended, tokens) / seconds - 1) for (_, attended, tokens), seconds in fitted.items()]
    return float(np.mean(errors))


def report(cases: Mapping[Case, float]) -> list[str]:
    """Return lines with the fitted costs, and their mean relative errors by the kind of a step."""
    fitted, held_out = divided(cases)
    lines = [f"{len(fitted)} cases fitted, {len(held_out)} held out; mean relative error (90th percentile)"]
    for name, cost, words in fits(fitted):
        errors: dict[str, list[float]] = defaultdict(list)
        for (what, attended, tokens), seconds in held_out.items():
            errors[what].append(abs(cost(attended, tokens) / seconds - 1))
        together = [error for each in errors.values() for error in each]
        lines.append(f"{name}: {words}")
        lines += [
            f"    {what:<20} {np.mean(each):6.1%} ({np.quantile(each, 0.9):.1%}) of {len(each)}"
            for what, each in {**errors, "together": together}.items()
        ]
    return lines


def main() -> None:
    """Print the fit of a model's steps, or of a step log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="default: the bundled model")
    parser.add_argument("--log", type=Path, help="a step log to fit instead")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", choices=["auto", "safetensors", "dummy"])
    parser.add_argument("--memory-gb", type=float)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--budget", type=int, default=512, help="prompt tokens of a step")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each case")
    parser.add_argument("--decodes", action="store_true", help="also fit steps that only decode")
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        load_format=options.load_format,
        memory_gb=options.memory_gb,
        max_model_len=options.max_model_len,
        max_num_seqs=16,
        max_num_batched_tokens=16 + options.budget,
        skip_tokenizer_init=True,
    )
    log = options.log or record(config, options.budget, options.repeats)
    recorded = read_log(log)
    name, cases = best_count(recorded.steps, recorded.facts["buckets"]["tile"], decodes=options.decodes)
    here = describe_environment()
    print(", ".join(str(here[key]) for key in ("cpu", "gpus", "cores", "packages") if key in here))
    print(f"{name}:")
    print("\n".join(report(cases)))


if __name__ == "__main__":
    main()
