"""What answers lose by the mixtures that they were generated with."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.morph_parts.systems import mixture
from bench.morph_parts.timeline import Timeline, step_ratios, tokens_by_swapped, transitions
from jaxserve import LLM, SamplingParams
from jaxserve.calibration.sensitivity.profile import FILE_NAME, LIS, SensitivityProfile
from jaxserve.core.precision import BITS

REQUESTS = 640  # scored of each result
SWAP = re.compile(r"layers\.(\d+) \S+ -> (\S+) ")


def profile_of(model: Path) -> SensitivityProfile | None:
    """The profile beside a checkpoint, if there is one: it has the loss on held-out text of every mixture."""
    path = model / FILE_NAME
    return SensitivityProfile.load(path) if path.is_file() else None


def adaptation_figures(result: Mapping[str, Any], profile: SensitivityProfile | None) -> dict[str, Any]:
    """What is added to a result: `adaptation`, and `cross_entropy` and `top1` (None without a profile).

    Both are those of the mixtures on the profile's held-out text (see `measures`), weighted by the tokens generated
    with each.
    """
    timeline, tokens = Timeline.of(result), tokens_by_swapped(result)
    adaptation = {
        "tokens_by_swapped_layers": {str(count): round(number) for count, number in tokens.items()},
        "most_swapped_layers": int(timeline.swapped.max(initial=0)),
        "peak_kv_pages": int(timeline.kv_pages.max(initial=0)),
        "transitions": transitions(result),
        "gap_during_swaps_over_before": [round(ratio, 3) for ratio in step_ratios(result)],
        "swapped_in_profile_order": None,
    }
    quality = {"cross_entropy": None, "cross_entropy_full": None, "top1": None}
    if profile is not None:
        mixed = mixture(result["system"], profile.num_layers)
        swaps = dict(zip(profile.order(mixed[0]), mixed, strict=False))
        adaptation["swapped_in_profile_order"] = in_order(result.get("decisions") or (), swaps)
        entropies = measures(profile, mixed, "cross_entropy")
        quality = {
            "cross_entropy": weighted(entropies, tokens),
            "cross_entropy_full": float(entropies[0]),
            "top1": weighted(measures(profile, mixed, "top1"), tokens),
        }
    return {"adaptation": adaptation, **quality}


def measures(profile: SensitivityProfile, mixed: Sequence[str], measure: str) -> np.ndarray:
    """A measure of the profile's curves with 0, 1, ... layers swapped, in its order, to the precisions of `mixed`.

    Each layer adds what the curve of its precision says of a layer at its place. With one precision that is the curve;
    with two it takes what layers lose for independent of each other, and both orders for the same.
    """
    values = {}
    for precision in dict.fromkeys(mixed):
        curve = profile.curves[precision][LIS][0]
        values[precision] = np.interp(np.arange(len(mixed) + 1), curve.swapped, getattr(curve, measure))
    steps = (values[precision][place + 1] - values[precision][place] for place, precision in enumerate(mixed))
    return np.cumsum([values[mixed[0]][0], *steps])


def weighted(values: np.ndarray, tokens: Mapping[int, float]) -> float | None:
    """The mean over tokens of a measure by the number of layers swapped; None without any token."""
    counts = list(tokens)
    return float(np.average(values[counts], weights=[tokens[count] for count in counts])) if counts else None


def in_order(decisions: Sequence[Mapping[str, Any]], swaps: Mapping[int, str]) -> bool:
    """Whether after every decision the layers swapped were the first ones of `swaps`, which has the order and to what:
    their number then says which mixture it was.

    Decisions that failed may have left a part undone: then nothing is known, and it is False.
    """
    swapped: dict[int, str] = {}
    for decision in decisions:
        if decision["outcome"] not in ("done", "started"):
            return False
        for line in decision["transitions"]:
            if found := SWAP.search(line):
                swapped.pop(int(found[1]), None)
                if found[2] in BITS:
                    swapped[int(found[1])] = found[2]
        if swapped != dict(islice(swaps.items(), len(swapped))):
            return False
    return True


@dataclass(frozen=True)
class Agreement:
    """Of greedy answers, teacher-forced through the model in full precision."""

    share: float  # of the tokens that are its first choice
    tokens: int
    skipped: int  # answers whose text does not encode to as many tokens as were generated


def agreements(llm: LLM, results: Sequence[Mapping[str, Any]], *, requests: int = REQUESTS) -> list[Agreement | None]:
    """One for each result, of `requests` of its answers at most, drawn at random; None without any to score.

    A result has texts and no token ids: they are encoded again, and answers that do not come out at as many tokens as
    the server counted are left out. What is said of full precision's own answers is the ceiling: steps of other shapes
    round differently, and near ties then fall otherwise.
    """
    return [_agreement(llm, result, requests) for result in results]


def _agreement(llm: LLM, result: Mapping[str, Any], requests: int) -> Agreement | None:
    tokenizer = llm.tokenizer
    done = [i for i, error in enumerate(result["errors"]) if not error]
    drawn = np.random.default_rng(0).permutation(done)[:requests].tolist()
    pairs, skipped = [], 0
    for index in drawn:
        answer = tokenizer.encode(result["generated_texts"][index], add_special_tokens=False)
        if len(answer) == result["output_lens"][index]:
            pairs.append((result["prompts"][index], answer))
        else:
            skipped += 1
    if not pairs:
        return None
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([[*prompt, *answer] for prompt, answer in pairs], params, use_tqdm=False)
    first = 0
    for (prompt, answer), output in zip(pairs, outputs, strict=True):
        steps = output.prompt_logprobs[len(prompt) :]
        first += sum(step[token].rank == 1 for token, step in zip(answer, steps, strict=True))
    total = sum(len(answer) for _, answer in pairs)
    return Agreement(first / total, total, skipped)
