"""The profile as a value and as a versioned JSON file. No JAX, no numpy: policies and the simulator read it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxserve.core.errors import CheckpointError, ConfigError

FORMAT, VERSION = "jaxserve.sensitivity", 1
FILE_NAME = "sensitivity.json"
LIS, FRONT, BACK, RANDOM = "lis", "front-to-back", "back-to-front", "random"  # orders that are compared


@dataclass(frozen=True)
class Weights:
    """Of the three similarities in the score (MorphServe, section 3.3 and its appendix)."""

    lts: float = 0.25
    lrs: float = 0.25
    mds: float = 0.5


@dataclass(frozen=True)
class Text:
    """What was read: a file's name and SHA-256, from which to which share of it, and how many rows of tokens."""

    name: str
    sha256: str
    part: tuple[float, float]
    rows: int
    length: int


@dataclass(frozen=True)
class Curve:
    """Quality on held-out text with 0, 1, ... layers swapped (`swapped` says how many at each point)."""

    swapped: tuple[int, ...]
    cross_entropy: tuple[float, ...]  # nats per token
    kl: tuple[float, ...]  # nats per token, from full precision to the mixture
    top1: tuple[float, ...]  # share of positions where both would choose the same token

    def area(self, measure: str) -> float:
        """The mean of a measure over the share of swapped layers, 0 to 1, by the trapezoidal rule."""
        values: tuple[float, ...] = getattr(self, measure)
        steps = list(zip(self.swapped, values, strict=True))
        strips = ((k1 - k0) * (v0 + v1) / 2 for (k0, v0), (k1, v1) in pairwise(steps))
        return sum(strips) / (self.swapped[-1] - self.swapped[0])


@dataclass(frozen=True)
class LayerScores:
    """Of one precision: what the order was made of.

    `lts`, `lrs` and `mds` by layer number, `mds` with no other layer swapped; `lis` and `chosen_mds` by place in
    `order`, as they were when the layer was chosen.
    """

    order: tuple[int, ...]
    lts: tuple[float, ...]
    lrs: tuple[float, ...]
    mds: tuple[float, ...]
    lis: tuple[float, ...]
    chosen_mds: tuple[float, ...]


@dataclass(frozen=True)
class SensitivityProfile:
    """The order in which a model's layers are best swapped for quantised ones, and the numbers behind it.

    `scores` by precision; `curves` by precision and order, of random orders one per seed.
    """

    model: str
    model_sha256: str  # `checkpoint.variants.fingerprint`
    num_layers: int
    methods: Mapping[str, str]  # by precision: how the layers were quantised
    weights: Weights
    positions: str
    calibration: Text
    held_out: Text
    scores: Mapping[str, LayerScores]
    curves: Mapping[str, Mapping[str, tuple[Curve, ...]]]

    @property
    def precisions(self) -> tuple[str, ...]:
        """Those that were profiled."""
        return tuple(self.scores)

    def order(self, precision: str) -> tuple[int, ...]:
        """All layers, the one to be swapped first in front. Raises ConfigError for a precision without a profile."""
        return self.of(precision).order

    def of(self, precision: str) -> LayerScores:
        """The scores of a precision. Raises ConfigError for one that was not profiled."""
        if precision not in self.scores:
            raise ConfigError(
                f"the sensitivity profile of {self.model} has no {precision!r}, only {', '.join(self.scores)}; "
                f"make one with: jaxserve profile --precisions {precision}"
            )
        return self.scores[precision]

    def check_model(self, model_sha256: str, num_layers: int) -> None:
        """Raises ConfigError if the profile was made of another model, or of other weights of the same."""
        if num_layers != self.num_layers:
            raise ConfigError(
                f"the sensitivity profile is of a model of {self.num_layers} layers, this one has {num_layers}"
            )
        if model_sha256 != self.model_sha256:
            raise ConfigError(
                f"the sensitivity profile was made of other weights ({self.model}, sha256 {self.model_sha256[:12]}) "
                f"than these (sha256 {model_sha256[:12]}); make it anew with `jaxserve profile`"
            )

    def save(self, path: Path) -> None:
        """Writes the file, in place of an older one."""
        body = {"format": FORMAT, "version": VERSION} | asdict(self)
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(body, indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "SensitivityProfile":
        """Reads a profile. Raises CheckpointError naming the file and what is wrong with it."""
        path = Path(path)
        try:
            body = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: there is no sensitivity profile; `jaxserve profile` makes one") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: is not a sensitivity profile ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{path}: is not a sensitivity profile (its format is not {FORMAT!r})")
        if body.get("version") != VERSION:
            raise CheckpointError(f"{path}: is of version {body.get('version')}, this jaxserve reads {VERSION}")
        try:
            profile = _from_json(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: holds a value that is missing or of the wrong kind ({error!r})") from error
        _check_orders(profile, path)
        return profile


def _from_json(body: dict[str, Any]) -> SensitivityProfile:
    values = {field.name: body[field.name] for field in fields(SensitivityProfile)}
    values["weights"] = Weights(**values["weights"])
    for name in ("calibration", "held_out"):
        begin, end = values[name]["part"]
        values[name] = Text(**values[name] | {"part": (begin, end)})
    values["scores"] = {precision: LayerScores(**_tuples(scores)) for precision, scores in values["scores"].items()}
    values["curves"] = {
        precision: {order: tuple(Curve(**_tuples(curve)) for curve in curves) for order, curves in orders.items()}
        for precision, orders in values["curves"].items()
    }
    return SensitivityProfile(**values)


def _tuples(lists: dict[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(values) for name, values in lists.items()}


def _check_orders(profile: SensitivityProfile, path: Path) -> None:
    for precision, scores in profile.scores.items():
        if sorted(scores.order) != list(range(profile.num_layers)):
            raise CheckpointError(
                f"{path}: the order of {precision} is not one of layers 0-{profile.num_layers - 1}: {scores.order}"
            )
