"""Numbers of a profile as text."""

from collections.abc import Sequence

from jaxserve.quantization.sensitivity.profile import Curve

MEASURES = ("cross_entropy", "kl", "top1")
HEADINGS = ("cross-entropy, nats", "KL, nats", "top-1 agreement, %")


def mean_and_range(curves: Sequence[Curve], measure: str) -> str:
    """The area under the curves of one kind of order: the mean and, of several, the range; shares in percent."""
    areas = [curve.area(measure) * (100 if measure == "top1" else 1) for curve in curves]
    mean = f"{sum(areas) / len(areas):.4f}"
    return mean if len(areas) == 1 else f"{mean} ({min(areas):.4f}-{max(areas):.4f})"
