"""Instances on real devices that drop layers and restore them in the middle of answers, which stay the same."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.actuator.host import DeviceHost
from jaxserve.control.exchange import PageExchange
from jaxserve.core.request import RequestOutput
from jaxserve.engine.core import EngineCore
from jaxserve.executor import warm_placements
from jaxserve.kernels.native import kv as native
from tests.library.test_merge import DENSE, EXPERTS, GREEDY, INT4, KINDS, answers, prompt_of, written
from tests.library.test_regroup_faults import held
from tests.support.regrouped import Change, Regrouped
from tests.support.thorough import some

OPTIONS = {
    "max_tp": None,
    "memory_gb": 1,
    "kv_pages": None,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4 + 32,
}


def drop(engine: Regrouped) -> None:
    engine.edit("drop", *engine.names)


def restore(engine: Regrouped) -> None:
    engine.edit("restore", engine.names[0])


def ask(engine: Regrouped) -> Sequence[str]:
    return [engine.add(prompt_of(number, 5 + 11 * number, 20), params) for number, params in enumerate(KINDS.values())]


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [[(answer.token_ids, answer.finish_reason) for answer in output.outputs] for output in outputs]


def run(model: Path, changes: Iterable[Change], ask: Callable[[Regrouped], Sequence[str]] = ask, **options: Any) -> Any:
    engine = Regrouped(model, **(OPTIONS | {"dp": 2, "max_pp": 2} | options))
    try:
        return told(answers(engine, ask, changes))
    finally:
        engine.close()


CASES = {
    "an odd number of layers, int8 kv": (DENSE | {"num_hidden_layers": 3}, {"kv_cache_dtype": "int8"}),
    "dense": (DENSE | {"num_hidden_layers": 4}, {}),
    "tied": (DENSE | {"tie_word_embeddings": True}, {}),
    "experts and int4": (EXPERTS | {"num_hidden_layers": 2}, INT4),
}


@pytest.mark.parametrize("case", some(CASES, 1))
def test_answers_stay_the_same(tmp_path: Path, case: str) -> None:
    config, options = CASES[case]
    model = written(tmp_path, config)
    assert run(model, [drop, restore, drop, restore], **options) == run(model, [], **options)


@pytest.mark.parametrize("elastic", some([False, True], 1))
def test_instances_with_unequal_numbers_of_pages_share_their_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    """Members may have adapted, each to its own load. Where pools have segments, they have unequal numbers of these."""
    if not elastic:
        monkeypatch.setattr(native, "supports_elastic_pools", lambda: False)
    model = written(tmp_path, DENSE | {"num_hidden_layers": 4})

    def grow_one(engine: Regrouped) -> None:
        last = engine.plan.instances[-1]
        engine.change(engine.plan.with_kv_pages(last.name, engine.resources.limits_of(1).max_pages))

    options = {"kv_pages": 40, "max_kv_pages": 90}
    assert run(model, [grow_one, drop, restore, drop], **options) == run(model, [], **options)


def test_four_instances_share_their_layers_in_two_steps(tmp_path: Path) -> None:
    model = written(tmp_path, DENSE | {"num_hidden_layers": 4})
    lanes: list[list[int]] = []

    def noted(change: Change) -> Change:
        def make(engine: Regrouped) -> None:
            change(engine)
            lanes.append([instance.lanes for instance in engine.plan.instances])

        return make

    pairs = [noted(lambda e: e.edit("drop", *[p.name for p in e.plan.instances if p.lanes == 1][:2])) for _ in range(2)]
    found = run(model, [*pairs, noted(drop), noted(restore)], dp=4, max_pp=4)
    assert lanes == [[2, 1, 1], [2, 2], [4], [1, 1, 1, 1]]
    assert found == run(model, [], dp=4, max_pp=4)


def test_pages_that_are_lost_on_their_way_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lost = written(tmp_path, DENSE | {"num_hidden_layers": 4}), []

    def receive(*_: object) -> None:
        raise RuntimeError("a link is down")

    lose = EngineCore.lose
    monkeypatch.setattr(EngineCore, "lose", lambda core, now: (lost.append(core), lose(core, now)))
    expected = run(model, [])
    monkeypatch.setattr(DeviceHost, "receive", receive)
    assert run(model, [drop, restore]) == expected
    assert len(lost) == 1 + 2, "once for the group, and once for each member"


def test_engine_that_is_closed_in_the_middle_of_an_exchange_frees_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before = written(tmp_path, DENSE | {"num_hidden_layers": 3}), held()
    monkeypatch.setattr(PageExchange, "carry_out", lambda exchange: iter(()))  # the end of which never comes
    engine = Regrouped(model, dp=2, **(OPTIONS | {"max_pp": 2}))
    ask(engine)
    for _ in range(5):
        engine.step()
    drop(engine)
    engine.close()
    assert held()[0] <= before[0]


def test_a_group_has_the_memory_of_dropped_layers_for_pages_at_once(tmp_path: Path) -> None:
    config = DENSE | {"num_hidden_layers": 4, "intermediate_size": 32768, "max_position_embeddings": 65536}
    options = OPTIONS | {"max_pp": 2, "memory_gb": 0.88, "max_model_len": 16384}
    engine = Regrouped(written(tmp_path, config), dp=2, **options)
    try:
        before = sum(instance.kv_pages for instance in engine.plan.instances)
        ids = [engine.add(prompt_of(0, 40), dataclasses.replace(GREEDY, max_tokens=60))]
        for _ in range(5):
            engine.step()
        drop(engine)
        (group,) = engine.plan.instances
        assert group.kv_pages > 1.5 * before
        assert engine.engine.loops[group.name].core.scheduler.pages.num_pages == group.kv_pages
        engine.check_ledgers()
        engine.run()
        restore(engine)
        assert sum(instance.kv_pages for instance in engine.plan.instances) == before
        engine.check_ledgers()
        assert len(engine.answers[ids[0]].outputs[0].token_ids) == 60
    finally:
        engine.close()


def test_nothing_is_compiled_while_layers_are_dropped_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_placements, "MAX_PAUSE_S", 0)
    options = OPTIONS | {"max_pp": 2, "max_num_seqs": 2, "max_num_batched_tokens": 2 + 32, "variants": ("float32",)}
    engine = Regrouped(written(tmp_path, DENSE), dp=2, **(options | {"warmup": True, "fuse": None}))
    try:
        engine.built.warm.wait()
        before = dict(engine.built.compilations.counts)
        for change in (drop, restore, drop):
            ask(engine)
            for _ in range(5):
                engine.step()
            change(engine)
            engine.run()
            assert engine.built.compilations.counts == before, change.__name__
    finally:
        engine.close()
