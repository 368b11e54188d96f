"""What is known about fewer bits of a model's layers: their order, and the loss of quality of each."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from jaxserve.calibration.sensitivity.profile import FILE_NAME, SensitivityProfile
from jaxserve.calibration.sensitivity.rounding_costs import RoundingCost
from jaxserve.control.policies.quality import QualityLoss

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sensitivity:
    """The layers of a model, starting with those whose precision matters least, and the loss of quality of each."""

    swap_order: tuple[int, ...]
    loss: QualityLoss

    @classmethod
    def of(
        cls,
        num_layers: int,
        variants: Sequence[str],
        profile: SensitivityProfile | None,
        costs: Mapping[str, RoundingCost] = MappingProxyType({}),
    ) -> "Sensitivity":
        """Return what a profile says, or what rounding was measured to cost, and otherwise what is assumed.

        The order is that of the first of `variants` that was profiled.
        """
        assumed = QualityLoss.assumed(num_layers)
        measured = {name: cost.by_layer(assumed.by_layer[name]) for name, cost in costs.items()}
        measured |= {} if profile is None else profile.layer_losses()
        cross_entropy = next((cost.cross_entropy for cost in costs.values()), None)
        cross_entropy = cross_entropy if profile is None else profile.cross_entropy
        loss = QualityLoss({**assumed.by_layer, **measured}, tuple(measured), cross_entropy)
        for precision in variants:
            if profile is not None and precision in profile.precisions:
                return cls(profile.order(precision), loss)
        costs = next(iter(assumed.by_layer.values()))
        return cls(tuple(sorted(range(num_layers), key=lambda layer: costs[layer])), loss)


def sensitivity(
    folder: Path | None, num_layers: int, variants: Sequence[str], fingerprint: Callable[[], str] | None
) -> Sensitivity:
    """Return what is known about changes of layers to `variants` by the profile in a model's folder, if it has one.

    `fingerprint` returns the fingerprint of the weights, which must be the profiled ones. It is None if there are no
    weights to compare. Raise `CheckpointError` for an invalid profile, and `ConfigError` for a profile of another
    model.
    """
    path = None if folder is None else folder / FILE_NAME
    if path is None or not path.is_file():
        return Sensitivity.of(num_layers, variants, None)
    profile = SensitivityProfile.load(path)
    profile.check_model(profile.model_sha256 if fingerprint is None else fingerprint(), num_layers)
    return Sensitivity.of(num_layers, variants, profile)
