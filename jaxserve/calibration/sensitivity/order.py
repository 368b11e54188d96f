"""In which order the layers of a model lose precision. Imports no JAX."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.calibration.sensitivity.profile import FILE_NAME, SensitivityProfile

log = logging.getLogger(__name__)


def swap_order(
    folder: Path | None, num_layers: int, variants: Sequence[str], fingerprint: Callable[[], str] | None
) -> tuple[int, ...]:
    """The layers of a model, those whose precision matters least first: by the profile in the model's folder, or from
    the middle outwards where there is none.

    `fingerprint`: of the weights, which must be those that were profiled; None where there are none to compare. Raises
    `CheckpointError` for a file that is no profile, `ConfigError` for one of another model.
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
