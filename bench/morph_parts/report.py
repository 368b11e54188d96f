"""The report on the results in a folder: report.md, and a plot for each workload."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.morph_parts.plots import draw
from bench.morph_parts.quality import MAX_SCORED_REQUESTS, agreements
from bench.morph_parts.steady import PlanChange, plan_change_table
from bench.morph_parts.summary import (
    LIGHT,
    cells,
    verdict_table,
    verdicts,
    workload_tables,
)
from bench.morph_parts.systems import FULL, Setup
from jaxserve import LLM
from jaxserve.bench.result import Result, load, save

EXCHANGES = "exchanges.json"


def read(folder: Path) -> list[Result]:
    """Return the results of runs in a folder, in the order of their file names."""
    found = [(path, load(path)) for path in sorted(folder.glob("*-[0-9]*.json"))]
    return [result | {"path": path} for path, result in found if result.get("traffic")]


def write(results: Sequence[Result], setup: Setup, folder: Path, *, score: bool) -> str:
    """Write report.md and the plots into the folder, and return the report.

    With `score`, agreement with full precision is measured first.
    """
    if score:
        add_agreement(results, setup)
    found = cells(results)
    parts = [f"# {setup.name}", verdict_table(verdicts(found)), workload_tables(found)]
    if changes := [PlanChange(**row) for row in _rows(folder / EXCHANGES)]:
        parts.append(f"Steps during plan changes, at a steady load:\n\n{plan_change_table(changes)}")
    if identical := _identical(results):
        parts.append(identical)
    if warnings := [
        f"- {r['traffic']} {r['system']} {r['round']}: {w}" for r in results if (w := r["client"]["warning"])
    ]:
        parts.append("\n".join(["The client fell behind:", *warnings]))
    parts.append(_scaling(results))
    text = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    for traffic in found:
        first = [result for result in results if result["traffic"] == traffic and result["round"] == 0]
        if first:
            title = f"{setup.name}, {traffic}: one budget, {len(first)} ways to use it"
            (folder / f"{traffic}.png").write_bytes(draw(first, title))
    return text


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    return load(path)["rows"] if path.is_file() else ()


def add_agreement(results: Sequence[Result], setup: Setup, *, requests: int = MAX_SCORED_REQUESTS) -> None:
    """Add the missing `agreement`, from at most `requests` answers, to results, and save those results again."""
    missing = [result for result in results if "agreement" not in result]
    if not missing:
        return
    with LLM(setup.model, max_model_len=setup.max_model_len + 2, max_num_seqs=8, prefix_caching=False) as llm:
        for result, found in zip(missing, agreements(llm, missing, requests=requests), strict=True):
            result["agreement"] = None if found is None else asdict(found)
            save({key: value for key, value in result.items() if key != "path"}, result["path"])


def _identical(results: Sequence[Result]) -> str:
    """Return a sentence on how many answers under light load are identical to full precision's."""
    light = [result for result in results if result["traffic"] == LIGHT]
    reference = {result["round"]: result["generated_texts"] for result in light if result["system"] == FULL}
    shares: dict[str, list[bool]] = {}
    for result in light:
        if result["round"] in reference:
            pairs = zip(result["generated_texts"], reference[result["round"]], strict=False)
            shares.setdefault(result["label"], []).extend(mine == theirs for mine, theirs in pairs)
    if not shares:
        return ""
    counts = "; ".join(f"{label} {sum(same)} of {len(same)}" for label, same in shares.items())
    return f"Answers under light load that are identical to those of static full precision: {counts}."


def _scaling(results: Sequence[Result]) -> str:
    """Return how each trace was made, from its history."""
    lines = {}
    for result in results:
        steps = [_step(step) for step in result["workload"]["history"]]
        lines[result["traffic"]] = f"- {result['traffic']}: {'; '.join(steps)}"
    return "\n".join(["How the traffic was made:", *lines.values()])


def _step(step: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{key} {_short(value)}" for key, value in step.items() if key != "operation")
    return f"{step['operation']} ({facts})"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
