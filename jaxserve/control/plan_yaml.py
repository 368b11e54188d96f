"""Plans as text: YAML that operators can write, and a table for a terminal.

version: 7
instances:
- name: "0"
  stages:
  - devices: [0]
    kv_pages: 801
    blocks:
      embed: bfloat16
      layers.0-10: bfloat16
      layers.11: int4
      head: int8
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import groupby
from typing import Any

import yaml

from jaxserve.control.plan import BlockPlan, InstancePlan, Plan, StagePlan
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_yaml

LAYER = re.compile(r"layers\.(\d{1,9})")
LAYERS = re.compile(r"layers\.(\d{1,9})-(\d{1,9})")
# Blocks in an instance and in a plan, so that a typing error cannot fill the memory.
MAX_BLOCKS = 10_000
MAX_PLAN_BLOCKS = 200_000
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C where PyYAML has it, which is much faster
MAX_RANGES = 8  # of numbers in a cell of a table


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data with the keys of its YAML. Adjacent layers of one precision are one entry."""
    return {
        "version": plan.version,
        "instances": [_instance_dict(instance) for instance in plan.instances],
    }


def to_yaml(plan: Plan) -> str:
    """Return a plan as YAML, which `from_yaml` reads."""
    return yaml.dump(to_dict(plan), Dumper=DUMPER, sort_keys=False)


def from_yaml(text: str) -> Plan:
    """Return the plan that a YAML text describes; its version is 1 if the text has none.

    Raise `ConfigError` that names the field if the text is not a plan.
    """
    value = _mapping(parse_yaml(text, "the plan"), "the plan", {"instances"}, {"version"})
    version = _number(value.get("version", 1), "version")
    items = _list(value["instances"], "instances")
    instances, room = [], MAX_PLAN_BLOCKS
    for index, item in enumerate(items):
        instances.append(_instance(item, f"instances[{index}]", str(index)))
        room -= len(instances[-1].blocks)
        if room < 0:
            raise ConfigError(f"instances[{index}]: with it the plan has more than {MAX_PLAN_BLOCKS} blocks")
    return Plan(version, tuple(instances))


def plan_rows(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and the rows of a table that shows a plan. Adjacent layers of one precision are one row.

    Instances that differ in names and devices only are shown as one. A column for the limit on the sequences that run
    at once is there if an instance has one.
    """
    limited = any(instance.max_num_seqs is not None for instance in plan.instances)
    columns = ("instance", *(["sequences"] if limited else []), "stage", "devices", "KV pages", "blocks", "precision")
    rows = []
    for alike in _alike(plan.instances):
        first = alike[0]
        limit = [str(first.max_num_seqs or "-")] if limited else []
        names = [_names([instance.name for instance in alike]), *limit]
        for index, stage in enumerate(first.stages):
            devices = [device for instance in alike for device in instance.stages[index].devices]
            where = [*names, str(index), _ranges(devices), str(stage.kv_pages)]
            for blocks, precision in _runs(stage.blocks):
                rows.append((*where, blocks, precision))
                where = [""] * len(where)
    return columns, rows


# -- writing


def _instance_dict(instance: InstancePlan) -> dict[str, Any]:
    """Return an instance as plain data, with `max_num_seqs`, `draining` and `lanes` only if they say anything."""
    options: dict[str, Any] = {} if instance.max_num_seqs is None else {"max_num_seqs": instance.max_num_seqs}
    if instance.draining:
        options["draining"] = True
    if instance.lanes > 1:
        options["lanes"] = instance.lanes
    return {"name": instance.name} | options | {"stages": [_stage_dict(stage) for stage in instance.stages]}


def _stage_dict(stage: StagePlan) -> dict[str, Any]:
    return {"devices": list(stage.devices), "kv_pages": stage.kv_pages, "blocks": dict(_runs(stage.blocks))}


def _runs(blocks: Sequence[BlockPlan]) -> list[tuple[str, str]]:
    """Return (blocks, precision) pairs. Adjacent decoder layers of one precision are one: ("layers.0-3", "int4")."""

    def key(entry: tuple[int, BlockPlan]) -> tuple[str, str | int]:
        index, block = entry
        layer = LAYER.fullmatch(block.block)
        return block.precision, int(layer[1]) - index if layer else block.block

    runs = []
    for (precision, _), entries in groupby(enumerate(blocks), key):
        names = [block.block for _, block in entries]
        runs.append((names[0] if len(names) == 1 else f"{names[0]}-{names[-1].removeprefix('layers.')}", precision))
    return runs


def _alike(instances: Sequence[InstancePlan]) -> list[list[InstancePlan]]:
    """Return instances in groups of those that differ in names and devices only, in the order of their first ones."""
    groups: dict[Any, list[InstancePlan]] = {}
    for instance in instances:
        stages = tuple((stage.blocks, stage.kv_pages, stage.lanes) for stage in instance.stages)
        groups.setdefault((stages, instance.max_num_seqs, instance.draining), []).append(instance)
    return list(groups.values())


def _names(names: Sequence[str]) -> str:
    """Return names of instances as text, with ranges if all are numbers."""
    if all(name.isdecimal() for name in names):
        return _ranges([int(name) for name in names])
    return ",".join(names[:MAX_RANGES]) + _more(len(names) - MAX_RANGES)


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text in which consecutive ones are a range, such as "0-3,6", and the last may be left out."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(texts[:MAX_RANGES]) + _more(sum(map(len, runs[MAX_RANGES:])))


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


# -- reading


def _instance(value: Any, where: str, default_name: str) -> InstancePlan:
    """Return the instance that a value describes. Raise `ConfigError` if it has more than `MAX_BLOCKS` blocks."""
    fields = _mapping(value, where, {"stages"}, {"name", "max_num_seqs", "draining", "lanes"})
    name, limit, draining = fields.get("name", default_name), fields.get("max_num_seqs"), fields.get("draining", False)
    if not isinstance(name, str):
        raise ConfigError(f"{where}.name is {_short(name)}: it must be a text")
    if not isinstance(draining, bool):
        raise ConfigError(f"{where}.draining is {_short(draining)}: it must be true or false")
    lanes = _number(fields.get("lanes", 1), f"{where}.lanes")
    if lanes < 1:
        raise ConfigError(f"{where}.lanes is {lanes}: it must be at least 1")
    stages, room = [], MAX_BLOCKS
    for index, part in enumerate(_list(fields["stages"], f"{where}.stages")):
        stages.append(replace(_stage(part, f"{where}.stages[{index}]", room), lanes=lanes))
        room -= len(stages[-1].blocks)
    limit = None if limit is None else _number(limit, f"{where}.max_num_seqs")
    return InstancePlan(tuple(stages), name, limit, draining)


def _stage(value: Any, name: str, room: int) -> StagePlan:
    """Return the stage that a value describes. Raise `ConfigError` if it has more than `room` blocks."""
    stage = _mapping(value, name, {"devices", "kv_pages", "blocks"})
    devices = tuple(_number(v, f"{name}.devices") for v in _list(stage["devices"], f"{name}.devices"))
    blocks = stage["blocks"]
    if not isinstance(blocks, Mapping) or not blocks:
        raise ConfigError(f"{name}.blocks is {_short(blocks)}: it must be a mapping of blocks to precisions")
    expanded: dict[str, BlockPlan] = {}
    for key, precision in blocks.items():
        if not isinstance(precision, str):
            raise ConfigError(f"{name}.blocks: {_short(key)} has precision {_short(precision)}: it must be a name")
        for block in _expand(key, name):
            if block in expanded:
                raise ConfigError(f"{name}.blocks names {block} twice")
            expanded[block] = BlockPlan(block, precision)
        if len(expanded) > room:
            raise ConfigError(f"{name}.blocks: with {_short(key)} the instance has more than {MAX_BLOCKS} blocks")
    return StagePlan(tuple(expanded.values()), devices, _number(stage["kv_pages"], f"{name}.kv_pages"))


def _expand(key: Any, name: str) -> list[str]:
    """Return the names of the blocks that a key such as "layers.0-3" means."""
    if not isinstance(key, str):
        raise ConfigError(f"{name}.blocks has {_short(key)}: it must be a text such as layers.0-3")
    run = LAYERS.fullmatch(key)
    if run is None:
        return [key]
    first, last = int(run[1]), int(run[2])
    if not first <= last < MAX_BLOCKS:
        raise ConfigError(f"{name}.blocks has {_short(key)}: a range must increase and end below {MAX_BLOCKS}")
    return [layer_name(layer) for layer in range(first, last + 1)]


def _mapping(value: Any, name: str, needed: set[str], optional: Set[str] = frozenset()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {_short(value)}: it must have {', '.join(sorted(needed))}")
    missing, unknown = sorted(needed - value.keys()), sorted(map(str, value.keys() - needed - optional))
    if missing or unknown:
        fault = f"lacks {missing[0]}" if missing else f"has the unknown key {_short(unknown[0])}"
        raise ConfigError(f"{name} {fault}: its keys are {', '.join(sorted(needed | optional))}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name} is {_short(value)}: it must be a list with at least one item")
    return value


def _number(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} is {_short(value)}: it must be an integer of at least 0")
    return value


def _short(value: Any) -> str:
    """Return the repr of a value, cut to 60 characters for messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
