"""Copies of checkpoints with variants that AWQ prepared. Each copy is made once, by the command line's own commands."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxserve.calibration.sensitivity.profile import FILE_NAME as PROFILE
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.variants import FOLDER, VariantStore
from jaxserve.core.errors import CheckpointError

METHOD = "awq"
PRECISIONS = ("int8", "int4", "int3")


def ensure_prepared(model: Path, folder: Path, *, pieces: int = 64) -> Path:
    """Return the copy of a checkpoint under `folder`, made if it is missing or its variants are of other weights.

    Its files are links to those of `model`, except the variants, and the sensitivity profile of a model that has one:
    the copy's profile is measured with the copy's variants. Both are made from text of the standard library;
    AWQ reads `pieces` of 512 tokens.
    """
    copy = folder / model.name
    copy.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        link = copy / path.name
        if path.is_file() and path.name != PROFILE:
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    profile = copy / PROFILE
    if not is_prepared(copy):
        profile.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as texts:
            calibration, _ = _written_texts(Path(texts))
            options = ("--method", METHOD, "--precisions", ",".join(PRECISIONS), "--calib-samples", str(pieces))
            _jaxserve("quantize", copy, *options, "--calib", calibration)
    if (model / PROFILE).is_file() and not profile.is_file():
        with tempfile.TemporaryDirectory() as texts:
            calibration, held_out = _written_texts(Path(texts))
            plot = Path(texts) / "plot.png"
            _jaxserve("profile", copy, "--calib", calibration, "--held-out", held_out, "--seeds", "1", "--plot", plot)
    return copy


def is_prepared(model: Path) -> bool:
    """Return whether a checkpoint has variants of its weights, in every precision, that AWQ made."""
    try:
        store = VariantStore.open(model / FOLDER)
        store.check(open_checkpoint(model, prepared=False))
        return all(store.method(precision).name == METHOD for precision in PRECISIONS)
    except CheckpointError:
        return False


def _written_texts(folder: Path) -> Sequence[Path]:
    """Write calibration and held-out text of the standard library, and return both files."""
    from bench.quantization import texts  # reads the standard library

    paths = folder / "calibration.jsonl", folder / "held_out.jsonl"
    for path, documents in zip(paths, texts(), strict=True):
        path.write_text("\n".join(json.dumps({"text": document.text}) for document in documents), encoding="utf-8")
    return paths


def _jaxserve(*arguments: str | Path) -> None:
    """Run a command of jaxserve in a process of its own. Raise CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "jaxserve.cli.main", *map(str, arguments)], check=True)
