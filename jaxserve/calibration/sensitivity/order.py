"""The order in which the layers of a model lose precision."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.calibration.sensitivity.profile import FILE_NAME, SensitivityProfile

log = logging.getLogger(__name__)


def swap_order(
    folder: Path | None, num_layers: int, variants: Sequence[str], fingerprint: Callable[[], str] | None
) -> tuple[int, ...]:
    """Return the layers of a model, starting with those whose precision matters least.

    The order is that of the profile in the model's folder, or from the middle outwards without a profile. `fingerprint`
    returns the fingerprint of the weights, which must be the profiled ones. It is None if there are no weights to
    compare. Raise `CheckpointError` for an invalid profile, and `ConfigError` for a profile of another model.
    """
    path = None if folder is None else folder / FILE_NAME
    if path is not None and path.is_file():
        profile = SensitivityProfile.load(path)
        profile.check_model(profile.model_sha256 if fingerprint is None else fingerprint(), num_layers)
        for precision in variants:
            if precision in profile.precisions:
                return profile.order(precision)
    if variants:
        log.warning(
            "no %s for %s in %s (jaxserve profile makes one): layers change from the middle outwards",
            FILE_NAME,
            ", ".join(variants),
            folder or "the model's folder",
        )
    return tuple(sorted(range(num_layers), key=lambda layer: abs(layer - (num_layers - 1) / 2)))
