"""Layers that are freed before another variant takes their place, because there is no room for both.

CPU devices list pinned memory as GPUs do, and these tests tell them to use it. As the ledger of a CPU counts no second
copies, the tests say that there is no room for one.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.build import build
from jaxserve.control.reconfigure import Reconfiguration
from jaxserve.control.transitions import SwapPrecision
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import StageFailed
from jaxserve.executor.block_store import BlockStore
from jaxserve.executor.host_memory import PINNED
from tests.actuator.adapted import GREEDY, OPTIONS, Adapted, in_all_instances, prompt
from tests.actuator.mixed import MixedReference
from tests.support.thorough import some

LAYERS = ("layers.0", "layers.1", "layers.2")
LONG = replace(GREEDY, max_tokens=180)


@pytest.fixture
def start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Adapted]]:
    """Return a function that starts an engine on whose devices no layer has room for a second variant."""
    fits = Reconfiguration._fits

    def has_room(self: Reconfiguration, batch: Any, pending: Any) -> bool:
        second = any(isinstance(each, SwapPrecision) and not each.frees_first for each in batch)
        return not second and fits(self, batch, pending)

    monkeypatch.setattr(Reconfiguration, "_fits", has_room)
    monkeypatch.setattr(SwapPrecision, "in_less_room", lambda self: replace(self, frees_first=True))
    made: list[Adapted] = []

    def begin(**options: Any) -> Adapted:
        config = EngineConfig(model=tiny_model, **(OPTIONS | {"warmup": False} | options))
        made.append(Adapted(build(config, host_memory=lambda device: PINNED), bytes_checked=False))
        return made[-1]

    yield begin
    for adapted in made:
        adapted.built.close()


@pytest.mark.parametrize("degrees", some([{}, {"tp": 2, "pp": 2}, {"dp": 2}], 2))
def test_layers_change_during_an_answer(
    start: Callable[..., Adapted], mixed: MixedReference, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]
) -> None:
    adapted = start(**degrees)
    executors = [steps.executor for steps in adapted.built.instances]
    exchanged = []
    for executor in executors:
        replace_blocks = executor.replace

        def counted(new: Any, executor: Any = executor, replace_blocks: Any = replace_blocks) -> Any:
            (loaded,) = new
            (old,) = (each for each in executor.blocks if each.block == loaded.block)
            assert all(leaf.is_deleted() for leaf in old.leaves), "one variant is on the devices at a time"
            exchanged.append((loaded.block, loaded.precision))
            return replace_blocks(new)

        monkeypatch.setattr(executor, "replace", counted)
    home = adapted.start
    other = in_all_instances(home, lambda instance: instance.with_precisions(dict.fromkeys(LAYERS, "int4")))
    tokens: dict[str, tuple[int, ...]] = {}
    asked = {adapted.add(p, LONG): p for p in (prompt(seed, 50) for seed in range(len(executors)))}
    adapted.run(tokens, [other, home])
    assert [outcome.error for outcome in adapted.outcomes] == [None] * 2 * len(LAYERS) * len(executors)
    assert sorted(exchanged) == sorted(
        (layer, precision) for layer in LAYERS for precision in ("int4", "float32") for _ in executors
    )
    if len(executors) == 1:
        ((request, p),) = asked.items()
        mixed.check(adapted.runs[request], p, tokens[request])
    assert {len(tokens[request]) for request in asked} == {180}


@pytest.mark.parametrize("broken", ["acquire", "arrive"])
def test_layer_comes_back_if_the_other_variant_cannot_be_copied(
    start: Callable[..., Adapted], mixed: MixedReference, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    adapted = start()
    executor, acquire, wait = adapted.steps.executor, BlockStore.acquire, jax.block_until_ready
    copied = []

    def fail(error: bool) -> None:
        if error:
            raise MemoryError("none left")

    def acquiring(self: BlockStore, block: str, precision: str, *args: Any, **kwargs: Any) -> Any:
        fail(broken == "acquire" and precision == "int4")
        copied.append((block, precision))
        return acquire(self, block, precision, *args, **kwargs)

    def arriving(arrays: Any) -> Any:
        fail(broken == "arrive" and copied[-1:] == [("layers.0", "int4")])
        return wait(arrays)

    home, p = adapted.start, prompt(5, 50)
    wanted = home.with_precisions("0", {"layers.0": "int4", "layers.1": "int4"})
    entries, before, tokens = dict(adapted.ledger.entries), list(executor.blocks), {}
    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "acquire", acquiring)
        patch.setattr(jax, "block_until_ready", arriving)
        request = adapted.add(p, LONG)
        adapted.run(tokens, [wanted])
        adapted.wait()
    assert copied[-1] == ("layers.0", "float32"), "it came back"
    assert [outcome.error for outcome in adapted.outcomes] == ["MemoryError: none left"]
    assert (adapted.plan.instances, dict(adapted.ledger.entries)) == (home.instances, entries)
    assert [each.precision for each in executor.blocks] == [each.precision for each in before]
    assert len(tokens[request]) == 180
    mixed.check(adapted.runs[request], p, tokens[request])
    adapted.change(wanted)
    assert adapted.plan.instances == wanted.instances, "the next attempt succeeds"


def test_instance_fails_at_its_next_step_if_the_layer_cannot_come_back(
    start: Callable[..., Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = start()
    adapted.add(prompt(5, 50), LONG)
    for _ in range(3):
        adapted.step({})

    def acquire(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(BlockStore, "acquire", acquire)
    with pytest.raises(StageFailed, match="deleted"):
        adapted.run({}, [adapted.start.with_precisions("0", {"layers.0": "int4"})])
    adapted.wait()
    assert [outcome.error for outcome in adapted.outcomes] == ["MemoryError: none left"]
    assert adapted.plan.instances == adapted.start.instances
