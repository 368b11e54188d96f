"""What holds while instances merge, split, begin and end: plans, pages, bytes, memory, and requests that leave."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from jaxserve.control.movement import Movement, movement
from jaxserve.control.plan import Plan
from jaxserve.core.errors import PlanError
from jaxserve.executor.traffic import Bytes
from tests.library.test_merge import DENSE, GREEDY, KINDS, SMALL, answers, check_same, prompt_of, written
from tests.support.internals import store_of
from tests.support.regrouped import Regrouped


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regrouped]:
    model = written(tmp_path_factory.mktemp("regroups"), DENSE)
    made = Regrouped(model, virtual_devices=6, variants=("int4",), max_kv_pages=60, **SMALL)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def go_back(engine: Regrouped) -> Iterator[None]:
    """Let every test begin with the plan of the start."""
    yield
    engine.run()
    engine.change(engine.start)
    engine.check_idle()


def requests(engine: Regrouped, count: int, length: int = 20) -> list[str]:
    kinds = list(KINDS.values())
    return [
        engine.add(prompt_of(number, 5 + length * (number % 3)), kinds[number % len(kinds)]) for number in range(count)
    ]


# -- which instances there may be


def test_four_instances_merge_and_split_at_once(engine: Regrouped) -> None:
    changes = [lambda e: e.merge(*e.names), lambda e: e.split(e.names[0], 4)]
    check_same(answers(engine, lambda e: requests(e, 12), changes), answers(engine, lambda e: requests(e, 12)))


def test_members_of_other_precisions_and_pages_are_aligned(engine: Regrouped) -> None:
    expected = answers(engine, lambda e: requests(e, 6))

    def unequal(e: Regrouped) -> None:
        plan = e.plan.with_kv_pages("1", 50)
        e.change(plan.with_kv_pages("0", 45))

    merge = lambda e: e.merge("0", "1")  # noqa: E731
    check_same(answers(engine, lambda e: requests(e, 6), [unequal, merge]), expected)
    engine.change(engine.start)
    engine.change(engine.plan.with_precisions("1", {"layers.1": "int4"}))
    name = engine.merge("0", "1")
    assert set(engine.plan.instance(name).layer_precisions) == {"float32"}


def test_instances_end_and_begin_with_40_requests_in_flight(engine: Regrouped) -> None:
    changes = [*[lambda e: e.remove(e.names[0])] * 3]
    changes += [lambda e, d=d: e.add_instance(e.plan.instances[0], d) for d in (0, 1, 5)]
    check_same(answers(engine, lambda e: requests(e, 40), changes), answers(engine, lambda e: requests(e, 40)))
    assert {device for instance in engine.plan.instances for device in instance.devices} == {0, 1, 3, 5}


def test_merge_on_devices_that_had_no_instance(engine: Regrouped) -> None:
    first = engine.plan.instances[0]

    def change(e: Regrouped) -> None:
        e.merge(e.add_instance(first, 4), e.add_instance(first, 5))

    check_same(answers(engine, lambda e: requests(e, 9), [change]), answers(engine, lambda e: requests(e, 9)))


def test_last_instance_cannot_be_removed(engine: Regrouped) -> None:
    with pytest.raises(PlanError, match="no instance"):
        engine.change(Plan(9, ()))
    with pytest.raises(PlanError, match="device 6: the devices are 0 to 5"):
        engine.add_instance(engine.plan.instances[0], 6)


# -- removed instances


def test_kv_of_a_removed_instance_is_copied_or_computed_again(engine: Regrouped) -> None:
    expected = answers(engine, lambda e: requests(e, 3))
    computed = Counter[str]()
    for count in (3, 8):

        def most_loaded(e: Regrouped, count: int = count) -> None:
            most = max(e.engine.loops.values(), key=lambda steps: len(steps.core.scheduler.running))
            before = {name: [s.num_computed for s in each] for name, each in most.core.unfinished.items()}
            e.remove(most.core.name)
            cores = [steps.core for steps in e.engine.loops.values()]
            after = {name: [s.num_computed for s in each] for core in cores for name, each in core.unfinished.items()}
            for name in before:
                computed[f"{count} {'kept' if after[name] == before[name] else 'again'}"] += 1

        found = answers(engine, lambda e, count=count: requests(e, count), [most_loaded])
        check_same(found[:3], expected)
        engine.change(engine.start)
    assert computed["3 kept"] >= 1
    assert computed["8 again"] >= 1


# -- the prefix cache


def test_prefix_of_one_member_is_found_after_the_merge_and_after_the_split(engine: Regrouped) -> None:
    prompt = prompt_of(77, 64)
    (first,) = answers(engine, lambda e: [e.add(prompt, GREEDY)])
    changes = ((), [lambda e: e.merge(*e.names)], [lambda e: e.split(e.names[0], 4)])
    for change in changes[1:]:
        for each in change:
            each(engine)
        again = answers(engine, lambda e: [e.add(prompt, GREEDY) for _ in range(4)])
        for found in again:
            assert found.outputs[0].token_ids == first.outputs[0].token_ids
        assert max(found.num_cached_tokens for found in again) == 48


# -- bytes


def test_bytes_that_cross_links_are_those_of_the_movement(engine: Regrouped) -> None:
    store, index = store_of(next(iter(engine.engine.loops.values())).executor), engine.built.resolved.devices.index

    def moved(before: Sequence[str], after: Sequence[str], plan: Plan) -> tuple[Movement, Bytes]:
        sides = [plan.instance(name) for name in before], [engine.plan.instance(name) for name in after]
        return movement(*sides, engine.resources), store.traffic.reset()

    plan, _ = engine.plan, store.traffic.reset()
    for members in (("0", "1"), ("2", "3")):
        name = engine.merge(*members)
        expected, counted = moved(members, [name], plan)
        assert (expected.bytes_by_link, counted.links, counted.host) == (0, {}, 0)
        assert counted.local == sum(expected.kept.values())
    plan = engine.plan
    parts = engine.split(name)
    expected, counted = moved([name], parts, plan)
    crossed = {(index(source), index(target)): size for (source, target), size in counted.links.items()}
    assert crossed.keys() == expected.links.keys() == {(2, 3), (3, 2)}
    for link, size in crossed.items():  # the estimate counts norms, of which every device has all, as if they were cut
        assert size == pytest.approx(expected.links[link], rel=0.002)
    assert counted.host == 0


def contents(engine: Regrouped) -> dict[Any, Any]:
    """Return the weights by device and block, and the used pages of each layer by device."""
    found: dict[Any, Any] = {}
    for steps in engine.engine.loops.values():
        for loaded in steps.executor.blocks:
            for number, leaf in enumerate(loaded.leaves):
                for shard in leaf.addressable_shards:
                    found[shard.device, loaded.block, number] = np.asarray(shard.data)
        pages = steps.core.scheduler.pages.occupied
        for layer in range(len(steps.executor.pools)):
            for (array,) in [steps.executor.pools[layer]]:
                for shard in array.addressable_shards:
                    found[shard.device, "kv", layer] = np.asarray(shard.data)[pages]
    return found


def test_way_back_is_bit_for_bit(engine: Regrouped) -> None:
    answers(engine, lambda e: requests(e, 12))
    before = contents(engine)
    engine.split(engine.merge(*engine.names), 4)
    after = contents(engine)
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key], after[key])


# -- memory


def check_arrays(engine: Regrouped) -> None:
    """Check that the ledgers count the weights and pages on each device."""
    resolved, weights, devices = engine.built.resolved, Counter[int](), engine.built.resolved.devices
    store = store_of(next(iter(engine.engine.loops.values())).executor)
    for steps in engine.engine.loops.values():
        instance = engine.plan.instance(steps.core.name)
        leaves = {id(leaf): leaf for loaded in steps.executor.blocks for leaf in loaded.leaves if not loaded.in_place}
        for leaf in leaves.values():
            share = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            weights.update({devices.index(device): share for device in leaf.sharding.device_set})
        (stage,) = instance.stages
        page = engine.resources.page_bytes(stage)
        for device in stage.devices:
            assert resolved.ledgers[device].entries["kv"] >= page * instance.kv_pages
            room = sum(segment.nbytes // stage.tp for pool in steps.executor.pools[:] for segment in pool)
            assert room == page * sum(steps.executor.pools.pages)
    held = sum(ledger.entries.get("variants", 0) for ledger in resolved.ledgers.values())
    for device, ledger in resolved.ledgers.items():
        in_place = ledger.entries.get("weights", 0) - weights[device]
        assert in_place >= 0
        held += in_place
    assert store.held_bytes <= held


def test_ledgers_count_what_is_on_the_devices(engine: Regrouped) -> None:
    def check(e: Regrouped) -> None:
        e.check_ledgers()
        check_arrays(e)

    check(engine)
    changes = [
        lambda e: e.merge("0", "1"),
        lambda e: e.change(e.plan.with_precisions(e.names[-1], {"layers.0": "int4"})),
        lambda e: e.change(e.plan.with_precisions("2", {"layers.0": "int4", "layers.1": "int4"})),
        lambda e: e.remove("3"),
        lambda e: e.split(next(i.name for i in e.plan.instances if i.tp > 1)),
    ]
    ids = requests(engine, 8)
    for change in changes:
        engine.step()
        change(engine)
        check(engine)
    engine.run()
    for name in ids:
        engine.answers.pop(name)


# -- aborts


def test_aborts_around_a_move_end_the_request(engine: Regrouped) -> None:
    ids = requests(engine, 12)
    for _ in range(4):
        engine.step()
    name = engine.merge("0", "1")
    for request in ids[::2]:
        engine.engine.abort(request)
    engine.step()
    engine.split(name)
    for request in ids[1::2]:
        engine.engine.abort(request)
    engine.run()
    engine.check_idle()
    for request in ids:
        engine.answers.pop(request, None)
