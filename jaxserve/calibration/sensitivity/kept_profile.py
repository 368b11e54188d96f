"""The profile of layers that a server has kept."""

from dataclasses import replace

from jaxserve.calibration.sensitivity.profile import FILE_NAME, SensitivityProfile
from jaxserve.checkpoint.kept import KeptLayers
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import CheckpointError


def kept_profile(kept: KeptLayers) -> SensitivityProfile | None:
    """Return the profile that was kept of these weights; None if there is none, or it cannot be read.

    It has only the precisions in which layers are served now as they were when they were measured.
    """
    if kept.folder is None or not (kept.folder / FILE_NAME).is_file():
        return None
    try:
        profile = SensitivityProfile.load(kept.folder / FILE_NAME)
    except CheckpointError:
        return None
    checkpoint = kept.checkpoint
    if (profile.model_sha256, profile.num_layers) != (fingerprint(checkpoint), checkpoint.config.num_layers):
        return None
    served = {
        precision: losses
        for precision, losses in profile.losses.items()
        if kept.method(layer_name(0), precision) == profile.methods.get(precision)
    }
    return replace(profile, losses=served) if served else None
