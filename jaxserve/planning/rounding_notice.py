"""What a start says about layers that are rounded without calibration."""

from collections.abc import Sequence

from jaxserve.checkpoint import Checkpoint
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.checkpoint.rounding import groups_by_weight
from jaxserve.core.config import ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.core.scale_groups import sentence

LOSSY = ("int4", "int3")  # precisions in which rounding costs more than noise


def rounding_notice(checkpoint: Checkpoint, padded: ModelConfig, precisions: Sequence[str]) -> str | None:
    """Return a line on the precisions that layers are rounded to without calibration, None if that loses little.

    It says which groups of inputs share a scale, and the command that makes the loss less.
    """
    layer = padded.block_ids[1]
    rounded = [p for p in precisions if p in BITS and stored_layout(checkpoint, padded, layer, p) is None]
    lossy = [p for p in rounded if p in LOSSY]
    if not lossy:
        return None
    groups = dict.fromkeys(sentence(groups_by_weight(padded, p)) for p in lossy)
    return (
        f"layers are rounded to {' and '.join(lossy)} without calibration ({'; '.join(groups)}): "
        f"`jaxserve quantize {checkpoint.path}` makes the loss less"
    )
