"""Conditions under which the morph policy lets layers return to full precision.

Each function returns the condition that does not hold as a text, and "" if all of its conditions hold.
"""

import math

from jaxserve.control.plan import InstancePlan
from jaxserve.control.policies.morph_load import Load, recent_of
from jaxserve.control.policies.morph_settings import MorphSettings
from jaxserve.control.policies.morph_state import MorphState
from jaxserve.control.policies.morph_texts import ms
from jaxserve.telemetry import Snapshot


def unrest(snapshot: Snapshot, state: MorphState, settings: MorphSettings) -> str:
    """Return which sign of pressure is too recent."""
    recent = recent_of(snapshot)
    window = f"in the last {recent.seconds:.0f} s"
    if (quiet := quiet_seconds(snapshot, state)) < settings.release_quiet:
        return f"quiet for {quiet:.1f} s < {settings.release_quiet:g} s"
    if snapshot.num_waiting:
        return f"{snapshot.num_waiting} waiting > 0"
    if recent.preemptions:
        return f"preemptions {window}: {recent.preemptions} > 0"
    if recent.waiting > settings.release_waiting:
        return f"mean queue {recent.waiting:.1f} > {settings.release_waiting:g}"
    # Pressure while transitions were under way, when no policy was asked.
    if recent.max_wait > settings.queue_delay:
        return f"queue delay {window}: {ms(recent.max_wait)} > {ms(settings.queue_delay)}"
    if recent.max_kv_usage > settings.kv_usage:
        return f"KV usage {window}: {recent.max_kv_usage:.1%} > {settings.kv_usage:.0%}"
    return ""


def relapse(snapshot: Snapshot, state: MorphState, settings: MorphSettings) -> str:
    """Return which earlier relapse forbids a release, until much time has passed or the load is lower."""
    past, arrivals = snapshot.time - state.relapse_time, recent_of(snapshot).arrivals_per_s or 0.0
    if past > settings.relapse_memory or arrivals <= settings.relapse_load * state.relapse_arrivals:
        return ""
    limit = f"{settings.relapse_load:.0%} of {state.relapse_arrivals:.1f}"
    remaining = settings.relapse_memory - past
    until = "" if remaining == math.inf else f", for {remaining:.0f} s more"
    return f"held after a relapse: {arrivals:.1f} arrivals/s > {limit}{until}"


def shortage(snapshot: Snapshot, plan: InstancePlan, load: Load, level: int) -> str:
    """Return why a lower level would be too small or too slow for the load."""
    settings, pages = load.settings, load.ladder.plan(level).kv_pages
    if pages < plan.kv_pages:
        used = max(_usages(snapshot, settings).values()) * snapshot.kv_pages_total
        if used > settings.release_usage * (pages - 1):
            return usage_text(snapshot, settings, ">", pages)
    lower, present = load.full_speed(level), load.full_speed(load.level)
    # Without costs, speeds only count sequences, and pages say that better.
    slower = load.ladder.capacity(level).cost is not None and lower < present
    if slower and load.tokens_per_s > settings.release_capacity * lower:
        share = f"{settings.release_capacity:.0%} of the estimated {lower:.0f} with more bits"
        return f"{load.tokens_per_s:.0f} tokens/s asked for > {share}"
    return ""


def calm_text(snapshot: Snapshot, state: MorphState, settings: MorphSettings) -> str:
    """Return why layers may return, as a text."""
    recent = recent_of(snapshot)
    return (
        f"quiet for {quiet_seconds(snapshot, state):.1f} s >= {settings.release_quiet:g} s, nothing waiting, "
        f"mean queue {recent.waiting:.1f} <= {settings.release_waiting:g}, no preemption in {recent.seconds:.0f} s"
    )


def usage_text(snapshot: Snapshot, settings: MorphSettings, relation: str, pages: int) -> str:
    """Return a text that compares the largest usage with the margin of a pool of `pages`."""
    usages = _usages(snapshot, settings)
    when = max(usages, key=lambda text: usages[text])
    used = usages[when] * snapshot.kv_pages_total
    return f"{used:.0f} pages {when} {relation} {settings.release_usage:.0%} of {pages - 1}"


def quiet_seconds(snapshot: Snapshot, state: MorphState) -> float:
    """Return for how long (s) there was no pressure."""
    assert state.quiet_since is not None
    return snapshot.time - state.quiet_since


def _usages(snapshot: Snapshot, settings: MorphSettings) -> dict[str, float]:
    """Return shares of the present KV pages that a smaller pool must hold, by a text that says when."""
    recent, horizon, now = recent_of(snapshot), settings.release_horizon, snapshot.kv_usage
    rise = max(0.0, recent.kv_trend or 0.0) * horizon
    return {"in use": now, "in use on average": recent.kv_usage, f"in use in {horizon:g} s": now + rise}
