"""What an instance has to serve, and the level of its ladder and the sequences at once that serve it well enough."""

import math
from dataclasses import dataclass, replace

from jaxserve.control.capacity import Workload
from jaxserve.control.policies.ladder import Ladder
from jaxserve.control.policies.morph_settings import MorphSettings
from jaxserve.control.policies.morph_state import MorphState
from jaxserve.control.policies.morph_texts import ms
from jaxserve.control.resources import Resources
from jaxserve.telemetry import Recent, Snapshot

EXHAUSTION = 2.0  # s; pages that are expected to last longer are not short
LASTING = 0.6  # s for which sequences have waited too long after which the shortage is no matter of moments
AHEAD = 5.0  # s for which what arrives and is not served is looked ahead
AT_RISK = 0.25  # share of `slo_ttft` after which a waiting sequence lifts the limit on sequences
NO_SLOWER = 1.1  # factor on the time per token up to which steps count as no slower
HEADROOM = 1.2  # factor on the load that a limit on sequences leaves room for
DOUBT = 1.15  # factor on the gain that is asked for, as long as full precision has turned out to be better lately
PRICE = 1.0  # share by which answers must come sooner for each share by which the cross-entropy rises
SPAN = 5.0  # s; what arrives within less time tells of a burst, and not of a load
LATE = 2.0  # how often the seconds count by which first tokens would come later than the objective allows
MAX_GROWTH = 2.0  # factor by which the running sequences may be expected to grow within `EXHAUSTION`


@dataclass(frozen=True)
class Load:
    """The load of an instance, and how well each level of its ladder would serve it."""

    settings: MorphSettings
    ladder: Ladder
    level: int  # the present one
    workload: Workload
    running: int  # sequences
    waiting: int  # sequences
    expected: int  # sequences that wait, or are expected to
    waited: float  # s that the oldest sequence has waited
    tpot: float  # s per output token; 0 if none came lately
    tokens_per_s: float  # generated tokens that the arriving sequences ask for
    usage: float  # share of the KV pages that is expected to be in use `EXHAUSTION` seconds from now
    biases: tuple[float, float]  # seconds of steps as multiples of those expected, on level 0 and on other levels
    lasting: bool  # whether sequences have waited all the time lately
    cautious: bool  # as full precision has turned out to be better lately

    @classmethod
    def of(cls, snapshot: Snapshot, state: MorphState, resources: Resources, settings: MorphSettings) -> "Load":
        """Return the load of an instance, with estimates that the steps so far have corrected."""
        recent, workload = recent_of(snapshot), state.workload(snapshot, resources.page_size)
        usage = snapshot.kv_usage + EXHAUSTION * max(0.0, recent.kv_trend or 0.0)
        growth = min(usage / snapshot.kv_usage, MAX_GROWTH) if snapshot.kv_usage else 1.0
        more = math.ceil(snapshot.num_running * growth) - snapshot.num_running
        load = cls(
            settings,
            state.ladder,
            state.level,
            workload,
            running=snapshot.num_running,
            waiting=snapshot.num_waiting,
            expected=snapshot.num_waiting,
            waited=snapshot.oldest_wait,
            tpot=recent.tpot or 0.0,
            tokens_per_s=(recent.arrivals_per_s or 0.0) * min(1.0, recent.seconds / SPAN) * workload.answer,
            usage=usage,
            biases=state.with_steps(snapshot).biases(snapshot.time, settings.relapse_memory),
            lasting=state.waiting_since is not None and snapshot.time - state.waiting_since >= LASTING,
            cautious=snapshot.time - state.last_harm <= settings.relapse_memory,
        )
        # The trend would have the pages fill up at every begin of a load. No more sequences come to run at once than
        # arrive while one is answered.
        at_once = math.ceil(load.tokens_per_s * load.seconds_per_token(load.level, max(1, load.running)))
        return replace(load, expected=max(load.waiting, min(more, at_once - load.running)))

    # -- estimates

    def room(self, level: int) -> int:
        """Return how many sequences a level has room for: at least what runs now, if it has as many pages."""
        room = self.ladder.capacity(level).sequences(self.workload)
        more = self.ladder.plan(level).kv_pages >= self.ladder.plan(self.level).kv_pages
        return max(room, self.running) if more else room

    def seconds_per_token(self, level: int, sequences: int) -> float:
        """Return the time (s) between two tokens of a sequence while `sequences` run."""
        speed = self.ladder.capacity(level).tokens_per_s(self.workload, sequences)
        return sequences / speed * self.biases[level > 0]

    def full_speed(self, level: int) -> float:
        """Return the tokens/s of a level while it is full."""
        return self.room(level) / self.seconds_per_token(level, self.room(level))

    def seconds_to_start(self, level: int, waiting: int | None = None) -> float:
        """Return the time (s) until the last of `waiting` sequences, by default those expected, starts on a level."""
        capacity, waiting = self.ladder.capacity(level), self.expected if waiting is None else waiting
        seconds = capacity.seconds_to_start(self.workload, self.running, waiting, self.room(level))
        return seconds * self.biases[level > 0]

    def last_wait(self, level: int) -> float:
        """Return the time (s) within which the last waiting sequence has its first token on a level.

        As it may have come with the oldest one, it is taken to have waited as long.
        """
        return self.waited + self.seconds_to_start(level)

    def keeps_up(self, level: int) -> bool:
        """Return whether a level serves what arrives, or at least no less of it than the present level does.

        Room for more sequences does not outlast a load that a level serves more slowly.
        """
        return self.full_speed(level) >= min(self.tokens_per_s, self.full_speed(self.level))

    @property
    def behind(self) -> bool:
        """True if more arrives than the present level serves."""
        return self.tokens_per_s > self.full_speed(self.level)

    @property
    def loses(self) -> bool:
        """True if more arrives than the present level serves, and full precision serves more of it."""
        return self.behind and self.full_speed(0) >= self.settings.min_gain * self.full_speed(self.level)

    # -- the objectives

    @property
    def allowed_wait(self) -> float:
        """The time (s) within which the last waiting sequence should have its first token."""
        return self.settings.hold * self.settings.slo_ttft

    @property
    def at_risk(self) -> bool:
        """True if first tokens may come late unless more sequences run."""
        return self.waited > AT_RISK * self.settings.slo_ttft or self.last_wait(self.level) > self.allowed_wait

    def relief(self) -> str:
        """Return why the present level is expected to hold the objectives, as a text; "" if it is not.

        While sequences have waited for long, the next one's start says little.
        """
        if self.tpot > self.settings.slo_tpot or self.lasting:
            return ""
        if not self.expected:
            return f"nothing waits, and {self.need()}"
        limit = self.allowed_wait / 2 if self.behind else self.allowed_wait
        return f"{self.need()} < {ms(self.allowed_wait)}" if self.last_wait(self.level) < limit else ""

    def need(self) -> str:
        """Return what the present level is expected to come to, as a text."""
        within = f"expected to start within {ms(self.last_wait(self.level))}"
        if self.waiting:
            return f"the last of {self.waiting} waiting is {within}"
        usage = f"{self.usage:.0%} of the pages are expected to be in use in {EXHAUSTION:g} s"
        return f"{usage}, and the last of {self.expected} sequences more is {within}" if self.expected else usage

    # -- choices

    def cost(self, level: int) -> float:
        """Return the time (s) until the sequences that run and wait have their answers, on average, with its price.

        - Those count too that come within `AHEAD` seconds and find no room, because more arrives than the level serves.
        - Sequences that run are in the middle of their answers. If the level has no room for all, some wait again.
        - First tokens that come later than the objective allows count `LATE` times more.
        - The price is that of the quality which a level loses.
        """
        answer, room, speed = self.workload.answer, self.room(level), self.full_speed(level)
        unserved = max(0.0, self._sure_tokens_per_s - speed)
        waiting = self.expected + math.ceil(AHEAD * unserved / answer)
        if not self.running and not waiting:
            return 0.0
        each = answer * self.seconds_per_token(level, max(1, min(room, self.running + waiting)))
        last = self.seconds_to_start(level, waiting)
        late = max(0.0, self.waited + last - self.allowed_wait)
        displaced = max(0, self.running - room)
        seconds = waiting * (last / 2 + each + LATE * late) + self.running * each / 2
        seconds += displaced * displaced * answer / speed
        return seconds / (waiting + self.running) * (1 + PRICE * self.ladder.loss_at(level))

    @property
    def _sure_tokens_per_s(self) -> float:
        """The generated tokens/s that arriving sequences ask for, less what may be chance in `SPAN` seconds."""
        arrivals = self.tokens_per_s / self.workload.answer
        return max(0.0, arrivals - math.sqrt(arrivals / SPAN)) * self.workload.answer

    def better_level(self) -> int:
        """Return the lowest level that is expected to serve the load in time, or else the one that serves it best.

        The levels that are tried are further and further up. Return the present level if none is enough of a gain.
        """
        gain = self.settings.min_gain * (DOUBT if self.cautious else 1.0)
        best, least = self.level, self.cost(self.level) / gain
        for level in self._higher_levels():
            cost = self.cost(level)
            if cost < least and self.keeps_up(level) and self._is_worth_it(level):
                best, least = level, cost
                enough = self._in_time(level) and self.full_speed(level) >= self.tokens_per_s
                # As long as nothing waits, the first better level is enough.
                if enough or (self.expected and not self.waiting):
                    break
        return best

    def _in_time(self, level: int) -> bool:
        if self.expected:
            return self.last_wait(level) <= self.allowed_wait
        return self.seconds_per_token(level, max(1, self.running)) <= self.settings.slo_tpot

    def _is_worth_it(self, level: int) -> bool:
        """Return whether the sequences that run pay no more than those that wait gain.

        Slower steps are a price for sequences that wait, but not for those that are only expected to.
        """
        running = max(1, self.running)
        slower = self.seconds_per_token(level, running) / self.seconds_per_token(self.level, running)
        return self.waiting > 0 or slower <= NO_SLOWER

    def _higher_levels(self) -> list[int]:
        """Return the levels that a decision may climb to, the nearest first.

        Where pools grow by segments, several levels have equally many pages: the lowest of them is among these.
        """
        settings, top = self.settings, self.ladder.top
        urgent = self.waited >= settings.urgent_delay * settings.slo_ttft
        step, levels = settings.urgent_layers if urgent else settings.entry_layers, [self.level]
        while levels[-1] < top:
            levels.append(min(self.level + step, top))
            step *= 2
        lowest = (self.ladder.lowest_with_pages_of(level) for level in levels[1:])
        return sorted({level for level in (*levels, *lowest) if level > self.level})

    def max_num_seqs(self, level: int) -> int | None:
        """Return how many sequences should run at once on a level: few, while first tokens come in time. None: all."""
        if not level:
            return self.ladder.initial.max_num_seqs
        if not self.settings.few or self.at_risk:
            return None
        most = self.room(level)
        sequences = min(most, self.room(0))
        while sequences < most and self._speed(level, sequences) < HEADROOM * self.tokens_per_s:
            sequences = min(most, max(sequences + 1, sequences * 5 // 4))
        while sequences > 1 and self.seconds_per_token(level, sequences) > self.settings.slo_tpot:
            sequences -= 1
        # A limit that nothing reaches would only be a further change.
        return None if sequences >= min(most, self.running) else sequences

    def _speed(self, level: int, sequences: int) -> float:
        return sequences / self.seconds_per_token(level, sequences)


def recent_of(snapshot: Snapshot) -> Recent:
    """Return the recent past, which the controller has set."""
    assert snapshot.recent is not None
    return snapshot.recent
