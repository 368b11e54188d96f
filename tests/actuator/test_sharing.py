"""Instances on one host share the variants of layers: a swap copies nothing, and everything is freed at the end."""

import json
from pathlib import Path

import jax
import pytest

from jaxserve.build import build
from jaxserve.core.config import EngineConfig
from tests.actuator.adapted import GREEDY, OPTIONS, Adapted, addresses, prompt
from tests.conftest import TINY
from tests.support.internals import references_in

SMALL = {"warmup": False, "memory_gb": 8, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32, "variants": ("int4",)}
LAYERS = ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}])
def test_instances_swap_to_the_same_arrays_and_free_everything(tiny_model: Path, degrees: dict[str, int]) -> None:
    there = {id(array) for array in jax.live_arrays()}
    built = build(EngineConfig(model=tiny_model, **(OPTIONS | SMALL | degrees)))
    adapted = Adapted(built)
    ledgers = built.resolved.ledgers
    start = {device: ledger.entries for device, ledger in ledgers.items()}
    held, variants = adapted.store.held_bytes, [entries["variants"] for entries in start.values()]
    assert held <= sum(variants) < 1.1 * held, "once, not once for each instance"
    small = dict.fromkeys(LAYERS, "int4")
    first = adapted.plan.with_precisions("0", small)
    adapted.change(first)
    adapted.change(first.with_precisions("1", small))
    assert [outcome.error for outcome in adapted.outcomes if outcome.error] == []
    assert [ledger.entries.get("variants", 0) for ledger in ledgers.values()] == [0] * len(ledgers), "all are in use"
    blocks = [{loaded.block: loaded for loaded in steps.executor.blocks} for steps in built.instances]
    for name in LAYERS:
        assert all(adapted.runs_in_place(each[name]) for each in blocks)
        assert addresses(blocks[0][name].leaves) == addresses(blocks[1][name].leaves)
    assert adapted.store.held_bytes == held
    tokens: dict[str, tuple[int, ...]] = {}
    requests = [adapted.add(prompt(seed, 30), GREEDY) for seed in range(2)]
    adapted.run(tokens, [adapted.start])
    assert [len(tokens[request]) for request in requests] == [60, 60]
    adapted.wait()
    assert {device: ledger.entries for device, ledger in ledgers.items()} == start
    assert set(references_in(adapted.store).values()) == {1}
    assert {precision for _, precision, _ in references_in(adapted.store)} == {"float32"}
    adapted.change(first)
    built.close()
    assert references_in(adapted.store) == {}
    left = [array for array in jax.live_arrays() if id(array) not in there and not array.is_deleted()]
    assert [array.shape for array in left if array.nbytes > 64] == []


def test_memory_of_tied_embeddings_is_freed_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": True}))
    built = build(EngineConfig(model=tmp_path, **(OPTIONS | SMALL)))
    (steps,) = built.instances
    embed, *_, head = steps.executor.blocks
    assert any(leaf is embed.leaves[0] for leaf in head.leaves)
    built.close()
    assert all(leaf.is_deleted() for loaded in (embed, head) for leaf in loaded.leaves)
