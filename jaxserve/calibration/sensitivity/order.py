"""What the profile in a model's folder says about fewer bits: the order of the layers, and the loss of quality."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.calibration.sensitivity.profile import FILE_NAME, SensitivityProfile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sensitivity:
    """The layers of a model, starting with those whose precision matters least, and the loss of quality of each."""

    swap_order: tuple[int, ...]
    layer_losses: Mapping[str, Sequence[float]] | None  # `SensitivityProfile.layer_losses`; None without a profile


def sensitivity(
    folder: Path | None, num_layers: int, variants: Sequence[str], fingerprint: Callable[[], str] | None
) -> Sensitivity:
    """Return what the profile in a model's folder says about changes of layers to `variants`.

    The order is that of the first variant that was profiled, or from the middle outwards without one. `fingerprint`
    returns the fingerprint of the weights, which must be the profiled ones. It is None if there are no weights to
    compare. Raise `CheckpointError` for an invalid profile, and `ConfigError` for a profile of another model.
    """
    path = None if folder is None else folder / FILE_NAME
    losses = None
    if path is not None and path.is_file():
        profile = SensitivityProfile.load(path)
        profile.check_model(profile.model_sha256 if fingerprint is None else fingerprint(), num_layers)
        losses = profile.layer_losses()
        for precision in variants:
            if precision in profile.precisions:
                return Sensitivity(profile.order(precision), losses)
    if variants:
        log.warning(
            "no %s for %s in %s (jaxserve profile makes one): layers change from the middle outwards",
            FILE_NAME,
            ", ".join(variants),
            folder or "the model's folder",
        )
    middle = (num_layers - 1) / 2
    return Sensitivity(tuple(sorted(range(num_layers), key=lambda layer: abs(layer - middle))), losses)
