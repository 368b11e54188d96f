"""The recent past of an engine: means, trends and quantiles over a short window, whatever the clock does."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from random import Random

import pytest
from hypothesis import given, strategies as st

from jaxserve.telemetry import TIME_BOUNDS, Recent, Smoother, Snapshot
from jaxserve.telemetry.windows import RESOLUTION, quantile
from tests.support.internals import kept_snapshots


class Specification:
    """What a `Smoother` should do: keep the snapshots of the window, and summarise all of them at each observation."""

    def __init__(self, window: float):
        self.window = window
        self.seen: list[Snapshot] = []

    def observe(self, snapshot: Snapshot) -> Recent:
        seen = self.seen
        if len(seen) > 1 and snapshot.time - seen[-2].time < self.window / RESOLUTION:
            seen.pop()
        while seen and seen[-1].time >= snapshot.time:
            seen.pop()
        seen.append(snapshot)
        while len(seen) > 1 and seen[1].time <= snapshot.time - self.window:
            seen.pop(0)
        return summary(seen)


def summary(snapshots: Sequence[Snapshot]) -> Recent:
    first, last, count = snapshots[0], snapshots[-1], len(snapshots)
    seconds = last.time - first.time
    pages = max(1, last.kv_pages_total)
    gaps, gap_seconds = last.gaps - first.gaps, last.gap_seconds - first.gap_seconds
    before, after = (s.first_tokens or (0,) * (len(TIME_BOUNDS) + 1) for s in (first, last))
    arrivals = [s.finished + s.num_running + s.num_waiting for s in (first, last)]
    return Recent(
        seconds=seconds,
        kv_usage=sum(s.kv_pages_used for s in snapshots) / count / pages,
        kv_trend=slope(snapshots) / pages if seconds > 0 else None,
        waiting=sum(s.num_waiting for s in snapshots) / count,
        queue_delay=sum(s.oldest_wait for s in snapshots) / count,
        preemptions=last.preemptions - first.preemptions,
        ttft_p95=quantile([b - a for a, b in zip(before, after, strict=True)], 0.95),
        tpot=gap_seconds / gaps if gaps > 0 else None,
        tokens_per_s=(last.generated_tokens - first.generated_tokens) / seconds if seconds > 0 else None,
        arrivals_per_s=max(0, arrivals[1] - arrivals[0]) / seconds if seconds > 0 else None,
        max_kv_usage=max(s.kv_usage for s in snapshots),
        max_wait=max(s.oldest_wait for s in snapshots),
    )


def slope(snapshots: Sequence[Snapshot]) -> float:
    start, count = snapshots[0].time, len(snapshots)
    mean_time = sum(s.time - start for s in snapshots) / count
    mean_used = sum(s.kv_pages_used for s in snapshots) / count
    covariance = sum((s.time - start - mean_time) * (s.kv_pages_used - mean_used) for s in snapshots)
    return covariance / sum((s.time - start - mean_time) ** 2 for s in snapshots)


def assert_same(found: Recent, wanted: Recent) -> None:
    for name, value in asdict(wanted).items():
        assert getattr(found, name) == (value if value is None else pytest.approx(value, rel=1e-6, abs=1e-7)), name


def history(seed: int, count: int) -> list[Snapshot]:
    """Return snapshots of an engine that is resized and restarted, with a clock that stands still, jumps and goes back.

    With some seeds the time is long after the clock's start.
    """
    rng, snapshots = Random(seed), []
    zero = (0,) * (len(TIME_BOUNDS) + 1)
    start = Snapshot(time=rng.choice([0.0, 1e7]))
    last = start
    for _ in range(count):
        if rng.random() < 0.1:
            last = replace(start, time=last.time, first_tokens=rng.choice([(), zero]))
        first_tokens = list(last.first_tokens or zero)
        first_tokens[rng.randrange(len(zero))] += rng.randrange(3)
        gaps = rng.choice([0, rng.randrange(500)])
        last = Snapshot(
            time=last.time + rng.choice([0, rng.randrange(20), 100, 100, rng.randrange(-300, 3000)]) / 1000,
            num_running=rng.randrange(9),
            num_waiting=rng.randrange(9),
            kv_pages_total=rng.choice([0, 100, 200]),
            kv_pages_used=rng.randrange(100),
            oldest_wait=rng.choice([0.0, 0.1, 0.25, 10 * rng.random()]),
            preemptions=last.preemptions + rng.randrange(3),
            generated_tokens=last.generated_tokens + rng.randrange(500),
            finished=last.finished + rng.randrange(3),
            first_tokens=last.first_tokens if rng.random() < 0.5 else tuple(first_tokens),
            gaps=last.gaps + gaps,
            gap_seconds=last.gap_seconds + 0.02 * gaps,
        )
        snapshots.append(last)
    return snapshots


HISTORIES = st.builds(history, st.integers(0, 2**32), st.integers(1, 150))


def recent(*snapshots: Snapshot, window: float = 5.0) -> Recent:
    """Return the recent past after the last of these snapshots."""
    smoother = Smoother(window)
    for snapshot in snapshots:
        seen = smoother.observe(snapshot).recent
    assert seen is not None
    return seen


def worst(snapshots: list[Snapshot]) -> tuple[float, float]:
    past = recent(*snapshots)
    return past.max_kv_usage, past.max_wait


def every(seconds: float, count: int, **values: object) -> list[Snapshot]:
    return [Snapshot(time=number * seconds, **values) for number in range(count)]  # type: ignore[arg-type]


@given(HISTORIES, st.sampled_from([0.5, 2.0, 10.0]))
def test_running_sums_equal_a_summary_of_all_snapshots_of_the_window(snapshots: list[Snapshot], window: float) -> None:
    smoother, specification = Smoother(window), Specification(window)
    found = [smoother.observe(snapshot) for snapshot in snapshots]
    wanted = [specification.observe(snapshot) for snapshot in snapshots]
    for snapshot, seen, expected in zip(snapshots, found, wanted, strict=True):
        assert replace(seen, recent=None) == snapshot
        assert seen.recent is not None
        assert_same(seen.recent, expected)  # computed only now, when later snapshots have been seen
    assert kept_snapshots(smoother) == specification.seen


def test_running_sums_do_not_drift() -> None:
    many = [
        Snapshot(
            time=1e6 + number / 10,
            num_waiting=number % 7,
            kv_pages_total=1_000_000,
            kv_pages_used=999_999 - number % 5,
            oldest_wait=0.1 * (number % 11),
        )
        for number in range(36_000)
    ]
    assert_same(recent(*many), recent(*many[-100:]))
    assert_same(recent(*many), summary(many[-51:]))


@given(HISTORIES, st.floats(-1, 3))
def test_observing_at_a_later_time_is_observing_the_moved_snapshot(snapshots: list[Snapshot], later: float) -> None:
    one, other = Smoother(), Smoother()
    for snapshot in snapshots:
        now = snapshot.time + later
        assert one.observe(snapshot, now) == other.observe(snapshot.at(now))


def test_an_observed_snapshot_may_be_observed_again_without_keeping_the_past_in_memory() -> None:
    smoother, snapshot = Smoother(), Snapshot()
    for _ in range(3):
        snapshot = smoother.observe(snapshot, snapshot.time + 1)
    assert {kept.recent for kept in kept_snapshots(smoother)} == {None}


def test_single_snapshot_gives_levels_and_no_rates() -> None:
    seen = recent(Snapshot(time=3, kv_pages_total=100, kv_pages_used=40, num_waiting=2, oldest_wait=0.25))
    assert seen == Recent(0.0, 0.4, None, 2.0, 0.25, 0, None, None, None, None, 0.4, 0.25)


def test_peaks_are_remembered_for_one_window() -> None:
    calm = [Snapshot(time=number / 10, kv_pages_total=100) for number in range(200)]
    bad = replace(calm[20], kv_pages_total=50, kv_pages_used=45, oldest_wait=0.7)
    history = [*calm[:20], bad, *calm[21:]]
    assert worst(history[:21]) == worst(history[:70]) == (0.9, 0.7)
    assert worst(history[:20]) == worst(history[:73]) == (0.0, 0.0)


def test_values_older_than_the_window_are_forgotten() -> None:
    busy = every(0.5, 10, num_waiting=8, oldest_wait=1.0, preemptions=3)
    quiet = [Snapshot(time=5 + 0.5 * n, preemptions=3) for n in range(11)]
    seen = recent(*busy, *quiet)
    assert (seen.waiting, seen.queue_delay, seen.preemptions, seen.seconds) == (0, 0, 0, 5.0)
    assert recent(*busy, *quiet[:5]).waiting > 3


def test_rates_cover_the_window() -> None:
    rising = [
        Snapshot(
            time=float(n), preemptions=n, generated_tokens=50 * n, gaps=10 * n, gap_seconds=0.2 * n, finished=2 * n,
            num_running=n,
        )
        for n in range(20)
    ]  # fmt: skip
    seen = recent(*rising)
    assert seen.preemptions == 5
    assert seen.tokens_per_s == pytest.approx(50)
    assert seen.tpot == pytest.approx(0.02)
    assert seen.arrivals_per_s == pytest.approx(3)


def test_kv_trend_counts_pages_and_ignores_pool_resizes() -> None:
    total = [100] * 5 + [200] * 6
    steady = [Snapshot(time=float(n), kv_pages_total=total[n], kv_pages_used=50) for n in range(11)]
    assert recent(*steady).kv_trend == pytest.approx(0)
    assert recent(*steady).kv_usage == pytest.approx(0.25)
    rising = [replace(s, kv_pages_used=50 + 4 * n) for n, s in enumerate(steady)]
    assert recent(*rising).kv_trend == pytest.approx(4 / 200)


def test_ttft_p95_covers_first_tokens_in_the_window() -> None:
    zero = (0,) * (len(TIME_BOUNDS) + 1)
    before = tuple(100 if bound == 50.0 else 0 for bound in (*TIME_BOUNDS, 0))
    after = tuple(count + (20 if bound == 0.2 else 0) for count, bound in zip(before, (*TIME_BOUNDS, 0), strict=True))
    old, new = Snapshot(first_tokens=before), Snapshot(time=4, first_tokens=after)
    assert recent(old, new).ttft_p95 == pytest.approx(0.1 + 0.95 * 0.1)
    assert recent(Snapshot(first_tokens=zero), old).ttft_p95 is None, "a clock that stands still: one snapshot"
    assert recent(Snapshot(first_tokens=zero), replace(old, time=1)).ttft_p95 == pytest.approx(20 + 0.95 * 30)


@given(st.lists(st.floats(0.0011, 900.0), min_size=1, max_size=50), st.floats(0.05, 1.0))
def test_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    counts = [sum(low < v <= high for v in values) for low, high in zip((0, *TIME_BOUNDS), TIME_BOUNDS, strict=False)]
    estimate = quantile((*counts, 0), share)
    ordered = sorted(values)
    true = ordered[max(0, -int(-share * len(values) // 1) - 1)]
    high = min(bound for bound in TIME_BOUNDS if bound >= true)
    low = max((bound for bound in TIME_BOUNDS if bound < true), default=0.0)
    assert estimate is not None
    assert low - 1e-9 <= estimate <= high + 1e-9


def test_quantile_beyond_the_last_bound_is_the_last_bound() -> None:
    assert quantile((0,) * len(TIME_BOUNDS) + (5,), 0.95) == TIME_BOUNDS[-1]
    assert quantile((), 0.95) is None


def test_snapshot_at_an_unchanged_time_replaces_the_previous_one() -> None:
    smoother = Smoother(5)
    for waiting in (1, 2, 3):
        seen = smoother.observe(Snapshot(time=1.0, num_waiting=waiting)).recent
    assert seen is not None
    assert (seen.waiting, seen.seconds) == (3, 0)


@given(st.lists(st.floats(0, 100), max_size=300))
def test_kept_snapshots_are_few_and_sorted_for_any_clock(times: list[float]) -> None:
    smoother = Smoother(1.0)
    for number, time in enumerate(times):
        seen = smoother.observe(Snapshot(time=time, generated_tokens=number)).recent
        assert seen is not None
        assert seen.seconds >= 0
        assert len(kept_snapshots(smoother)) <= 2 * RESOLUTION + 3
        kept = [s.time for s in kept_snapshots(smoother)]
        assert kept == sorted(set(kept))


def test_frequent_snapshots_are_thinned_without_losing_counts() -> None:
    many = [Snapshot(time=0.001 * n, generated_tokens=n) for n in range(20_000)]
    smoother = Smoother(5)
    for snapshot in many:
        seen = smoother.observe(snapshot).recent
    assert seen is not None
    assert len(kept_snapshots(smoother)) < 2 * RESOLUTION + 3
    assert seen.tokens_per_s == pytest.approx(1000)
    assert seen.seconds == pytest.approx(5, abs=0.1)


def test_snapshot_seen_later_has_a_longer_oldest_wait() -> None:
    idle, stuck = Snapshot(time=10), Snapshot(time=10, num_waiting=1, oldest_wait=0.5)
    assert idle.at(12) == replace(idle, time=12)
    assert stuck.at(12) == replace(stuck, time=12, oldest_wait=2.5)
    assert stuck.at(9) == stuck
