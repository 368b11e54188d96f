"""What answers lose by the mixtures that they were generated with."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.morph_parts.systems import PRECISIONS
from bench.morph_parts.timeline import Timeline, step_ratios, tokens_by_swapped, transitions
from jaxserve.quantization.sensitivity.profile import FILE_NAME, LIS, Curve, SensitivityProfile

SWAP = re.compile(r"layers\.(\d+) \S+ -> (\S+) ")


def profile_of(model: Path) -> SensitivityProfile | None:
    """The profile beside a checkpoint, if there is one: it has the loss on held-out text of every mixture."""
    path = model / FILE_NAME
    return SensitivityProfile.load(path) if path.is_file() else None


def describe(result: Mapping[str, Any], profile: SensitivityProfile | None) -> dict[str, Any]:
    """What is added to a result: `adaptation`, and `cross_entropy` and `top1` (None without a profile).

    Both are those of the mixtures on the profile's held-out text, weighted by the tokens generated with each.
    """
    precision = PRECISIONS[result["system"]]
    timeline = Timeline.of(result, precision)
    tokens = tokens_by_swapped(result, precision)
    adaptation = {
        "tokens_by_swapped_layers": {str(count): round(number) for count, number in tokens.items()},
        "most_swapped_layers": int(timeline.swapped.max(initial=0)),
        "peak_kv_pages": int(timeline.kv_pages.max(initial=0)),
        "transitions": transitions(result),
        "gap_during_swaps_over_before": [round(ratio, 3) for ratio in step_ratios(result, precision)],
        "swapped_in_profile_order": None,
    }
    quality = {"cross_entropy": None, "cross_entropy_full": None, "top1": None}
    if profile is not None:
        curve, order = curve_of(profile, precision), profile.order(precision)
        adaptation["swapped_in_profile_order"] = in_order(result.get("decisions") or (), order, precision)
        quality = {
            "cross_entropy": weighted(curve, curve.cross_entropy, tokens),
            "cross_entropy_full": curve.cross_entropy[0],
            "top1": weighted(curve, curve.top1, tokens),
        }
    return {"adaptation": adaptation, **quality}


def curve_of(profile: SensitivityProfile, precision: str) -> Curve:
    """Quality by the number of layers swapped to a precision in the profile's order."""
    return profile.curves[precision][LIS][0]


def weighted(curve: Curve, values: Sequence[float], tokens: Mapping[int, float]) -> float | None:
    """The mean of a measure over tokens; None without any. Between points of the curve it is interpolated."""
    counts = list(tokens)
    if not counts:
        return None
    return float(np.average(np.interp(counts, curve.swapped, values), weights=[tokens[count] for count in counts]))


def in_order(decisions: Sequence[Mapping[str, Any]], order: Sequence[int], precision: str) -> bool:
    """Whether after every decision the layers swapped were the first ones of the order: their number then says which.

    Decisions that failed may have left a part undone: then nothing is known, and it is False.
    """
    swapped: set[int] = set()
    for decision in decisions:
        if decision["outcome"] not in ("done", "started"):
            return False
        for line in decision["transitions"]:
            if found := SWAP.search(line):
                layer, after = int(found[1]), found[2]
                swapped = swapped | {layer} if after == precision else swapped - {layer}
        if swapped != set(order[: len(swapped)]):
            return False
    return True
