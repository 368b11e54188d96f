"""The options with which `jaxserve serve` starts a plan."""

from pathlib import Path
from typing import Any

import yaml

from jaxserve.core.bundled import config_path
from jaxserve.core.config import EngineConfig
from jaxserve.core.files import write_file
from jaxserve.core.numeric import ceil_div
from jaxserve.core.options import given_options, options_of
from jaxserve.sim.capacity.load import arguments_of
from jaxserve.sim.capacity.plan import Answer
from jaxserve.sim.capacity.search import Plan

NAMED = "/path/to/{}"  # where a model of configs/models lies, which has no weights here


def save_options(answer: Answer, plan: Plan, path: Path) -> None:
    """Write the options of a server on one host, as YAML. Raise `ConfigError` if the file cannot be written."""
    what = f"{plan.devices} x {plan.candidate.hardware_name}"
    first = f"# {what}: the cheapest plan of `jaxserve sim plan` for {answer.load}\n"
    hosts = f"# {start_words(answer, plan).strip(' :')}\n" if start_words(answer, plan) else ""
    write_file(path, first + hosts + yaml.safe_dump(serve_options(answer, plan), sort_keys=False, allow_unicode=True))


def serve_options(answer: Answer, plan: Plan) -> dict[str, Any]:
    """Return the options of a server on one host, by the names that `EngineConfig` has."""
    known = {field.name for field in options_of(EngineConfig)}
    given = {name: value for name, value in given_options(answer.cluster_options(plan)).items() if name in known}
    return {**given, "model": model_of(answer), "dp": _per_host(answer, plan)}


def start_command(answer: Answer, plan: Plan, saved: Path | None) -> list[str]:
    """Return the command that starts a server on one host, with the options in `saved` if they have been saved."""
    if saved is not None:
        return ["jaxserve", "serve", "--config", str(saved)]
    engine = EngineConfig(**{name: value for name, value in serve_options(answer, plan).items() if name != "model"})
    return ["jaxserve", "serve", model_of(answer), *arguments_of(engine)]


def start_words(answer: Answer, plan: Plan) -> str:
    """Return on how many hosts the command is to be run, with a colon; "" for one."""
    per_host = _per_host(answer, plan)
    hosts = ceil_div(plan.instances, per_host)
    if hosts == 1:
        return ""
    rest = plan.instances - (hosts - 1) * per_host
    last = "" if rest == per_host else f", the last with --dp {rest}"
    return f"on each of {hosts} hosts behind one load balancer{last}: "


def model_of(answer: Answer) -> str:
    """Return the model as a server takes it, or a stand-in for its folder if only its sizes are known."""
    base = answer.candidates.base
    if base.model_folder is not None:
        return str(base.model_folder)
    return NAMED.format(answer.shape.name) if config_path("models", base.model_path) else base.model_path


def _per_host(answer: Answer, plan: Plan) -> int:
    """Return the instances of a host."""
    return min(plan.instances, answer.hardware[plan.candidate.hardware].devices_per_host // plan.candidate.devices)
