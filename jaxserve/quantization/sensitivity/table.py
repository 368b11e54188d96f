"""Numbers of a profile as text."""

from collections.abc import Sequence

from jaxserve.quantization.sensitivity.profile import Curve

MEASURES = ("cross_entropy", "kl", "top1")
HEADINGS = ("cross-entropy, nats", "KL, nats", "top-1 agreement, %")
DIGITS = (4, 5, 2)  # after the point


def mean_and_range(curves: Sequence[Curve], measure: str) -> str:
    """The area under the curves of one kind of order: the mean and, of several, the range; shares in percent."""
    areas = [curve.area(measure) * (100 if measure == "top1" else 1) for curve in curves]
    mean, least, most = (
        f"{area:.{DIGITS[MEASURES.index(measure)]}f}" for area in (sum(areas) / len(areas), min(areas), max(areas))
    )
    return mean if len(areas) == 1 else f"{mean} ({least}-{most})"
