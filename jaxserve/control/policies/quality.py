"""The loss of quality that fewer bits are expected to cause, by which policies hold a floor of quality."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

FLOOR = 0.05  # rise of the cross-entropy that policies accept unless they are told otherwise, as a share

# The rise when all layers are rounded, as a share, for models that were not measured. SmolLM2-135M, whose layers are
# small and lose more than those of larger models, was measured at 0.001, 0.04 and 0.18 on English, and at 0.09 and 0.26
# in int4 and int3 on text of its own.
ASSUMED = {"int8": 0.002, "int4": 0.08, "int3": 0.3}
# The parts of single layers grow from the first layer to the last but one as EARLY + x, x from 0 to 1. These constants
# repeat what SmolLM2-135M lost in its first half (0.060 nats), its second half (0.189) and its last layer (0.057).
EARLY = 0.12
FIRST = 0.37  # the part of layer 0, as the mean of the first half
LAST = 5.2  # the part of the last layer, six times the mean of the second half


@dataclass(frozen=True)
class QualityLoss:
    """The rise of the cross-entropy that precisions of all layers are expected to cause.

    It is a share of full precision's cross-entropy: the sum of what each layer adds. Full precision adds nothing.
    Precisions that are not in `measured` have losses that are only assumed.
    """

    by_layer: Mapping[str, Sequence[float]]  # precision -> what each layer adds, as a share
    measured: Collection[str] = ()  # precisions
    cross_entropy: float | None = None  # nats a token, of full precision on the text of the measurement

    @classmethod
    def assumed(cls, num_layers: int) -> "QualityLoss":
        """Return what is assumed of a model that was not measured: later layers lose more, the last one most."""
        parts = [EARLY + (layer + 0.5) / num_layers for layer in range(num_layers)]
        parts[0], parts[-1] = FIRST, LAST
        whole = sum(parts)
        return cls({name: [loss * part / whole for part in parts] for name, loss in ASSUMED.items()})

    def __call__(self, precisions: Sequence[str]) -> float:
        """Return the expected loss if the layers have these precisions."""
        known = self.by_layer
        return sum(known[precision][layer] for layer, precision in enumerate(precisions) if precision in known)

    def nats(self, precisions: Sequence[str]) -> float | None:
        """Return the expected loss in nats a token; None if full precision's cross-entropy was not measured."""
        if not (share := self(precisions)):
            return 0.0
        known = self.cross_entropy is not None and self.is_measured(precisions)
        return share * self.cross_entropy if known and self.cross_entropy else None

    def is_measured(self, precisions: Sequence[str]) -> bool:
        """Return whether the losses of all these precisions were measured, or are those of full precision."""
        return all(name in self.measured for name in precisions if name in self.by_layer)
