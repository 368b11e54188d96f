"""Layers return to full precision with the values that were loaded, or not at all, whatever happens to their file."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from jaxserve.build import build
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling import SamplingParams
from tests.actuator.adapted import OPTIONS, Adapted, in_all_instances, prompt
from tests.checkpoint.test_changed_files import DAMAGE, HARMLESS, SINGLE

INSTANCES = 2
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"load_format": "auto", "variants": ("int4",), "max_num_seqs": 2, "max_num_batched_tokens": 2 + 32}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, dummy = tmp_path_factory.mktemp("model"), open_checkpoint(tiny_model, "dummy")
    (folder / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    shapes = {n: shape for block in dummy.config.block_ids for n, shape in tensor_shapes(dummy.config, block).items()}
    save_file({name: dummy.store.get(name, shape) for name, shape in shapes.items()}, folder / SINGLE)
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Adapted]:
    built = build(EngineConfig(model=model, dp=INSTANCES, **OPTIONS | SMALL))
    yield Adapted(built)
    built.close()


@pytest.fixture
def adapted(served: Adapted, model: Path) -> Iterator[Adapted]:
    """An engine with all layers of all instances in int4, whose file is restored after the test."""
    file, opened = model / SINGLE, model / "opened"
    content = file.read_bytes()
    os.link(file, opened)
    served.change(in_int4(served))
    served.outcomes.clear()
    yield served
    opened.write_bytes(content)
    file.unlink(missing_ok=True)
    opened.rename(file)
    served.change(served.start)
    assert served.plan.instances == served.start.instances


def in_int4(adapted: Adapted):
    small = {f"layers.{layer}": "int4" for layer in range(3)}
    return in_all_instances(adapted.start, lambda instance: instance.with_precisions(small))


def answers(adapted: Adapted) -> list[tuple[int, ...]]:
    """Return the answers of both instances to the same prompt."""
    tokens: dict[str, tuple[int, ...]] = {}
    asked = [adapted.add(prompt(5, 40), SHORT) for _ in range(INSTANCES)]
    adapted.run(tokens)
    return [tokens[request] for request in asked]


@pytest.fixture(scope="module")
def expected(served: Adapted) -> dict[str, list[tuple[int, ...]]]:
    full = answers(served)
    served.change(in_int4(served))
    return {"full": full, "int4": answers(served)}


@pytest.mark.parametrize("change", HARMLESS)
def test_layer_swapped_back_equals_the_loaded_layer(
    adapted: Adapted, model: Path, expected: dict, change: Callable[[Path], None]
) -> None:
    change(model / SINGLE)
    adapted.change(adapted.start)
    assert [outcome.error for outcome in adapted.outcomes if outcome.error] == []
    assert answers(adapted) == expected["full"]
    assert expected["full"] != expected["int4"]


@pytest.mark.parametrize("change", DAMAGE)
def test_restore_from_a_damaged_file_fails_and_serving_continues(
    adapted: Adapted,
    model: Path,
    expected: dict,
    change: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    content, before = (model / SINGLE).read_bytes(), adapted.plan
    ledger = dict(adapted.ledger.entries)
    change(model / SINGLE)
    adapted.change(adapted.start)
    failed = [outcome for outcome in adapted.outcomes if outcome.error]
    assert len(failed) == INSTANCES
    for words in ("CheckpointError", str(model / SINGLE), "not what was loaded", "restart to serve the new one"):
        assert all(words in (outcome.error or "") for outcome in failed)
        assert words in caplog.text
    assert "Traceback" not in caplog.text
    assert adapted.plan == before
    assert adapted.ledger.entries == ledger
    assert answers(adapted) == expected["int4"]
    (model / SINGLE).write_bytes(content)
    adapted.change(adapted.start)
    assert answers(adapted) == expected["full"], "the original file is back, and so are the layers"
