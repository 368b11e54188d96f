"""MorphSettings: every threshold of the morph policy, and its modes. configs/policies/ says where each is from."""

from dataclasses import dataclass, replace
from math import inf

from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS


@dataclass(frozen=True)
class MorphSettings:
    """Thresholds; the defaults are accuracy mode. Seconds, and shares from 0 to 1. Raises `ConfigError`.

    Times may be infinite where that means never, as in `queue_delay`: KV usage alone is pressure then.
    """

    precision: str = "int4"  # that layers get under pressure
    slo_ttft: float = 2.0  # s to the first token
    # pressure: one of the two is enough
    kv_usage: float = 0.85  # above this share of the KV pages
    queue_delay: float = 0.1  # s; when a sequence has waited longer
    # entry
    entry_hold: float = 0.2  # s that pressure must last
    entry_interval: float = 0.25  # s from one decision to the next
    entry_layers: int = 2  # per decision
    urgent_delay: float = 0.5  # a share of the SLO; when a sequence has waited that long:
    urgent_layers: int = 8  # per decision
    most_layers: float = 0.25  # the share of the decoder layers that may get it
    rest: str = "int8"  # the precision that the others may get after these; "": they keep theirs
    # release
    release_quiet: float = 5.0  # s without pressure
    release_waiting: float = 0.5  # mean sequences waiting, at most
    release_usage: float = 0.7  # of the smaller pool, at most,
    release_horizon: float = 5.0  # s, even if usage goes on rising so long as it does now
    release_interval: float = 0.5  # s from one decision to the next
    release_layers: float = 0.25  # the share of the decoder layers that come back per decision
    # against going back and forth
    relapse: float = 60.0  # s after a release; if pressure is back so soon,
    relapse_rise: float = 1.5  # and arrivals are not above so many times those at the release,
    relapse_load: float = 0.75  # nothing is released while they are above this share of them,
    relapse_memory: float = 600.0  # for so many s

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those that layers get under pressure."""
        return (self.precision, self.rest) if self.rest and self.most_layers < 1 else (self.precision,)

    def precision_at(self, place: int, num_layers: int) -> str:
        """What the layer at a place of the swap order gets under pressure; "": it keeps its own."""
        return self.precision if place < max(1, int(self.most_layers * num_layers)) else self.rest

    def __post_init__(self) -> None:
        fewer = f"{', '.join(BITS)}: layers change to fewer bits"
        _check("precision", self.precision, self.precision in BITS, f"one of {fewer}")
        _check("rest", repr(self.rest), not self.rest or self.rest in BITS, f"empty, or one of {fewer}")
        shares = ("kv_usage", "urgent_delay", "most_layers", "release_usage", "release_layers", "relapse_load")
        for name in shares:
            _check(name, getattr(self, name), 0 < getattr(self, name) <= 1, "a share above 0, at most 1")
        for name in ("slo_ttft", "queue_delay"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "seconds above 0")
        for name in ("entry_layers", "urgent_layers", "relapse_rise"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        times = ("entry_hold", "entry_interval", "release_quiet", "release_waiting", "release_horizon")
        for name in (*times, "release_interval", "relapse", "relapse_memory"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        # The objective is shown as JSON, which has no infinity; with the others there would be no entry, and no trend.
        for name in ("slo_ttft", "entry_hold", "release_horizon"):
            _check(name, getattr(self, name), getattr(self, name) < inf, "finite")
        below = f"below kv_usage, {self.kv_usage}, or a release would be pressure"
        _check("release_usage", self.release_usage, self.release_usage < self.kv_usage, below)


def _check(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise ConfigError(f"{name} is {value}, it must be {rule} (morph)")


ACCURACY = MorphSettings()
INT8 = replace(ACCURACY, precision="int8", most_layers=1.0)
PERFORMANCE = MorphSettings(
    kv_usage=0.7,
    queue_delay=0.05,
    entry_hold=0.1,
    entry_layers=4,
    urgent_delay=0.25,
    urgent_layers=16,
    most_layers=1.0,
    release_usage=0.6,
)
