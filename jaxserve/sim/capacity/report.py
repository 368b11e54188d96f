"""The answer of `jaxserve sim plan` in words, tables and JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.bench.result import SCHEMA_VERSION, plain
from jaxserve.console.tables import print_table
from jaxserve.planning.spec import STATIC
from jaxserve.sim.capacity.evaluate import duration
from jaxserve.sim.capacity.plan import Answer, rejections
from jaxserve.sim.capacity.search import MAX_SPEED, Plan
from jaxserve.sim.capacity.serve_options import start_command, start_words

SHOWN_REJECTIONS = 16


def print_answer(answer: Answer, console: Console, saved: Path | None = None) -> None:
    """Print the plans, the commands of the cheapest one, what was rejected, and what the figures rest on.

    `saved` is the file with the options of the cheapest plan.
    """

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line(f"{answer.shape.name}: {answer.load}")
    line(f"objectives: {', '.join(map(str, answer.objectives))}; requests that do not end or are refused miss them")
    if answer.plans:
        line("")
        print_table(_columns(answer), [_cells(answer, plan) for plan in answer.plans], console)
        _print_best(answer, answer.plans[0], line, saved)
    else:
        line("no plan meets the objectives")
    _print_rejections(answer, line)
    line("")
    for remark in remarks(answer):
        line(remark)


def _columns(answer: Answer) -> list[str]:
    figures = [each.name for each in answer.objectives]
    return [
        "plan",
        "devices",
        "instances",
        "precision",
        "policy",
        answer.cost.heading,
        *figures,
        "holds up to",
        "then limited by",
    ]


def _cells(answer: Answer, plan: Plan) -> list[str]:
    candidate = plan.candidate
    errors = answer.hardware[candidate.hardware].errors
    figures = [
        duration(figure) + (f" ±{errors[each.metric]:.0%}" if each.metric in errors else "")
        for figure, each in zip(plan.evaluation.figures, answer.objectives, strict=True)
    ]
    return [
        candidate.hardware_name,
        str(plan.devices),
        f"{plan.instances} x {degrees(plan)}",
        candidate.precision or answer.shape.dtype,
        candidate.policy,
        answer.cost.text(plan.cost),
        *figures,
        margin(plan),
        plan.limit,
    ]


def degrees(plan: Plan) -> str:
    """Return the degrees of an instance, such as "tp 2"."""
    return f"tp {plan.candidate.tp}" + (f" pp {plan.candidate.pp}" if plan.candidate.pp > 1 else "")


def margin(plan: Plan) -> str:
    """Return up to which multiple of the rate the plan meets the objectives."""
    return f"{'> ' if plan.speed >= MAX_SPEED else ''}{plan.speed:.2f}x"


def _print_best(answer: Answer, plan: Plan, line: Any, saved: Path | None) -> None:
    seen = plan.evaluation
    line("")
    if plan.fewer:
        fewer = plan.devices - plan.candidate.devices
        line(f"with {fewer} device{'s' if fewer > 1 else ''} instead of {plan.devices}: {plan.fewer}")
    if seen.idle_policy:
        line(seen.idle_policy)
    elif plan.candidate.policy == STATIC and len(answer.candidates.policies) > 1:
        others = ", ".join(policy for policy in answer.candidates.policies if policy != STATIC)
        line(f"static is enough: no plan with {others} takes fewer devices of {plan.candidate.hardware_name}")
    if seen.missed:
        line(f"{seen.missed:,} of {seen.requests:,} requests miss the objectives: they are refused, or do not end")
    line(f"it meets the objectives up to {margin(plan)} of the rate, then it is limited by {plan.limit}")
    line(f"simulate it: {shlex.join(answer.command(plan))}")
    line(f"start it: {start_words(answer, plan)}{shlex.join(start_command(answer, plan, saved))}")
    if saved is not None:
        line(f"saved {saved}")


def _print_rejections(answer: Answer, line: Any) -> None:
    found = rejections(answer)
    if not found:
        return
    line("")
    line("rejected:")
    for each in found[:SHOWN_REJECTIONS]:
        line(f"  {each.what}: {each.reason}")
    if len(found) > SHOWN_REJECTIONS:
        line(f"  and {len(found) - SHOWN_REJECTIONS} more (--json has all)")


def remarks(answer: Answer) -> list[str]:
    """Return what the figures rest on."""
    found = [f"simulated: predicted by {answer.found.simulations} simulations, not measured"]
    guessed = [each.name for each in answer.hardware.values() if not each.measured]
    if guessed:
        found.append(
            f"{', '.join(guessed)}: from data sheets and published measurements, not measured with jaxserve; "
            "--calibrate fits the hardware to a run of your own"
        )
    for each in answer.hardware.values():
        if each.errors:
            errors = ", ".join(f"{metric.upper()} {error:.0%}" for metric, error in each.errors.items())
            found.append(
                f"{each.name}: ± is the median error of single requests in the run that it was checked with ({errors})"
            )
    if not answer.cost.priced:
        found.append(
            "no prices are given: plans are in the order of the memory bandwidth of their devices (TB/s), which rents "
            "follow roughly; give --price NAME=PRICE for an order by cost"
        )
    return found


def as_json(answer: Answer, command: Sequence[str]) -> dict[str, Any]:
    """Return the whole answer in JSON's types."""
    found: dict[str, Any] = plain(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "plan",
            "simulated": True,
            "command": shlex.join(command),
            "model_id": answer.shape.name,
            "load": str(answer.load),
            "workload": answer.workload.description,
            "objectives": [asdict(each) for each in answer.objectives],
            "cost": answer.cost.heading,
            "plans": [_plan_json(answer, plan) for plan in answer.found.plans],
            "rejected": [asdict(each) for each in rejections(answer)],
            "remarks": remarks(answer),
        }
    )
    return found


def _plan_json(answer: Answer, plan: Plan) -> dict[str, Any]:
    figures = zip(plan.evaluation.figures, answer.objectives, strict=True)
    return {
        **asdict(plan.candidate),
        "precision": plan.candidate.precision or answer.shape.dtype,
        "devices": plan.devices,
        "instances": plan.instances,
        "cost": plan.cost,
        "figures_ms": {each.name: figure for figure, each in figures},
        "errors": dict(answer.hardware[plan.candidate.hardware].errors),
        "missed": plan.evaluation.missed,
        "requests": plan.evaluation.requests,
        "holds_up_to": plan.speed,
        "limit": plan.limit,
        "one_instance_fewer": plan.fewer or None,
        "idle_policy": plan.evaluation.idle_policy,
        "simulate": shlex.join(answer.command(plan)),
        "start": shlex.join(start_command(answer, plan, None)),
    }
