"""Made-up results of the adaptation measurement."""

from bench.morph_parts.quality import adaptation_figures, profile_of
from bench.morph_parts.summary import LIGHT, SATURATION
from bench.morph_parts.systems import ACCURACY, FULL, INT4, INT8, LABELS, NAMES
from jaxserve.core.bundled import bundled_model_path

FULL_LAYERS, INT4_LAYERS, INT8_LAYERS = (
    f'layers_by_precision{{precision="{name}"}}' for name in ("bfloat16", "int4", "int8")
)
SWAPS = 'transitions_total{kind="SwapPrecision",outcome="done"}'


def made_result(**changes):
    """Return a result of two requests with four tokens each.

    Layers are swapped between seconds 1 and 2, and restored between seconds 3 and 3.5.
    """
    result = {
        "label": "a system",
        "system": ACCURACY,
        "traffic": "burst",
        "round": 0,
        "slo": {"ttft": 2000.0},
        "num_prompts": 2,
        "arrival_times": [0.0, 2.0],
        "start_times": [0.0, 2.0],
        "ttfts": [0.5, 0.5],
        "itls": [[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]],
        "latencies": [0.8, 0.8],
        "output_lens": [4, 4],
        "errors": ["", ""],
        "restored_after_s": 0.7,
        "decisions": [],
        "server": {
            "t": [0.0, 1.0, 2.0, 3.0, 3.5],
            FULL_LAYERS: [8.0, 8.0, 6.0, 6.0, 8.0],
            INT4_LAYERS: [None, None, 2.0, 2.0, 0.0],
            "kv_pages_total": [10, 10, 20, 20, 10],
            "kv_pages_used": [0, 9, 19, 5, 0],
            "num_requests_waiting": [0, 5, 2, 0, 0],
            SWAPS: [None, None, 2.0, 2.0, 4.0],
        },
    }
    return result | changes


def in_int8(result):
    """Return the result with layers in int8 instead of int4."""
    return result | {
        "server": {key.replace(INT4_LAYERS, INT8_LAYERS): series for key, series in result["server"].items()}
    }


def decision(*lines, outcome="done"):
    return {"outcome": outcome, "transitions": list(lines)}


def swap(layer, after):
    return f"instance 0: layers.{layer} bfloat16 -> {after} (frees 0.9 MB, about 1 ms)"


def made_results():
    """Return results of all systems under all traffic; full precision is slow in the burst, nothing else is slow."""
    profile = profile_of(bundled_model_path())
    results = []
    for traffic in (SATURATION, LIGHT, "burst"):
        for name in NAMES:
            slow = traffic == "burst" and name == FULL
            result = made_result(system=name, label=LABELS[name], traffic=traffic, ttfts=[8.0 if slow else 0.5] * 2)
            if name in (FULL, INT4) or traffic == LIGHT:
                still = {INT4_LAYERS: [8.0 if name == INT4 else 0.0] * 5, "kv_pages_total": [12] * 5}
                result["server"] = {key: value for key, value in result["server"].items() if key != SWAPS} | still
            result = in_int8(result) if name == INT8 else result
            results.append(result | adaptation_figures(result, profile))
    return results
