"""The profile as a value and as a versioned JSON file. Policies and the simulator read it without JAX or numpy."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.core.files import write_file

FORMAT, VERSION = "jaxserve.sensitivity", 2
FILE_NAME = "sensitivity.json"
# Names of the compared orders: by falling LIS, chosen greedily; by falling MDS with no other layer swapped; and others.
LIS, MDS, FRONT, BACK, RANDOM = "lis", "mds", "front-to-back", "back-to-front", "random"


@dataclass(frozen=True)
class Weights:
    """The weights of the three similarities in the score (MorphServe, section 3.2; values of its arXiv appendix)."""

    lts: float = 0.25
    lrs: float = 0.25
    mds: float = 0.5


@dataclass(frozen=True)
class Text:
    """The text that was used: a part of a file, as rows of tokens."""

    name: str
    sha256: str
    part: tuple[float, float]  # begin and end, as shares of the file
    rows: int
    length: int  # tokens of a row


@dataclass(frozen=True)
class LayerLosses:
    """The loss that a precision adds on a text, in nats a token: the KL divergence from full precision.

    On text that the model has written itself, this is what the cross-entropy is expected to rise by, but with less
    noise than the rise itself.
    """

    alone: tuple[float, ...]  # by layer, with all other layers in full precision
    together: float  # with all layers in this precision
    cross_entropy: float  # nats a token, of full precision

    @property
    def added(self) -> tuple[float, ...]:
        """The loss that each layer adds; the sum is never below what all layers together were measured to add."""
        factor = max(1.0, self.together / total) if (total := sum(self.alone)) > 0 else 1.0
        return tuple(loss * factor for loss in self.alone)


@dataclass(frozen=True)
class QualityCurve:
    """Quality on held-out text by number of swapped layers, along one order of swapping."""

    swapped: tuple[int, ...]  # number of swapped layers at each point
    cross_entropy: tuple[float, ...]  # nats per token
    kl: tuple[float, ...]  # nats per token, relative to full precision
    top1: tuple[float, ...]  # share of positions with the same most likely token as in full precision

    def area(self, measure: str) -> float:
        """Return the mean of a measure over the share of swapped layers, by the trapezoidal rule."""
        values: tuple[float, ...] = getattr(self, measure)
        steps = list(zip(self.swapped, values, strict=True))
        strips = ((k1 - k0) * (v0 + v1) / 2 for (k0, v0), (k1, v1) in pairwise(steps))
        return sum(strips) / (self.swapped[-1] - self.swapped[0])


@dataclass(frozen=True)
class LayerScores:
    """The LIS order of swapping to one precision, and the scores from which it was made.

    `lts`, `lrs` and `mds` are by layer. `mds` is that with no other layer swapped. `lis` and `chosen_mds` are by
    position in `order`, as they were when the layer was chosen.
    """

    order: tuple[int, ...]
    lts: tuple[float, ...]
    lrs: tuple[float, ...]
    mds: tuple[float, ...]
    lis: tuple[float, ...]
    chosen_mds: tuple[float, ...]

    @property
    def mds_order(self) -> tuple[int, ...]:
        """All layers by falling MDS. Between equals, the lower layer comes first."""
        return tuple(sorted(range(len(self.mds)), key=lambda layer: (-self.mds[layer], layer)))


@dataclass(frozen=True)
class SensitivityProfile:
    """The loss of a model by layers in fewer bits, and the order in which they are best swapped for quantised ones.

    Either `losses` was measured, or `scores` and `curves`, which take far longer.
    """

    model: str
    model_sha256: str  # `checkpoint.variants.fingerprint`
    num_layers: int
    methods: Mapping[str, str]  # method of quantisation by precision
    weights: Weights
    positions: str
    calibration: Text
    held_out: Text | None  # of the curves
    losses: Mapping[str, LayerLosses]  # by precision
    scores: Mapping[str, LayerScores]  # by precision
    curves: Mapping[str, Mapping[str, tuple[QualityCurve, ...]]]  # by precision and order; one for each random order

    @property
    def precisions(self) -> tuple[str, ...]:
        """The profiled precisions."""
        return tuple(dict.fromkeys((*self.scores, *self.losses)))

    @property
    def cross_entropy(self) -> float | None:
        """Full precision's cross-entropy in nats a token, on the text of the losses or else of the curves."""
        if self.losses:
            return next(iter(self.losses.values())).cross_entropy
        curves = [curve for orders in self.curves.values() for group in orders.values() for curve in group]
        return curves[0].cross_entropy[0] if curves else None

    def order(self, precision: str) -> tuple[int, ...]:
        """Return all layers in the order of swapping. Raise `ConfigError` if `precision` was not profiled."""
        if precision not in self.scores and precision in self.losses:
            alone = self.losses[precision].alone
            return tuple(sorted(range(self.num_layers), key=lambda layer: (alone[layer], layer)))
        scores = self.of(precision)
        return scores.mds_order if self.order_name(precision) == MDS else scores.order

    def order_name(self, precision: str) -> str:
        """Return which order is the order of swapping: of LIS and MDS the one with the lower mean cross-entropy.

        It is LIS in a profile that has no measurements of MDS. Raise `ConfigError` if `precision` was not profiled.
        """
        self.of(precision)
        measured = self.curves.get(precision, {})
        if MDS not in measured or LIS not in measured:
            return LIS
        return min((LIS, MDS), key=lambda name: measured[name][0].area("cross_entropy"))

    def layer_losses(self) -> dict[str, tuple[float, ...]]:
        """Return by precision how much each layer adds to the cross-entropy, as a share of full precision's.

        A layer adds what it adds alone. In a profile that has curves instead, it adds what the order of swapping was
        measured to add when it came to this layer. Between two measured numbers of swapped layers, each layer adds the
        same. Precisions whose order was not measured are left out.
        """
        losses = {}
        for precision, found in self.losses.items():
            losses[precision] = tuple(loss / found.cross_entropy for loss in found.added)
        for precision in self.scores.keys() - losses.keys():
            if not (measured := self.curves.get(precision, {}).get(self.order_name(precision))):
                continue
            curve = measured[0]
            points = list(zip(curve.swapped, curve.cross_entropy, strict=True))
            steps: list[float] = []
            for (k0, before), (k1, after) in pairwise(points):
                steps += [(after - before) / (k1 - k0)] * (k1 - k0)
            by_layer = dict(zip(self.order(precision), steps, strict=True))
            losses[precision] = tuple(by_layer[layer] / curve.cross_entropy[0] for layer in range(self.num_layers))
        return losses

    def of(self, precision: str) -> LayerScores:
        """Return the scores of a precision. Raise `ConfigError` if it was not profiled."""
        if precision not in self.scores:
            raise ConfigError(
                f"the sensitivity profile of {self.model} has no {precision!r}, only {', '.join(self.precisions)}; "
                f"make one with: jaxserve profile --precisions {precision}"
            )
        return self.scores[precision]

    def check_model(self, model_sha256: str, num_layers: int) -> None:
        """Raise `ConfigError` if the profile is of another model or of other weights."""
        if num_layers != self.num_layers:
            raise ConfigError(
                f"the sensitivity profile is of a model of {self.num_layers} layers, this one has {num_layers}"
            )
        if model_sha256 != self.model_sha256:
            raise ConfigError(
                f"the sensitivity profile was made of other weights ({self.model}, sha256 {self.model_sha256[:12]}) "
                f"than these (sha256 {model_sha256[:12]}); make a new one with `jaxserve profile`"
            )

    def save(self, path: Path) -> None:
        """Write the profile to a file, which replaces an older one. Raise ConfigError if it cannot be written."""
        body = {"format": FORMAT, "version": VERSION} | asdict(self)
        write_file(path, json.dumps(body, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "SensitivityProfile":
        """Read a profile. Raise `CheckpointError`, which names the file, if it is missing or invalid."""
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
            raise CheckpointError(f"{path}: has version {body.get('version')}: this jaxserve reads version {VERSION}")
        try:
            profile = _from_json(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: a value is missing or of the wrong type ({error!r})") from error
        _check_orders(profile, path)
        return profile


def _from_json(body: dict[str, Any]) -> SensitivityProfile:
    values = {field.name: body[field.name] for field in fields(SensitivityProfile)}
    values["weights"] = Weights(**values["weights"])
    for name in ("calibration", "held_out"):
        if name == "calibration" or values[name] is not None:
            begin, end = values[name]["part"]
            values[name] = Text(**values[name] | {"part": (begin, end)})
    values["losses"] = {name: LayerLosses(**_tuples(losses)) for name, losses in values["losses"].items()}
    values["scores"] = {precision: LayerScores(**_tuples(scores)) for precision, scores in values["scores"].items()}
    values["curves"] = {
        precision: {
            order: tuple(QualityCurve(**_tuples(curve)) for curve in curves) for order, curves in orders.items()
        }
        for precision, orders in values["curves"].items()
    }
    return SensitivityProfile(**values)


def _tuples(lists: dict[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in lists.items()}


def _check_orders(profile: SensitivityProfile, path: Path) -> None:
    for precision, losses in profile.losses.items():
        values = (*losses.alone, losses.together)
        if len(losses.alone) != profile.num_layers or not losses.cross_entropy > 0 or not all(map(isfinite, values)):
            raise CheckpointError(f"{path}: the losses of {precision} must be a finite number for each layer")
    for precision, scores in profile.scores.items():
        if sorted(scores.order) != list(range(profile.num_layers)):
            raise CheckpointError(
                f"{path}: the order of {precision} is {scores.order}: it must have each layer from 0 to "
                f"{profile.num_layers - 1} once"
            )
