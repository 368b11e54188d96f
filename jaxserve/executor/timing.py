"""Timing of steps before an engine serves, from which policies learn what a precision costs on this machine.

Real steps run through the executor on sequences that nobody asked for. A step with some decoder layers is compared with
one without any; the difference is the time of these layers. Of a large model only a few layers are timed.

Full precision and one variant take turns, so that a busy machine is no disadvantage for either. The fastest of several
repetitions counts, because whatever else the machine does only makes steps slower. A time that is not found twice, or
that no layer can take (`time_bounds.py`), is measured again, and left out in the end: other numbers of rows tell what
it would be. These steps run block by block.

Where fast steps that only decode are fused before the engine serves, each such assignment of precisions is timed too.

At most one variant is loaded at a time, unless its layers run on variants that are in memory anyway.

The times are cached next to the compiled programs, for the model's configuration, the code, the machine, and all that
determines the steps.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Items
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from jaxserve.compilation.cache import persistent_folder, write_json
from jaxserve.compilation.saved import fingerprint
from jaxserve.control import InstancePlan
from jaxserve.control.costs import USUAL_ROWS, Curve, LayerCosts, MeasuredCosts
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.config import ModelConfig
from jaxserve.core.machine import processors
from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Request, Sequence
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_shapes import StepShape, smallest_holding
from jaxserve.core.work import Chunk, Work
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.time_bounds import (
    bounded,
    is_confirmed,
    least_seconds,
    possible,
    without,
    without_attention,
)
from jaxserve.parallel.placement import Placement

log = logging.getLogger(__name__)

FORMAT = 3  # of cached times
FOLDER = "jaxserve-costs"  # in the folder of JAX's cache
MAX_FILES = 64

BUDGET_S = 1.0  # time that all trials together should take
MAX_S = 2.0  # time after which only the two most important cases are timed
MIN_CASES = 2
MIN_ROUNDS, MAX_ROUNDS = 3, 7  # repetitions of each trial; fewer if one round takes longer than its share
MOST_ROUNDS = 20  # where least times are not found twice
MAX_ATTEMPTS = 4  # to find times that layers can take
# Consecutive fast steps over which the mean is taken: short, so that few are interrupted by other work.
WINDOW = 3
BURST_S = 0.003  # time for which fast steps run before another trial takes its turn
FUSED_S = 0.02  # steps that take longer gain little by being fused, and whole ones would take long to time
ALONE_S = 0.002  # a step that takes longer is timed alone, as the host's work between steps hardly matters

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Trial:
    """A step to be timed, the decoder layers that it runs through, and whether all that it runs is one program."""

    work: Work
    layers: tuple[LoadedBlock, ...]
    fused: bool = False


@dataclass(frozen=True)
class Case:
    """A step to be timed."""

    work: Work
    shape: StepShape

    @property
    def context(self) -> int:
        """The sum of the tokens that the decodes attend to (`StepLoad.context`)."""
        return sum(sequence.num_computed for sequence in self.work.decodes)

    @property
    def prefill(self) -> int:
        """The load of the chunks' attention (`StepLoad.prefill`)."""
        return sum(chunk.length * (chunk.start + chunk.length + 1) for chunk in self.work.chunks)


class Cases:
    """The steps to be timed, of sequences in all slots of an executor's page table and on all of its KV pages."""

    def __init__(self, executor: BlockExecutor, vocab: int, kv_pages: int):
        self._buckets, self._page_size = executor.buckets, executor.page_size
        self._vocab, self._usable_pages, self._rows = vocab, kv_pages - 1, executor.table.rows
        self.max_len = min(executor.table.width * self._page_size, executor.sampler.max_len) - 1

    @contextmanager
    def pages(self) -> Iterator[None]:
        """Give every slot all pages of a sequence. Several slots share pages if there are too few."""
        slots, width = self._rows.shape
        for slot in range(slots):
            # The first pages of all slots lie next to each other, so that few pages need memory.
            self._rows[slot] = [1 + (page * slots + slot) % self._usable_pages for page in range(width)]
        try:
            yield
        finally:
            self._rows[:] = 0

    def main(self) -> list[Case]:
        """Return steps of few to many decode rows and prefill tiles, the most important first."""
        decodes, tiles = self._buckets.decodes, self._buckets.tiles
        rows = [smallest_holding(decodes, min(size, decodes[-1])) for size in (USUAL_ROWS, 1, decodes[-1], 16)]
        usual, *others = dict.fromkeys(rows)
        # Steps with prefill have more tokens than those that only decode: one curve has both.
        few = next((n for n in tiles if n * self._buckets.tile > decodes[-1]), tiles[-1])
        cases = [self.decodes(usual, 1), self.prefill(tiles[-1]), *(self.decodes(row, 1) for row in others)]
        return [*cases, self.prefill(few)] if few < tiles[-1] else cases

    def decodes(self, rows: int, context: int) -> Case:
        """Return a step of some decode rows with equally long contexts."""
        return self._case(decodes=tuple(self._sequence(slot, 1, context) for slot in range(rows)))

    def long_decodes(self) -> Case:
        """Return a step of the usual decode rows, with the longest contexts that have pages of their own."""
        rows = min(USUAL_ROWS, self._buckets.max_num_seqs, self._usable_pages)
        return self.decodes(rows, min(self.max_len, self._usable_pages // rows * self._page_size))

    def prefill(self, tiles: int) -> Case:
        """Return a step of chunks that fill as many of these prefill tiles as the slots allow, from their begins."""
        chunks, tile = [], self._buckets.tile
        longest = self.max_len // tile * tile or self.max_len
        for slot in range(self._buckets.max_num_seqs):
            length = min(tiles * tile, longest)
            chunks.append(self._chunk(slot, 0, length))
            tiles -= ceil_div(length, tile)
            if tiles <= 0:
                break
        return self._case(chunks=tuple(chunks))

    def chunk(self, *, late: bool) -> Case:
        """Return a step of one short chunk at the begin of a long prompt, or `late`, at its end."""
        length = min(self._buckets.tile, self.max_len)
        end = min(self.max_len, max(length, self._usable_pages * self._page_size))
        return self._case(chunks=(self._chunk(0, end - length if late else 0, length),))

    def _case(self, decodes: tuple[Sequence, ...] = (), chunks: tuple[Chunk, ...] = ()) -> Case:
        work = Work(0, decodes, chunks)
        return Case(work, self._buckets.of(work))

    def _chunk(self, slot: int, start: int, length: int) -> Chunk:
        return Chunk(self._sequence(slot, start + length, start + length), start, length, last=False)

    def _sequence(self, slot: int, tokens: int, computed: int) -> Sequence:
        # Different tokens, so that they go to different experts.
        prompt = tuple((7 * token + 11 * slot) % self._vocab for token in range(tokens))
        request = Request(f"timed-{slot}", prompt, SamplingParams(temperature=0.0), 0.0)
        sequence = Sequence(request, 0, 0, self.max_len + 1)
        sequence.slot, sequence.num_computed = slot, computed
        sequence.pages = self._rows[slot, : ceil_div(computed, self._page_size)].tolist()
        return sequence


class CostTimer:
    """A measurement of all that `MeasuredCosts` holds, on an executor that runs no other steps meanwhile."""

    def __init__(
        self,
        executor: BlockExecutor,
        model: ModelConfig,
        instance: InstancePlan,
        variants: Items[str],
        fused: Items[tuple[str, ...]] = (),
        now: Callable[[], float] = time.perf_counter,
    ):
        """`fused`: the precisions of all layers with which the executor fuses steps, those of the start among them."""
        self._executor, self._model, self._variants, self._now = executor, model, variants, now
        self._fused = tuple(dict.fromkeys(fused))
        self._layers = [block for block in executor.blocks if is_layer(block.block)]
        self.kinds = tuple(_kind(model, layer_index(loaded.block)) for loaded in self._layers)
        self._cases = Cases(executor, model.vocab_size, instance.kv_pages)
        self._rest: dict[Case, list[float]] = {}  # times of steps without layers
        self.disturbed = False  # whether other work of the machine kept some times from being found

    def measure(self) -> MeasuredCosts:
        """Return the costs of layers that run at present, and of all variants."""
        with self._cases.pages():
            self._begin = self._now()
            main, kinds = self._cases.main(), dict.fromkeys(self.kinds)
            others = {kind: self._other_precisions(kind) for kind in kinds}
            # One share for each precision and case, two for the attention of each kind, and one for each whole step.
            shares = len(main) + sum(2 + max(1, len(precisions)) * len(main) for precisions in others.values())
            self._share = BUDGET_S / shares
            layers = {kind: self._of_kind(kind, precisions, main) for kind, precisions in others.items()}
            rest, per_token = self._rest_costs()
            costs = MeasuredCosts(self.kinds, layers, rest, per_token)
            costs = replace(costs, fused=self._fused_steps(costs))
        self._executor.shrink_pools({}, 1)  # pages were written: their memory is given back where it can be
        self._executor.wait_for_pools()
        return costs

    def _of_kind(self, kind: str, precisions: Items[str], main: Items[Case]) -> LayerCosts:
        base, running = self._running(kind)
        long = self._cases.long_decodes()
        per_context = self._slope(running, self._cases.decodes(len(long.work.decodes), 1), long)
        per_prefill = self._slope(running, self._cases.chunk(late=False), self._cases.chunk(late=True))
        times: dict[str, dict[Case, float]] = {}
        doubtful: set[Case] = set()
        for precision in precisions or (base,):
            with self._loaded(kind, precision) as variant:
                for case in self._cases_in_time(main):
                    found, sure = self._time_layers(case, {precision: variant, base: running})
                    doubtful |= set() if sure else {case}
                    for name, seconds in found.items():
                        of_precision = times.setdefault(name, {})
                        of_precision[case] = min(seconds, of_precision.get(case, inf))
        curves = {
            precision: _curve(
                (case.shape.tokens, without_attention(seconds, per_context * case.context + per_prefill * case.prefill))
                for case, seconds in bounded(found, times[base]).items()
            )
            for precision, found in without(doubtful, times, base).items()
        }
        return LayerCosts(curves, per_context, per_prefill)

    def _time_layers(self, case: Case, chains: Mapping[str, Items[LoadedBlock]]) -> tuple[dict[str, float], bool]:
        """Return the time (s) of one layer of each chain in a step, and store the time of the step without layers.

        The last chain is that of the layers that run at present, which is at most as long as the others. If no attempt
        finds times that layers can take, their shares of the whole step stand for them, and False is returned too.
        """
        *_, running = chains.values()
        count = self._affordable(case, running, len(chains) + 1)
        trials = {"": Trial(case.work, ())}
        trials |= {precision: Trial(case.work, tuple(layers[:count])) for precision, layers in chains.items()}
        least = {precision: self._least(layers[0]) for precision, layers in chains.items()}
        steps = dict.fromkeys(trials, inf)
        for _ in range(MAX_ATTEMPTS):
            steps = {key: min(seconds, steps[key]) for key, seconds in self._fastest(trials).items()}
            found = {precision: (steps[precision] - steps[""]) / count for precision in chains}
            if sure := possible(found, least):
                break
        self._rest.setdefault(case, []).append(steps[""])
        self.disturbed |= not sure
        return (found if sure else {precision: steps[precision] / count for precision in chains}), sure

    def _least(self, layer: LoadedBlock) -> float:
        """Return a time (s) that a layer must exceed in any step."""
        moe, devices = self._model.moe, layer.placement.devices
        sparse = self._model.is_sparse(layer_index(layer.block))
        read = moe.experts_per_token / moe.num_experts if moe is not None and sparse else 1.0  # at the least
        return least_seconds(layer.nbytes * read / len(devices), devices[0].platform)

    def _slope(self, layers: Items[LoadedBlock], short: Case, long: Case) -> float:
        """Return the time (s) of a layer for each unit of attention that `long` has more than `short`."""
        more = long.context + long.prefill - short.context - short.prefill
        if more <= 0:
            return 0.0
        chain = tuple(layers[: self._affordable(long, layers, 2)])
        seconds = self._fastest({"short": Trial(short.work, chain), "long": Trial(long.work, chain)})
        return max(0.0, seconds["long"] - seconds["short"]) / (len(chain) * more)

    def _rest_costs(self) -> tuple[Curve, float]:
        """Return the time (s) of a step without layers by rows, and that of each further token."""
        rest = {case: min(found) for case, found in self._rest.items()}
        curve = _curve((case.shape.rows, seconds) for case, seconds in rest.items() if not case.shape.tiles)
        more = [
            max(0.0, seconds - curve(case.shape.rows)) / (case.shape.tokens - case.shape.rows)
            for case, seconds in rest.items()
            if case.shape.tiles and case.shape.tokens > case.shape.rows
        ]
        return curve, median(more) if more else 0.0

    def _fused_steps(self, costs: MeasuredCosts) -> dict[tuple[str, ...], Curve]:
        """Return the times (s) of fused steps without attention by rows, for the assignments that are fused."""
        decodes = [case for case in self._rest if not case.shape.tiles]
        per_context = sum(costs.layers[kind].per_context for kind in self.kinds)
        points: dict[tuple[str, ...], list[tuple[int, float]]] = {}
        with ExitStack() as stack:
            chains = {names: stack.enter_context(self._assigned(names)) for names in self._fused}
            chains = {names: layers for names, layers in chains.items() if layers}
            first = [self._alone(Trial(decodes[0].work, layers, fused=True)) for layers in chains.values()]
            if not first or min(first) >= FUSED_S:
                return {}
            for case in decodes:
                trials = {names: Trial(case.work, layers, fused=True) for names, layers in chains.items()}
                for names, seconds in self._fastest(trials).items():
                    points.setdefault(names, []).append((case.shape.rows, seconds - per_context * case.context))
        return {names: _curve(found) for names, found in points.items()}

    # -- layers

    def _running(self, kind: str) -> tuple[str, list[LoadedBlock]]:
        """Return the precision that most layers of a kind run in, and these layers."""
        layers = [loaded for loaded, of_kind in zip(self._layers, self.kinds, strict=True) if of_kind == kind]
        ((base, _),) = Counter(loaded.precision for loaded in layers).most_common(1)
        return base, [loaded for loaded in layers if loaded.precision == base]

    def _other_precisions(self, kind: str) -> list[str]:
        base, _ = self._running(kind)
        return [precision for precision in self._variants if precision != base]

    @contextmanager
    def _loaded(self, kind: str, precision: str) -> Iterator[list[LoadedBlock]]:
        """Load all layers of a kind in a precision. Where they take memory, one of each stage stands for the others."""
        loaded: list[LoadedBlock] = []
        copies: dict[Placement, LoadedBlock] = {}
        try:
            for running, of_kind in zip(self._layers, self.kinds, strict=True):
                if of_kind != kind:
                    continue
                layer = copies.get(running.placement) or self._executor.prepare(running.block, precision)
                loaded.append(layer)
                if not layer.in_place:
                    copies[running.placement] = layer
            yield loaded
        finally:
            for layer in loaded:
                layer.free()

    @contextmanager
    def _assigned(self, precisions: Items[str]) -> Iterator[tuple[LoadedBlock, ...]]:
        """Load the layers of an assignment that do not run at present, or yield none if they would take memory."""
        loaded: list[LoadedBlock] = []
        try:
            chain = []
            for running, precision in zip(self._layers, precisions, strict=True):
                if running.precision != precision:
                    loaded.append(self._executor.prepare(running.block, precision))
                    if not loaded[-1].in_place:
                        yield ()
                        return
                chain.append(running if running.precision == precision else loaded[-1])
            yield tuple(chain)
        finally:
            for layer in loaded:
                layer.free()

    def _affordable(self, case: Case, layers: Items[LoadedBlock], trials: int) -> int:
        """Return how many of these layers a step may have so that some rounds of trials fit a share, at least one."""
        rest, one = (min(self._alone(Trial(case.work, tuple(layers[:n]))) for _ in range(2)) for n in (0, 1))
        allowed = self._share / (MIN_ROUNDS * trials)
        return min(len(layers), max(1, int((allowed - rest) / max(one - rest, 1e-6))))

    # -- time

    def _cases_in_time(self, main: Items[Case]) -> Iterator[Case]:
        """Yield the cases that there is time for."""
        for index, case in enumerate(main):
            if index < MIN_CASES or self._now() - self._begin < MAX_S:
                yield case

    def _fastest(self, trials: Mapping[Key, Trial]) -> dict[Key, float]:
        """Return the shortest time (s) of a step of each trial. The trials take turns, as often as a share allows."""
        # The first use of KV pages takes long where they get their memory only then.
        self._alone(max(trials.values(), key=lambda trial: len(trial.layers)))
        begin = self._now()
        samples: dict[Key, list[float]] = {key: [] for key in trials}
        sure = False
        for done in range(1, MOST_ROUNDS + 1):
            for key, trial in trials.items():
                samples[key].append(self._sample(trial))
            elapsed, sure = self._now() - begin, all(map(is_confirmed, samples.values()))
            enough = elapsed > self._share or (done >= MIN_ROUNDS and elapsed * (done + 1) / done > self._share)
            if (sure and (enough or done >= MAX_ROUNDS)) or (enough and self._now() - self._begin > MAX_S):
                break
        self.disturbed |= not sure and done >= MIN_ROUNDS
        return {key: min(found) for key, found in samples.items()}

    def _sample(self, trial: Trial) -> float:
        """Return the time (s) of a step.

        Fast steps run as in a step loop: the next one is dispatched before one has ended. The fastest few in a row
        count.
        """
        alone = self._alone(trial)
        if alone >= ALONE_S:
            return alone
        execute, ends = self._executor.execute, list[float]()
        with self._executor.running(trial.layers, fused=trial.fused):
            pending = execute(trial.work)
            while len(ends) <= WINDOW or ends[-1] - ends[0] < BURST_S:
                following = execute(trial.work)
                pending.fetch()
                pending = following
                ends.append(self._now())
            pending.fetch()
        return min(end - begin for begin, end in zip(ends, ends[WINDOW:], strict=False)) / WINDOW

    def _alone(self, trial: Trial) -> float:
        with self._executor.running(trial.layers, fused=trial.fused):
            begin = self._now()
            self._executor.execute(trial.work).fetch()
            return self._now() - begin


def step_costs(
    executor: BlockExecutor,
    model: ModelConfig,
    instance: InstancePlan,
    variants: Items[str],
    fused: Items[tuple[str, ...]],
    facts: Mapping[str, Any],
    now: Callable[[], float] = time.perf_counter,
) -> MeasuredCosts:
    """Return the costs of steps on this machine: those of an earlier start, or else measured now (`CostTimer`).

    The executor must be warm. `facts` are what determines the steps besides the other arguments and the shapes.
    """
    file = _file(executor, model, instance, variants, fused, facts)
    costs = None if file is None else _read(file)
    if costs is not None and _covers(costs, instance, variants):
        return costs
    timer = CostTimer(executor, model, instance, variants, fused, now)
    costs = timer.measure()
    if timer.disturbed or not costs.plausible:
        log.warning("the machine is busy: the costs of steps are rough, and the next start will time them again")
    elif file is not None:
        try:
            write_json(file, costs.to_dict(), MAX_FILES)
        except OSError as error:
            log.warning("the next start will time its steps again: %s", error)
    return costs


def _file(
    executor: BlockExecutor,
    model: ModelConfig,
    instance: InstancePlan,
    variants: Items[str],
    fused: Items[tuple[str, ...]],
    facts: Mapping[str, Any],
) -> Path | None:
    """Return the file that caches the costs, None without a persistent cache."""
    folder = persistent_folder(FOLDER)
    if folder is None:
        return None
    devices = [device for block in executor.blocks for device in block.placement.devices]
    key = {
        "format": FORMAT,
        "model": fingerprint(model, devices),
        "device": devices[0].device_kind,
        "processors": processors(),
        "buckets": asdict(executor.buckets),
        "stages": [[stage.tp, [asdict(block) for block in stage.blocks]] for stage in instance.stages],
        "variants": list(variants),
        "fused": list(fused),
        "facts": {name: repr(fact) for name, fact in facts.items()},
    }
    return folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"


def _read(file: Path) -> MeasuredCosts | None:
    """Return the costs in a file, None if it is missing or damaged."""
    try:
        return MeasuredCosts.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _covers(costs: MeasuredCosts, instance: InstancePlan, variants: Items[str]) -> bool:
    """Return whether there are costs of an instance's layers in their present precisions and in all variants."""
    if len(costs.kinds) != len(instance.layer_precisions):
        return False
    needed = zip(costs.kinds, instance.layer_precisions, strict=True)
    measured = {(kind, precision) for kind, layers in costs.layers.items() for precision in layers.by_precision}
    return measured >= {*needed, *((kind, precision) for kind in costs.kinds for precision in variants)}


def _kind(model: ModelConfig, layer: int) -> str:
    """Return the name of a kind of layers: those of one kind and precision run the same program."""
    kind, window = "sparse" if model.is_sparse(layer) else "dense", model.window(layer)
    return kind if window is None else f"{kind}, window {window}"


def _curve(points: Iterable[tuple[int, float]]) -> Curve:
    """Return a curve through points, of which several may have one size."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(max(0.0, seconds))
    return Curve(tuple((size, median(by_size[size])) for size in sorted(by_size)))
