"""Files that change while a checkpoint is open give what was loaded, or an error that names the file."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import Checkpoint, open_checkpoint, safetensors
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError
from jaxserve.models import config_from_hf
from tests.conftest import TINY
from tests.golden.model import golden
from tests.quantization import foreign
from tests.support.internals import wrap_file_reads

SINGLE = "model.safetensors"


def other_weights(file: Path) -> bytes:
    """Write a file of the same size and header with other numbers."""
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file.with_suffix(".other"))
    return file.with_suffix(".other").read_bytes()


def overwrite(file: Path) -> None:
    """Put other weights into the file itself, with its old times, as a coarse clock of a file system shows them."""
    times, content = file.stat(), other_weights(file)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def zero_the_end(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, size // 2)
    os.truncate(file, size)


def delete(file: Path) -> None:
    file.unlink()


def recreate(file: Path) -> None:
    content = other_weights(file)
    file.unlink()
    file.write_bytes(content)


def rename_over(file: Path) -> None:
    other_weights(file)
    file.with_suffix(".other").replace(file)


def touch(file: Path) -> None:
    os.utime(file)


def overwrite_and_bring_back(file: Path) -> None:
    """Replace the overwritten file by its backup, which is another file of the same name."""
    backup = Path(shutil.copy(file, file.with_suffix(".backup")))
    overwrite(file)
    backup.replace(file)


DAMAGE = [overwrite, truncate, empty, zero_the_end]
HARMLESS = [delete, recreate, rename_over, touch, overwrite_and_bring_back]


@pytest.fixture
def opened(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(golden("llama2").write(tmp_path / "model"))


def blocks(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {f"{b}.{n}": x for b in checkpoint.config.block_ids for n, x in checkpoint.block(b).items()}


@pytest.mark.parametrize("change", HARMLESS)
def test_tensor_read_again_equals_the_loaded_one(opened: Checkpoint, change: Callable[[Path], None]) -> None:
    opened.store.remember()
    before = blocks(opened)
    change(opened.path / SINGLE)
    after = blocks(opened)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("change", DAMAGE)
def test_tensor_changed_since_it_was_loaded_is_refused(opened: Checkpoint, change: Callable[[Path], None]) -> None:
    opened.store.remember()
    before, file = blocks(opened), opened.path / SINGLE
    content = file.read_bytes()
    change(file)
    with pytest.raises(CheckpointError) as error:
        blocks(opened)
    for words in (str(file), "tensor model.", "not what was loaded", "original file back", "restart"):
        assert words in str(error.value)
    file.write_bytes(content)
    after = blocks(opened)
    assert all(np.array_equal(before[name], after[name]) for name in before), "the original file is back"


def test_block_changed_before_its_first_load_is_refused(opened: Checkpoint) -> None:
    opened.remember("layers.0")
    overwrite(opened.path / SINGLE)
    with pytest.raises(CheckpointError, match="not what was loaded"):
        opened.block("layers.0")


def test_quantised_weight_is_verified_as_stored(tmp_path: Path) -> None:
    config = config_from_hf(TINY)
    shapes = {name: shape for block in config.block_ids for name, shape in tensor_shapes(config, block).items()}
    foreign.write(tmp_path, TINY, shapes, "gptq")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.remember("layers.1")
    before = checkpoint.block("layers.1")
    after = checkpoint.block("layers.1")
    assert all(np.array_equal(before[name], after[name]) for name in before)
    overwrite(tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="not what was loaded"):
        checkpoint.block("layers.1")


@pytest.mark.parametrize("change", [truncate, empty, touch])
def test_file_changed_during_loading_is_refused(opened: Checkpoint, change: Callable[[Path], None]) -> None:
    opened.block("embed")
    change(opened.path / SINGLE)
    with pytest.raises(CheckpointError) as error:
        blocks(opened)
    for words in (str(opened.path / SINGLE), "while it was being loaded", "Start again"):
        assert words in str(error.value)


def test_file_that_became_unreadable_is_an_error(opened: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(safetensors.os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor .* cannot be read \(Input/output error\)"):
        opened.block("layers.0")


def test_dropped_checkpoint_closes_its_files(tmp_path: Path) -> None:
    folder, descriptors = golden("llama2").write(tmp_path / "model", shards=3), Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("needs /proc/self/fd, which lists open files")

    def open_files() -> int:
        return sum(os.path.realpath(link).startswith(str(folder)) for link in descriptors.iterdir())

    checkpoint = open_checkpoint(folder)
    assert open_files() == 3
    del checkpoint
    assert open_files() == 0


def test_fingerprint_reads_a_small_share_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, sizes = open_checkpoint(bundled_model_path()), []

    def note_sizes(read: Callable[..., int | None]) -> Callable[..., int | None]:
        def noted(descriptor: int, begin: int, into: np.ndarray, **kwargs: bool) -> int | None:
            sizes.append(len(into))
            return read(descriptor, begin, into, **kwargs)

        return noted

    wrap_file_reads(monkeypatch, note_sizes)
    fingerprint(checkpoint)
    assert 0 < sum(sizes) < 0.2 * (checkpoint.path / SINGLE).stat().st_size
