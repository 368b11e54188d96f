"""The loss of quality that fewer bits are expected to cause, by which policies hold a floor of quality."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.core.errors import ConfigError


@dataclass(frozen=True)
class QualityLoss:
    """The rise of the cross-entropy on held-out text that precisions of all layers are expected to cause.

    It is a share of full precision's cross-entropy: the sum of what each layer was measured to add. Full precision
    adds nothing.
    """

    by_layer: Mapping[str, Sequence[float]]  # precision -> what each layer adds, as a share

    def __call__(self, precisions: Sequence[str]) -> float:
        """Return the expected loss if the layers have these precisions."""
        known = self.by_layer
        return sum(known[precision][layer] for layer, precision in enumerate(precisions) if precision in known)

    def check(self, precisions: Iterable[str]) -> None:
        """Raise `ConfigError` if the loss of one of these precisions is not known."""
        for precision in precisions:
            if precision not in self.by_layer:
                raise ConfigError(
                    f"max_quality_loss needs the loss of {precision}, but the sensitivity profile has only "
                    f"{', '.join(self.by_layer)}: make one with `jaxserve profile --precisions {precision},...`"
                )
