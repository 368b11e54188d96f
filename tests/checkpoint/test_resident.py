"""A mapped file is resident only while it is read."""

from pathlib import Path

import numpy as np
import pytest

from jaxserve.bundled import bundled_model_path
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.variants import fingerprint

SMAPS = Path("/proc/self/smaps")
needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="what is resident is read from /proc/self/smaps")


def resident_kb(file: Path) -> int:
    """What of the mappings of a file is in memory."""
    lines = SMAPS.read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(file))]
    rss = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    assert rss
    return sum(int(line.split()[1]) for line in rss)


@needs_smaps
def test_blocks_that_were_read_leave_nothing_of_their_file_in_memory():
    folder = bundled_model_path()
    checkpoint = open_checkpoint(folder)
    first = checkpoint.block("layers.0")
    before = {name: array.copy() for name, array in first.items()}
    for block_id in checkpoint.config.block_ids:
        checkpoint.block(block_id)
    assert resident_kb(folder / "model.safetensors") < 1000  # of 11,500
    for name, array in first.items():
        np.testing.assert_array_equal(array, before[name])


@needs_smaps
def test_a_fingerprint_leaves_nothing_of_the_file_in_memory():
    folder = bundled_model_path()
    checkpoint = open_checkpoint(folder)
    fingerprint(checkpoint)
    assert resident_kb(folder / "model.safetensors") < 1000  # of 11,500
