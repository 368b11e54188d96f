"""Hardware: what a step's time depends on, read from configs/hardware/NAME.yaml.

name: a100-80
source: where the numbers are from
measured: false               # whether on such a machine, by `jaxserve bench latency --calibrate`
platform: gpu
memory: 85899345920           # bytes of a device
bandwidth: 2.039e+12          # bytes/s of its memory
rates: {bfloat16: 3.12e+14}   # operations/s by the precision of the weights
efficiency:                   # shares of the roofline, by tokens; a number holds for all
  bfloat16: {1: 0.8, 64: 0.75}
  attention: 0.8
links: {pcie: {bandwidth: 2.7e+10, latency: 1.0e-05}}
devices_per_host: 8

Seconds of `overheads` are 0 where they are left out; `tile`, `prefill_tokens`, `max_num_seqs` and `min_rows` are then
those of the platform (`jaxserve.planning.defaults`).
"""

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
FULL = ("bfloat16", "float16", "float32")
ATTENTION = ("attention", "prefill")  # constants: decoding is counted in tokens read, prefill in pairs of tokens
SIXTEEN_BITS = ("bfloat16", "float16")  # one stands for the other
T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """A share of the roofline by number of tokens: linear in the tokens' logarithm between knots, flat outside."""

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
    """What connects two devices, or a device and its host."""

    bandwidth: float  # bytes/s, in one direction
    latency: float  # s of a transfer, and of an all-reduce

    def seconds(self, size: float) -> float:
        """Of a transfer that has the link to itself."""
        return size / self.bandwidth + self.latency


@dataclass(frozen=True)
class Overheads:
    """Seconds that follow from no size of the model."""

    step: float = 0.0
    layer: float = 0.0
    sequence: float = 0.0  # of each decoding sequence, in a step
    host: float = 0.0  # from an arrival at an idle engine to its first step
    request: float = 0.0  # outside of the engine
    prompt_token: float = 0.0  # outside of the engine
    stream: float = 0.0  # outside of the engine, a request for each answer that its instance is streaming
    compile: float = 0.0  # of an executable


@dataclass(frozen=True)
class Hardware:
    """Equal devices, `devices_per_host` of them in a machine."""

    name: str
    source: str
    measured: bool  # here, and not taken from elsewhere
    platform: str
    memory: int  # bytes of a device
    bandwidth: float  # bytes/s of its memory
    rates: Mapping[str, float]  # dense operations/s, by the precision of the weights
    efficiency: Mapping[str, Curve]  # by precision; and "attention", "prefill", "head"
    devices_per_host: int
    tile: int
    prefill_tokens: int
    max_num_seqs: int
    min_rows: int
    overheads: Overheads = Overheads()
    links: Mapping[str, Link] = field(default_factory=dict)

    def rate(self, precision: str) -> float:
        """Operations/s with weights of a precision. Raises `ConfigError` for one that there is not."""
        return _find(self.rates, precision, f"{self.name}: rates")

    def curve(self, precision: str) -> Curve:
        """The share of the roofline with weights of a precision. Raises `ConfigError` for one that there is not."""
        return _find(self.efficiency, precision, f"{self.name}: efficiency")

    @property
    def head_curve(self) -> Curve | None:
        """Of the output head; None: that of its precision."""
        return self.efficiency.get("head")

    @property
    def decode_share(self) -> float:
        """Of the bandwidth, with which decoding reads the KV cache."""
        return self.efficiency["attention"](1)

    @property
    def prefill_share(self) -> float:
        """Of the rate in full precision, with which prompts attend."""
        return self.efficiency.get("prefill", self.efficiency["attention"])(1)

    def link(self, first: int, second: int) -> Link:
        """Between two devices. Raises `ConfigError` if nothing connects them."""
        near = first // self.devices_per_host == second // self.devices_per_host
        for name in ("nvlink", "pcie") if near else ("rdma",):
            if name in self.links:
                return self.links[name]
        where = "one host" if near else "two hosts"
        raise ConfigError(f"{self.name} has no link between devices of {where}: {'pcie' if near else 'rdma'} (links)")


# -- reading and writing


def load_hardware(path_or_name: str | Path) -> Hardware:
    """From a YAML file, or by the name of one in configs/hardware. Raises `ConfigError` naming file and field."""
    path = config_path("hardware", path_or_name)
    if path is None:
        known = ", ".join(config_names("hardware"))
        raise ConfigError(f"unknown hardware {str(path_or_name)!r}: give a YAML file or one of {known} (--hardware)")
    text = read_text(path)
    try:
        return from_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def from_yaml(text: str) -> Hardware:
    """The hardware that a text describes. Raises `ConfigError` naming the field."""
    value = parse_yaml(text, "the hardware")
    shapes = {"tile", "prefill_tokens", "max_num_seqs", "min_rows"}
    optional = {"overheads", "links", *shapes}
    given = _mapping(value, "the hardware", {item.name for item in fields(Hardware)} - optional, optional)
    platform = given["platform"]
    if platform not in PLATFORMS:
        raise ConfigError(f"platform is {platform!r}; there are {', '.join(PLATFORMS)}")
    if not isinstance(given["measured"], bool):
        raise ConfigError(f"measured is {given['measured']!r}, it must be true or false")
    overheads = _mapping(given.get("overheads", {}), "overheads", set(), {item.name for item in fields(Overheads)})
    links = _mapping(given.get("links", {}), "links", set(), LINKS)
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
        **{key: _whole(given.get(key, getattr(PLATFORMS[platform], key)), key) for key in sorted(shapes)},
    )


def to_yaml(hardware: Hardware) -> str:
    """As `load_hardware` reads it."""
    value = {item.name: getattr(hardware, item.name) for item in fields(hardware)}
    value["rates"] = dict(hardware.rates)
    value["efficiency"] = {name: _plain(curve) for name, curve in hardware.efficiency.items()}
    value["overheads"] = asdict(hardware.overheads)
    value["links"] = {name: asdict(link) for name, link in hardware.links.items()}
    return yaml.safe_dump(value, sort_keys=False, width=120, allow_unicode=True)


# -- parts


def _find(known: Mapping[str, T], precision: str, what: str) -> T:
    for name in (precision, *SIXTEEN_BITS) if precision in SIXTEEN_BITS else (precision,):
        if name in known:
            return known[name]
    raise ConfigError(f"{what} lack {precision!r}; there are {', '.join(known)}")


def _plain(curve: Curve) -> float | dict[float, float]:
    if len(curve.knots) == 1:
        return curve.knots[0][1]
    return {int(tokens) if tokens == int(tokens) else tokens: share for tokens, share in curve.knots}


def _rates(value: Any) -> dict[str, float]:
    rates = _mapping(value, "rates", set(), (*FULL, *BITS))
    if not any(name in rates for name in FULL):
        raise ConfigError(f"rates are of {', '.join(rates) or 'nothing'}; one must be of {', '.join(FULL)}")
    return {name: _number(rate, f"rates.{name}") for name, rate in rates.items()}


def _efficiency(value: Any, rates: Mapping[str, Any]) -> dict[str, Curve]:
    given = _mapping(value, "efficiency", {*rates, "attention"}, {"prefill", "head"})
    for name in ATTENTION:
        if isinstance(given.get(name), Mapping):
            raise ConfigError(f"efficiency.{name} is by tokens, it must be one number")
    return {name: _curve(curve, f"efficiency.{name}") for name, curve in given.items()}


def _curve(value: Any, name: str) -> Curve:
    if not isinstance(value, Mapping):
        return Curve(((1, _number(value, name)),))
    knots = tuple((_number(tokens, name), _number(share, f"{name}.{tokens}")) for tokens, share in value.items())
    if not knots or any(a >= b for (a, _), (b, _) in pairwise(knots)):
        raise ConfigError(f"{name} has tokens {', '.join(map(str, value)) or 'of none'}, they must ascend")
    return Curve(knots)


def _link(value: Any, name: str) -> Link:
    link = _mapping(value, f"links.{name}", {"bandwidth", "latency"})
    bandwidth = _number(link["bandwidth"], f"links.{name}.bandwidth")
    return Link(bandwidth, _number(link["latency"], f"links.{name}.latency", zero=True))


def _mapping(value: Any, name: str, needed: set[str], optional: Any = ()) -> Mapping[str, Any]:
    known = sorted({*needed, *optional})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}, it must have {', '.join(known)}")
    missing, unknown = sorted(needed - value.keys()), sorted(map(str, value.keys() - set(known)))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]!r}, which is not known"
        raise ConfigError(f"{name} {what}; it has {', '.join(known)}")
    return value


def _number(value: Any, name: str, *, zero: bool = False) -> float:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not (0 < value < inf or (zero and value == 0)):
        raise ConfigError(f"{name} is {value!r}, it must be a number {'from' if zero else 'above'} 0")
    return float(value)


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number above 0")
    return value
