"""Where the bundled default model is: in the wheel, or in checkpoints/ of a source tree."""

from pathlib import Path

from jaxserve.core.errors import CheckpointError

_PACKAGE = Path(__file__).resolve().parent
_ROOMS = (_PACKAGE / "_bundled", _PACKAGE.parent / "checkpoints")


def bundled_model_path() -> Path:
    """The directory of the bundled model, in Hugging Face layout.

    Raises `CheckpointError` when this installation has none.
    """
    for room in _ROOMS:
        for config in sorted(room.glob("*/config.json")):
            return config.parent
    raise CheckpointError(
        f"this installation has no bundled model: no */config.json in {' or '.join(map(str, _ROOMS))}"
    )
