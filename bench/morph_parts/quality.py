"""The quality of answers: cross-entropy of the precisions they were generated with, and agreement with full precision.

An assignment is the precision of every layer. Layers are swapped in a fixed order, so the number of swapped layers
identifies the assignment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.morph_parts.systems import swap_precisions
from bench.morph_parts.timeline import Timeline, step_ratios, tokens_by_swapped, transitions
from jaxserve import LLM, SamplingParams
from jaxserve.calibration.sensitivity.profile import FILE_NAME, LIS, SensitivityProfile
from jaxserve.core.precision import BITS

MAX_SCORED_REQUESTS = 640  # of each result
SWAP = re.compile(r"layers\.(\d+) \S+ -> (\S+) ")


def profile_of(model: Path) -> SensitivityProfile | None:
    """Return the sensitivity profile next to a checkpoint, or None if there is none in which orders were compared.

    It holds the loss on held-out text of every assignment.
    """
    path = model / FILE_NAME
    profile = SensitivityProfile.load(path) if path.is_file() else None
    return profile if profile is not None and profile.curves else None


def adaptation_figures(result: Mapping[str, Any], profile: SensitivityProfile | None) -> dict[str, Any]:
    """Return the additions to a result: `adaptation`, `cross_entropy`, `cross_entropy_full` and `top1`.

    The last three are None without a profile. They are figures of the assignments on the profile's held-out text (see
    `measures`), weighted by the tokens generated with each.
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
        precisions = swap_precisions(result["system"], profile.num_layers)
        swaps = dict(zip(profile.order(precisions[0]), precisions, strict=False))
        adaptation["swapped_in_profile_order"] = in_order(result.get("decisions") or (), swaps)
        entropies = measures(profile, precisions, "cross_entropy")
        quality = {
            "cross_entropy": weighted(entropies, tokens),
            "cross_entropy_full": float(entropies[0]),
            "top1": weighted(measures(profile, precisions, "top1"), tokens),
        }
    return {"adaptation": adaptation, **quality}


def measures(profile: SensitivityProfile, precisions: Sequence[str], measure: str) -> np.ndarray:
    """Return a measure of the profile's curves with 0, 1, ... layers swapped, in its order, to these precisions.

    Each layer adds what the curve of its precision says about a layer at its place. With one precision this is the
    curve. With two it assumes that losses of layers are independent, and that both precisions have one order.
    """
    values = {}
    for precision in dict.fromkeys(precisions):
        curve = profile.curves[precision][LIS][0]
        values[precision] = np.interp(np.arange(len(precisions) + 1), curve.swapped, getattr(curve, measure))
    steps = (values[precision][place + 1] - values[precision][place] for place, precision in enumerate(precisions))
    return np.cumsum([values[precisions[0]][0], *steps])


def weighted(values: np.ndarray, tokens: Mapping[int, float]) -> float | None:
    """Return the mean over tokens of a measure by the number of swapped layers, or None without tokens."""
    counts = list(tokens)
    return float(np.average(values[counts], weights=[tokens[count] for count in counts])) if counts else None


def in_order(decisions: Sequence[Mapping[str, Any]], swaps: Mapping[int, str]) -> bool:
    """Return whether the swapped layers were the first ones of `swaps` (layer: precision) after every decision.

    The number of swapped layers then identifies the assignment. After a decision that failed the state is unknown, and
    the answer is False.
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
    """The agreement of greedy answers with full precision, which is given the answers token by token."""

    share: float  # of the tokens that full precision would have chosen too
    tokens: int
    skipped: int  # answers whose text encodes to another number of tokens than was generated


def agreements(
    llm: LLM, results: Sequence[Mapping[str, Any]], *, requests: int = MAX_SCORED_REQUESTS
) -> list[Agreement | None]:
    """Return the agreement of each result, from at most `requests` of its answers drawn at random.

    None if a result has no answers to score. A result holds texts and no token ids, so texts are encoded again, and
    answers that do not give as many tokens as the server counted are skipped. The agreement of full precision's own
    answers is the ceiling: steps of other shapes round differently, and near ties then have another outcome.
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
