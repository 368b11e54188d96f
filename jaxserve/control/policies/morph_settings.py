"""Settings of the morph policy and its modes. The files in configs/policies/ say where each value comes from."""

from dataclasses import dataclass, replace
from math import inf

from jaxserve.control.policies.quality import FLOOR
from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS


@dataclass(frozen=True)
class MorphSettings:
    """Settings of the morph policy, in seconds and in shares from 0 to 1. The defaults are those of accuracy mode.

    A time may be infinite if that means never: with an infinite `queue_delay`, only KV usage is pressure. Raise
    `ConfigError` if a setting is not allowed.
    """

    precision: str = "int4"  # precision that layers change to under pressure
    slo_ttft: float = 2.0  # s: objective for the time to the first token

    # Pressure: either of these is exceeded.
    kv_usage: float = 0.85  # share of the KV pages that sequences hold
    queue_delay: float = 0.1  # s that a sequence has waited

    # Entry: layers change after pressure has lasted.
    entry_hold: float = 0.2  # s that pressure must last
    entry_interval: float = 0.25  # s between two decisions
    entry_layers: int = 2  # layers per decision
    urgent_delay: float = 0.5  # share of `slo_ttft` after which a waiting sequence makes a decision urgent
    urgent_layers: int = 8  # layers per urgent decision
    most_layers: float = 0.25  # largest share of the decoder layers that may change to `precision`
    rest: str = "int8"  # precision that the other layers may change to after these; "" if they do not change
    escalate: str = "int4"  # precision that layers in `rest` may go on to while pressure stays; "" if they do not
    last_resort: str = ""  # precision that all layers may go on to after that; "" if they do not
    # Floor of quality: largest rise of the cross-entropy that is expected, as a share of full precision's.
    max_quality_loss: float = FLOOR

    # Benefit: what a change must be estimated to gain.
    min_gain: float = 1.07  # factor by which a change must be expected to shorten the time until answers are complete
    hold: float = 0.5  # share of `slo_ttft` within which the last waiting sequence must be expected to start
    slo_tpot: float = inf  # s: objective for the time per output token; infinity: none
    few: bool = True  # run no more sequences at once than the load needs, while layers have fewer bits

    # Release: layers change back if all of these hold.
    release_quiet: float = 5.0  # s without pressure
    release_waiting: float = 0.5  # largest mean number of waiting sequences
    release_usage: float = 0.7  # largest share of the smaller pool that sequences hold, now and in `release_horizon`
    release_horizon: float = 5.0  # s for which usage is assumed to go on rising as it does now
    release_interval: float = 0.5  # s between two decisions
    release_layers: float = 0.25  # largest share of the changes that are taken back per decision
    release_capacity: float = 0.9  # largest share of the estimated capacity that the load may need after a release

    # Back-off. If pressure returns within `relapse` seconds of a release although arrivals have not grown by
    # `relapse_rise`, the release was a mistake. Then layers change back only if arrivals fall below `relapse_load` of
    # what they were at that release, or when `relapse_memory` seconds have passed.
    relapse: float = 60.0  # s
    relapse_rise: float = 1.5  # factor
    relapse_load: float = 0.75  # share
    relapse_memory: float = 600.0  # s

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that layers change to under pressure."""
        rest = (self.rest, self.second) if self.rest and self.most_layers < 1 else ()
        return tuple(dict.fromkeys(name for name in (self.precision, *rest, self.last_resort) if name))

    @property
    def second(self) -> str:
        """Precision that layers in `rest` go on to: `escalate`, but never fewer bits than `precision`; "" if none."""
        two = self.rest and self.most_layers < 1 and self.escalate
        return self.escalate if two and BITS[self.escalate] >= BITS[self.precision] else ""

    def precision_at(self, place: int, num_layers: int) -> str:
        """Return the precision that the layer at `place` of the swap order changes to; "" if it does not change."""
        return self.precision if place < max(1, int(self.most_layers * num_layers)) else self.rest

    def __post_init__(self) -> None:
        fewer = f"{', '.join(BITS)}, because layers change to fewer bits"
        _check("precision", self.precision, self.precision in BITS, f"one of {fewer}")
        for name in ("rest", "escalate", "last_resort"):
            value = getattr(self, name)
            _check(name, repr(value), not value or value in BITS, f"empty, or one of {fewer}")
        shares = (
            "kv_usage",
            "urgent_delay",
            "most_layers",
            "release_usage",
            "release_layers",
            "release_capacity",
            "relapse_load",
            "hold",
        )
        for name in shares:
            _check(name, getattr(self, name), 0 < getattr(self, name) <= 1, "a share above 0, at most 1")
        for name in ("slo_ttft", "slo_tpot", "queue_delay"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "seconds above 0")
        for name in ("entry_layers", "urgent_layers", "relapse_rise", "min_gain"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        times = ("entry_hold", "entry_interval", "release_quiet", "release_waiting", "release_horizon")
        for name in (*times, "max_quality_loss", "release_interval", "relapse", "relapse_memory"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        # JSON, which shows the objective, has no infinity. With an infinite `entry_hold` layers would never change, and
        # with an infinite `release_horizon` a trend would have no meaning.
        for name in ("slo_ttft", "entry_hold", "release_horizon"):
            _check(name, getattr(self, name), getattr(self, name) < inf, "finite")
        below = f"below kv_usage ({self.kv_usage}), because a release would otherwise cause pressure"
        _check("release_usage", self.release_usage, self.release_usage < self.kv_usage, below)


def _check(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise ConfigError(f"{name} is {value}: it must be {rule} (morph)")


ACCURACY = MorphSettings()
INT8 = replace(ACCURACY, precision="int8", most_layers=1.0, escalate="")
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
