"""Plans as text: YAML that an operator can write, and a table for a terminal.

version: 7
instances:
- stages:
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
from itertools import groupby
from typing import Any

import yaml

from jaxserve.control.plan import BlockPlan, InstancePlan, Plan, StagePlan
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_yaml

LAYER = re.compile(r"layers\.(\d{1,9})")
LAYERS = re.compile(r"layers\.(\d{1,9})-(\d{1,9})")
MAX_BLOCKS = 10_000  # of a plan: a slip of the finger shall not fill the memory


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain data with the keys of its YAML; layers of one precision in a row are one entry."""
    return {
        "version": plan.version,
        "instances": [{"stages": [_stage_dict(stage) for stage in i.stages]} for i in plan.instances],
    }


def to_yaml(plan: Plan) -> str:
    """The plan as YAML, which `from_yaml` reads."""
    return yaml.safe_dump(to_dict(plan), sort_keys=False)


def from_yaml(text: str) -> Plan:
    """The plan that a text describes; without a version it is 1. Raises `ConfigError` naming the field."""
    value = _mapping(parse_yaml(text, "the plan"), "the plan", {"instances"}, {"version"})
    version = _number(value.get("version", 1), "version")
    instances, room = [], MAX_BLOCKS
    for number, item in enumerate(_list(value["instances"], "instances")):
        name = f"instances[{number}]"
        stages = []
        for index, part in enumerate(_list(_mapping(item, name, {"stages"})["stages"], f"{name}.stages")):
            stages.append(_stage(part, f"{name}.stages[{index}]", room))
            room -= len(stages[-1].blocks)
        instances.append(InstancePlan(tuple(stages)))
    return Plan(version, tuple(instances))


def plan_table(plan: Plan) -> str:
    """The plan as lines of text, with layers of one precision in one row."""
    rows = [("instance", "stage", "devices", "KV pages", "blocks", "precision")]
    for number, instance in enumerate(plan.instances):
        for index, stage in enumerate(instance.stages):
            where = (str(number), str(index), _range(stage.devices), str(stage.kv_pages))
            for blocks, precision in _runs(stage.blocks):
                rows.append((*where, blocks, precision))
                where = ("", "", "", "")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join((f"plan {plan.version}", *lines))


# -- writing


def _stage_dict(stage: StagePlan) -> dict[str, Any]:
    return {"devices": list(stage.devices), "kv_pages": stage.kv_pages, "blocks": dict(_runs(stage.blocks))}


def _runs(blocks: Sequence[BlockPlan]) -> list[tuple[str, str]]:
    """(blocks, precision); decoder layers that follow each other in one precision are one: ("layers.0-3", "int4")."""

    def key(entry: tuple[int, BlockPlan]) -> tuple[str, str | int]:
        place, block = entry
        layer = LAYER.fullmatch(block.block)
        return block.precision, int(layer[1]) - place if layer else block.block

    runs = []
    for (precision, _), entries in groupby(enumerate(blocks), key):
        names = [block.block for _, block in entries]
        runs.append((names[0] if len(names) == 1 else f"{names[0]}-{names[-1].removeprefix('layers.')}", precision))
    return runs


def _range(numbers: Sequence[int]) -> str:
    """Numbers, shortened if they follow each other: "4-7"."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


# -- reading


def _stage(value: Any, name: str, room: int) -> StagePlan:
    """The stage that a value describes; `room`: so many blocks it may have."""
    stage = _mapping(value, name, {"devices", "kv_pages", "blocks"})
    devices = tuple(_number(v, f"{name}.devices") for v in _list(stage["devices"], f"{name}.devices"))
    blocks = stage["blocks"]
    if not isinstance(blocks, Mapping) or not blocks:
        raise ConfigError(f"{name}.blocks is {_short(blocks)}; it must name blocks and their precisions")
    expanded: dict[str, BlockPlan] = {}
    for key, precision in blocks.items():
        if not isinstance(precision, str):
            raise ConfigError(f"{name}.blocks: {_short(key)} has precision {_short(precision)}; it must be a name")
        for block in _expand(key, name):
            if block in expanded:
                raise ConfigError(f"{name}.blocks names {block} twice")
            expanded[block] = BlockPlan(block, precision)
        if len(expanded) > room:
            raise ConfigError(f"{name}.blocks: with {_short(key)} the plan has more than {MAX_BLOCKS} blocks")
    return StagePlan(tuple(expanded.values()), devices, _number(stage["kv_pages"], f"{name}.kv_pages"))


def _expand(key: Any, name: str) -> list[str]:
    """The blocks that a key such as "layers.0-3" stands for."""
    if not isinstance(key, str):
        raise ConfigError(f"{name}.blocks has {_short(key)}; a block's name is text, as layers.0-3")
    run = LAYERS.fullmatch(key)
    if run is None:
        return [key]
    first, last = int(run[1]), int(run[2])
    if not first <= last < MAX_BLOCKS:
        raise ConfigError(f"{name}.blocks has {_short(key)}; a range goes up, and below {MAX_BLOCKS}")
    return [layer_name(layer) for layer in range(first, last + 1)]


def _mapping(value: Any, name: str, needed: set[str], optional: Set[str] = frozenset()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {_short(value)}; it must have {', '.join(sorted(needed))}")
    missing, unknown = sorted(needed - value.keys()), sorted(map(str, value.keys() - needed - optional))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {_short(unknown[0])}, which is not known"
        raise ConfigError(f"{name} {what}; it has {', '.join(sorted(needed | optional))}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name} is {_short(value)}; it must be a list of at least one")
    return value


def _number(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} is {_short(value)}; it must be a number from 0")
    return value


def _short(value: Any) -> str:
    """A value as it may stand in a message, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
