"""Hardware descriptions, from which the time of a step follows, read from configs/hardware/NAME.yaml.

name: a100-80
source: where the numbers are from
measured: false               # true if measured on such a machine by `jaxserve bench latency --calibrate`
platform: gpu
memory: 85899345920           # bytes of a device
bandwidth: 2.039e+12          # bytes/s of its memory
rates: {bfloat16: 3.12e+14}   # operations/s by the precision of the weights
efficiency:                   # shares of the roofline by tokens; a single number holds for any number of tokens
  bfloat16: {1: 0.8, 64: 0.75}
  attention: 0.8
links: {pcie: {bandwidth: 2.7e+10, latency: 1.0e-05}}
devices_per_host: 8

Missing `overheads` are 0 s. Missing `tile`, `prefill_tokens`, `max_num_seqs` and `min_rows` are those of the platform
(`jaxserve.planning.defaults`). `errors` has the median relative errors of predicted `ttft`, `tpot` and `e2el`, if they
are known.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from math import inf, log
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jaxserve.core.bundled import config_names, config_path
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_yaml, read_text
from jaxserve.core.precision import BITS
from jaxserve.planning.defaults import PLATFORMS

LINKS = ("pcie", "nvlink", "rdma")
LATENCIES = ("ttft", "tpot", "e2el")
FULL = ("bfloat16", "float16", "float32")
# Efficiencies that are constants: decode attention is counted in tokens read, prefill attention in pairs of tokens.
ATTENTION = ("attention", "prefill")
SIXTEEN_BITS = ("bfloat16", "float16")  # equally fast: each stands for the other where that one is missing
T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """A share of the roofline by number of tokens: linear in log(tokens) between knots, constant outside them."""

    knots: tuple[tuple[float, float], ...]  # (tokens, share), ascending

    def __call__(self, tokens: float) -> float:
        before, low = self.knots[0]
        if tokens <= before:
            return low
        for after, high in self.knots[1:]:
            if tokens <= after:
                return low + (high - low) * log(tokens / before) / log(after / before)
            before, low = after, high
        return low


@dataclass(frozen=True)
class Link:
    """A connection between two devices, or between a device and its host."""

    bandwidth: float  # bytes/s, in one direction
    latency: float  # s, once for each transfer or all-reduce

    def seconds(self, size: float) -> float:
        """Return the time (s) of a transfer of `size` bytes that does not share the link."""
        return size / self.bandwidth + self.latency


@dataclass(frozen=True)
class Overheads:
    """Times (s) that do not depend on the sizes of the model.

    `request`, `prompt_token` and `stream` are spent outside of the engine, between client and engine.
    """

    step: float = 0.0
    layer: float = 0.0
    sequence: float = 0.0  # for each decoding sequence of a step
    host: float = 0.0  # from an arrival at an idle engine to its first step
    # The host's work on a step. A step is prepared while another one runs, so that only what takes longer counts.
    loop: float = 0.0
    program: float = 0.0  # for each program that is dispatched: one for each block, unless they are fused
    array: float = 0.0  # for each array of the layers that programs are called with
    answer: float = 0.0  # for each sequence, whose token is passed on to its client
    fuse: float = 0.0  # for each layer, to fuse the programs of a step's shape while the engine serves; 0: never
    stall: float = 0.0  # for each layer, as part of `fuse`: nothing else is done meanwhile
    request: float = 0.0
    prompt_token: float = 0.0
    stream: float = 0.0  # for each request and each answer that its instance is streaming at the time
    compile: float = 0.0  # for each executable
    transition: float = 0.0  # for each batch of transitions: the host's work, and hand-overs between threads


@dataclass(frozen=True)
class Hardware:
    """Equal devices, with `devices_per_host` of them in one host."""

    name: str
    source: str
    measured: bool  # on such a machine; False: taken from published numbers
    platform: str
    memory: int  # bytes of a device
    bandwidth: float  # bytes/s of its memory
    rates: Mapping[str, float]  # dense operations/s, by precision of the weights
    efficiency: Mapping[str, Curve]  # keys: precisions, "attention", "prefill" and "head"
    devices_per_host: int
    tile: int
    prefill_tokens: int
    max_num_seqs: int
    min_rows: int
    overheads: Overheads = Overheads()
    links: Mapping[str, Link] = field(default_factory=dict)
    # Median relative errors of simulated ttft, tpot and e2el, if it was fitted to a run of a server.
    errors: Mapping[str, float] = field(default_factory=dict)

    def rate(self, precision: str) -> float:
        """Return the operations/s with weights of `precision`. Raise `ConfigError` if the rate is missing."""
        return _find(self.rates, precision, f"{self.name}: rates")

    def curve(self, precision: str) -> Curve:
        """Return the share of the roofline with weights of `precision`. Raise `ConfigError` if it is missing."""
        return _find(self.efficiency, precision, f"{self.name}: efficiency")

    @property
    def head_curve(self) -> Curve | None:
        """The share of the roofline of the output head; None if it is that of the head's precision."""
        return self.efficiency.get("head")

    @property
    def decode_share(self) -> float:
        """The share of the memory bandwidth with which decode attention reads the KV cache."""
        return self.efficiency["attention"](1)

    @property
    def prefill_share(self) -> float:
        """The share of the full-precision rate at which prefill attention computes."""
        return self.efficiency.get("prefill", self.efficiency["attention"])(1)

    def link(self, first: int, second: int) -> Link:
        """Return the link between two devices, by index. Raise `ConfigError` if no link connects them."""
        near = first // self.devices_per_host == second // self.devices_per_host
        for name in ("nvlink", "pcie") if near else ("rdma",):
            if name in self.links:
                return self.links[name]
        where = "one host" if near else "two hosts"
        missing = "nvlink or pcie" if near else "rdma"
        raise ConfigError(f"{self.name} has no link between devices of {where}: add {missing} to its links")


# -- reading and writing


def load_hardware(path_or_name: str | Path) -> Hardware:
    """Load a YAML file, given by path or by its name in configs/hardware.

    Raise `ConfigError`, which names file and field, if the file is unknown or invalid.
    """
    path = config_path("hardware", path_or_name)
    if path is None:
        known = ", ".join(config_names("hardware"))
        raise ConfigError(f"unknown hardware {str(path_or_name)!r}: give a YAML file or one of {known} (--hardware)")
    text = read_text(path)
    try:
        return from_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def hardware_of_gpus(gpus: str) -> str:
    """Return the name in configs/hardware that consists of words that nvidia-smi prints.

    Raise `ConfigError` if there is none.
    """
    words = set(re.findall(r"[a-z]+\d\w*|\d+(?=gb)", gpus.lower()))
    names = config_names("hardware")
    for name in names:
        if words.issuperset(name.split("-")):
            return name
    raise ConfigError(f"unknown GPU {gpus}: configs/hardware has {', '.join(names)} (--hardware)")


def from_yaml(text: str) -> Hardware:
    """Return the hardware that a YAML text describes. Raise `ConfigError`, which names the field, if it is invalid."""
    value = parse_yaml(text, "the hardware")
    shapes = {"tile", "prefill_tokens", "max_num_seqs", "min_rows"}
    optional = {"overheads", "links", "errors", *shapes}
    given = _mapping(value, "the hardware", {item.name for item in fields(Hardware)} - optional, optional)
    platform = given["platform"]
    if platform not in PLATFORMS:
        raise ConfigError(f"unknown platform {platform!r}: choose from {', '.join(PLATFORMS)}")
    if not isinstance(given["measured"], bool):
        raise ConfigError(f"measured is {given['measured']!r}: it must be true or false")
    overheads = _mapping(given.get("overheads", {}), "overheads", set(), {item.name for item in fields(Overheads)})
    links = _mapping(given.get("links", {}), "links", set(), LINKS)
    errors = _mapping(given.get("errors", {}), "errors", set(), LATENCIES)
    return Hardware(
        name=str(given["name"]),
        source=str(given["source"]),
        measured=given["measured"],
        platform=platform,
        memory=_whole(given["memory"], "memory"),
        bandwidth=_number(given["bandwidth"], "bandwidth"),
        rates=_rates(given["rates"]),
        efficiency=_efficiency(given["efficiency"], given["rates"]),
        devices_per_host=_whole(given["devices_per_host"], "devices_per_host"),
        overheads=Overheads(**{key: _number(v, f"overheads.{key}", zero=True) for key, v in overheads.items()}),
        links={name: _link(link, name) for name, link in links.items()},
        errors={name: _number(error, f"errors.{name}", zero=True) for name, error in errors.items()},
        **{key: _whole(given.get(key, getattr(PLATFORMS[platform], key)), key) for key in sorted(shapes)},
    )


def to_yaml(hardware: Hardware) -> str:
    """Return the YAML text that `from_yaml` reads back as `hardware`."""
    value = {item.name: getattr(hardware, item.name) for item in fields(hardware)}
    value["rates"] = dict(hardware.rates)
    value["efficiency"] = {name: _plain(curve) for name, curve in hardware.efficiency.items()}
    value["overheads"] = asdict(hardware.overheads)
    value["links"] = {name: asdict(link) for name, link in hardware.links.items()}
    value["errors"] = dict(hardware.errors)
    return yaml.safe_dump(value, sort_keys=False, width=120, allow_unicode=True)


# -- parts


def _find(known: Mapping[str, T], precision: str, what: str) -> T:
    for name in (precision, *SIXTEEN_BITS) if precision in SIXTEEN_BITS else (precision,):
        if name in known:
            return known[name]
    raise ConfigError(f"{what} lack {precision!r}: choose from {', '.join(known)}")


def _plain(curve: Curve) -> float | dict[float, float]:
    if len(curve.knots) == 1:
        return curve.knots[0][1]
    return {int(tokens) if tokens == int(tokens) else tokens: share for tokens, share in curve.knots}


def _rates(value: Any) -> dict[str, float]:
    rates = _mapping(value, "rates", set(), (*FULL, *BITS))
    if not any(name in rates for name in FULL):
        raise ConfigError(f"rates has {', '.join(rates) or 'no precision'}: it must have one of {', '.join(FULL)}")
    return {name: _number(rate, f"rates.{name}") for name, rate in rates.items()}


def _efficiency(value: Any, rates: Mapping[str, Any]) -> dict[str, Curve]:
    given = _mapping(value, "efficiency", {*rates, "attention"}, {"prefill", "head"})
    for name in ATTENTION:
        if isinstance(given.get(name), Mapping):
            raise ConfigError(f"efficiency.{name} is a mapping by tokens: it must be one number")
    return {name: _curve(curve, f"efficiency.{name}") for name, curve in given.items()}


def _curve(value: Any, name: str) -> Curve:
    if not isinstance(value, Mapping):
        return Curve(((1, _number(value, name)),))
    knots = tuple((_number(tokens, name), _number(share, f"{name}.{tokens}")) for tokens, share in value.items())
    if not knots:
        raise ConfigError(f"{name} is empty: it must have at least one number of tokens")
    if any(a >= b for (a, _), (b, _) in pairwise(knots)):
        raise ConfigError(f"{name} has tokens {', '.join(map(str, value))}: they must ascend")
    return Curve(knots)


def _link(value: Any, name: str) -> Link:
    link = _mapping(value, f"links.{name}", {"bandwidth", "latency"})
    bandwidth = _number(link["bandwidth"], f"links.{name}.bandwidth")
    return Link(bandwidth, _number(link["latency"], f"links.{name}.latency", zero=True))


def _mapping(value: Any, name: str, needed: set[str], optional: Any = ()) -> Mapping[str, Any]:
    known = sorted({*needed, *optional})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}: it must be a mapping with {', '.join(known)}")
    missing, unknown = sorted(needed - value.keys()), sorted(map(str, value.keys() - set(known)))
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"has the unknown field {unknown[0]!r}"
        raise ConfigError(f"{name} {problem}: its fields are {', '.join(known)}")
    return value


def _number(value: Any, name: str, *, zero: bool = False) -> float:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not (0 < value < inf or (zero and value == 0)):
        raise ConfigError(f"{name} is {value!r}: it must be a finite number {'of at least' if zero else 'above'} 0")
    return float(value)


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}: it must be a whole number above 0")
    return value
