"""The canary that other tests keep in the KV pages fails when something goes wrong with the pages."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.build import build
from jaxserve.core.config import EngineConfig
from jaxserve.core.work import Work
from jaxserve.engine.loop import StepLoop
from jaxserve.kernels import Pool
from tests.actuator.adapted import GREEDY, OPTIONS, Adapted, prompt
from tests.support.internals import (
    cached_pages,
    free_pages,
    hashes_of_pages,
    pages_of_hashes,
    wrap_move_batch,
    wrap_rename,
)

Break = Callable[[StepLoop, pytest.MonkeyPatch], None]


def nothing(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    pass


def moves_go_astray(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    shrink = steps.executor.pools.shrink
    patch.setattr(
        steps.executor.pools,
        "shrink",
        lambda moves, pages: shrink(dict(zip(moves, reversed(moves.values()), strict=True)), pages),
    )


def moves_leave_a_layer_out(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    calls = []

    def wrap(move: Callable) -> Callable:
        def moved(pool: Pool, pairs: list) -> Pool:
            calls.append(pairs)
            return pool if len(calls) == 2 else move(pool, pairs)

        return moved

    wrap_move_batch(patch, steps.executor.pools, wrap)


def moves_come_after_the_next_step(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    late, execute, shrink = [], steps.executor.execute, steps.executor.pools.shrink

    def executed(work: Work) -> Any:
        pending = execute(work)
        while late:
            shrink(*late.pop())
        return pending

    patch.setattr(steps.executor, "execute", executed)
    patch.setattr(steps.executor.pools, "shrink", lambda *moves: late.append(moves))


def write_elsewhere(steps: StepLoop, patch: pytest.MonkeyPatch, pages: Callable[[], Iterable[int]]) -> None:
    """Make a step with a single decode write its token to the first of these pages."""
    execute, rows = steps.executor.execute, steps.core.scheduler.table.rows

    def executed(work: Work) -> Any:
        others = [*pages()]
        if len(work.decodes) != 1 or not others:
            return execute(work)
        (sequence,) = work.decodes
        place = sequence.slot, (sequence.num_computed - 1) // 16
        own, rows[place] = rows[place], others[0]
        pending = execute(work)
        rows[place] = own
        return pending

    patch.setattr(steps.executor, "execute", executed)


def a_step_writes_to_a_free_page(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    write_elsewhere(steps, patch, lambda: free_pages(steps.core.scheduler.pages))


def a_step_writes_to_a_cached_page(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    write_elsewhere(steps, patch, lambda: cached_pages(steps.core.scheduler.pages))


def tables_keep_what_pages_were_called(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps.core.scheduler.table, "replace_pages", lambda moves: None)


def pages_of_a_sequence_change_places(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    scheduler, shrink = steps.core.scheduler, steps.core.scheduler.shrink

    def shrunk(*arguments: Any) -> None:
        shrink(*arguments)
        (sequence,) = scheduler.running
        sequence.pages[:2] = sequence.pages[1::-1]
        scheduler.table.append(sequence.slot, 0, sequence.pages)

    patch.setattr(scheduler, "shrink", shrunk)


def names_of_the_cache_change_places(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    pages = steps.core.scheduler.pages

    def wrap(rename: Callable) -> Callable:
        def renamed(moves: dict[int, int]) -> None:
            rename(moves)
            found = pages_of_hashes(pages)
            one, other, *_ = found
            names = {one: found[other], other: found[one]}
            found.update(names)
            hashes_of_pages(pages).update({page: digest for digest, page in names.items()})

        return renamed

    wrap_rename(patch, pages, wrap)


def a_page_is_not_given_back(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    pages, release = steps.core.scheduler.pages, steps.core.scheduler.pages.release
    patch.setattr(pages, "release", lambda held: release(held[1:]))


def a_page_is_given_out_that_stays_free(steps: StepLoop, patch: pytest.MonkeyPatch) -> None:
    pages, allocate = steps.core.scheduler.pages, steps.core.scheduler.pages.allocate

    def allocated(count: int, *beside: object) -> list[int]:
        given = allocate(count)
        free_pages(pages).extend(given[:1])
        return given

    patch.setattr(pages, "allocate", allocated)


CHANGED, RENAMED, LOST = "changed without a write or a move", "holders whose tokens changed", "lost, or in two places"
BREAKS = {
    moves_go_astray: CHANGED,
    moves_leave_a_layer_out: CHANGED,
    moves_come_after_the_next_step: CHANGED,
    a_step_writes_to_a_free_page: CHANGED,
    a_step_writes_to_a_cached_page: CHANGED,
    tables_keep_what_pages_were_called: "differs from the sequence's pages",
    pages_of_a_sequence_change_places: RENAMED,
    names_of_the_cache_change_places: RENAMED,
    a_page_is_not_given_back: LOST,
    a_page_is_given_out_that_stays_free: LOST,
}


@pytest.mark.parametrize("broken", [nothing, *BREAKS])
def test_canary_fails_for_each_kind_of_page_corruption(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, broken: Break
) -> None:
    """Pages of a request and of the cache move out of the tail while the device has a step."""
    built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    (steps,) = built.instances
    broken(steps, monkeypatch)
    adapted, moved = Adapted(built), []
    wrap_move_batch(
        monkeypatch,
        steps.executor.pools,
        lambda move: lambda pool, pairs: moved.append(pairs) or move(pool, pairs),
    )

    def run() -> None:
        tokens: dict[str, tuple[int, ...]] = {}
        few = replace(GREEDY, max_tokens=8)
        adapted.add(prompt(41, 60), few)
        adapted.run(tokens)
        filling, _ = adapted.add(prompt(42, 200), few), adapted.add(prompt(43, 60), GREEDY)
        while len(tokens.get(filling, ())) < 8:
            adapted.step(tokens)
        adapted.begin(adapted.plan.with_kv_pages("0", 17))
        while not adapted.settled():
            adapted.step(tokens)
        adapted.run(tokens)

    if broken is nothing:
        run()
        assert any(len(pairs) > 4 for pairs in moved), [len(pairs) for pairs in moved]
    else:
        with pytest.raises(AssertionError, match=BREAKS[broken]):
            run()
    built.close()
