"""The ladder of an instance: its plans from full precision to the fewest bits, one elementary change after another."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from jaxserve.control.capacity import Capacity
from jaxserve.control.plan import BlockPlan, InstancePlan
from jaxserve.control.policies.morph_settings import MorphSettings
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import layer_name
from jaxserve.core.precision import BITS

Loss = Callable[[Sequence[str]], float]  # precisions of all layers -> rise of the cross-entropy, as a share
Wanted = Sequence[tuple[int, tuple[str, ...]]]  # layers in order, each with the precisions that it may change to


class Ladder:
    """The levels of an instance, from 0 (the plan at the start) to `top`.

    Level k is the plan at the start after the first k changes of a layer's precision, with all slots and the KV pages
    that then fit. First the layers of the swap order change to the settings' `precision`, as many as they allow, and
    the others to `rest`. Then those in `rest` change to `escalate`, and last all change to `last_resort`. Changes with
    which the loss of quality would be above `max_quality_loss` are left out.
    """

    def __init__(
        self,
        initial: InstancePlan,
        resources: Resources,
        order: Sequence[int],
        settings: MorphSettings,
        loss: Loss | None = None,
    ):
        """`order` has the layers that may change, the least important first. `loss` is what `settings` limits."""
        self.initial, self.loss = initial, loss
        self._resources = resources
        rounds = [tuple(changes) for changes in _rounds(initial, resources, order, settings, loss)]
        self._changes = tuple(change for changes in rounds for change in changes)
        self.round_ends = tuple(accumulate(map(len, rounds)))  # levels at which all changes of a round are made
        self._plans: dict[int, InstancePlan] = {0: initial}
        self._capacities: dict[int, Capacity] = {}
        self.top = len(self._changes)

    def plan(self, level: int) -> InstancePlan:
        """Return the plan of a level."""
        if level not in self._plans:
            plan = self.initial.with_precisions(dict(self._changes[:level])).with_max_num_seqs(None)
            self._plans[level] = plan.with_kv_pages(self._resources.kv_capacity(plan))
        return self._plans[level]

    def capacity(self, level: int) -> Capacity:
        """Return the estimates of a level's speed, without the limit on sequences that a plan may have."""
        if level not in self._capacities:
            resources = self._resources
            plan = self.plan(level)
            shapes = resources.limits_of(plan.tp).shapes
            self._capacities[level] = Capacity.of(plan, shapes, resources.page_size, resources.costs)
        return self._capacities[level]

    def lowest_with_pages_of(self, level: int) -> int:
        """Return the lowest level with as many KV pages as another one: pages never get fewer from level to level."""
        pages = self.plan(level).kv_pages
        return bisect_left(range(level), True, key=lambda lower: self.plan(lower).kv_pages >= pages)

    def loss_at(self, level: int) -> float:
        """Return the expected rise of the cross-entropy on a level, as a share; 0 if it is unknown."""
        return 0.0 if self.loss is None else self.loss(self.plan(level).layer_precisions)

    def level_of(self, plan: InstancePlan) -> int:
        """Return the lowest level at which no layer has more bits than in a plan.

        After transitions that failed, that plan may lie between two levels.
        """
        if plan is self.initial:
            return 0
        return max(map(self._level_of_layer, plan.blocks), default=0)

    def _level_of_layer(self, block: BlockPlan) -> int:
        if self.initial.precision(block.block) == block.precision or block.block not in self._sizes:
            return 0
        size = self._resources.bytes_of(block.block, block.precision)
        fitting = (level for level, smaller in self._sizes[block.block] if smaller <= size)
        return next(fitting, self._sizes[block.block][-1][0])

    @cached_property
    def _sizes(self) -> dict[str, list[tuple[int, int]]]:
        """For each layer that changes: (level, bytes from there on), in order."""
        sizes: dict[str, list[tuple[int, int]]] = {}
        for level, (block, precision) in enumerate(self._changes, start=1):
            sizes.setdefault(block, []).append((level, self._resources.bytes_of(block, precision)))
        return sizes


def _rounds(
    initial: InstancePlan, resources: Resources, order: Sequence[int], settings: MorphSettings, loss: Loss | None
) -> Iterator[Iterator[tuple[str, str]]]:
    """Yield the changes (layer, precision) of each round, to be taken before the next round's.

    Each change takes fewer bytes than the layer had before.
    """
    precisions = list(initial.layer_precisions)

    def made(wanted: Wanted) -> Iterator[tuple[str, str]]:
        for layer, allowed in wanted:
            block = layer_name(layer)
            size = resources.bytes_of(block, precisions[layer])
            for precision in filter(None, allowed):
                changed = [*precisions[:layer], precision, *precisions[layer + 1 :]]
                if resources.bytes_of(block, precision) < size and (
                    loss is None or loss(changed) <= settings.max_quality_loss
                ):
                    precisions[:] = changed
                    yield block, precision
                    break

    yield from map(made, _wanted_rounds(len(precisions), order, settings))


def _wanted_rounds(num_layers: int, order: Sequence[int], settings: MorphSettings) -> tuple[Wanted, Wanted, Wanted]:
    """Return the changes that the settings name in each round: layers, and their precisions by preference.

    A layer that may not change to `precision`, because too much quality would be lost, may change to `rest`.
    """
    two = bool(settings.rest) and settings.most_layers < 1
    instead = (settings.rest,) if two and BITS[settings.rest] > BITS[settings.precision] else ()
    first = {layer: settings.precision_at(place, num_layers) for place, layer in enumerate(order)}
    escalated = [layer for layer in order if settings.second and first[layer] == settings.rest]
    return (
        [(layer, (precision, *instead)) for layer, precision in first.items()],
        [(layer, (settings.second,)) for layer in escalated],
        [(layer, (settings.last_resort,)) for layer in order],
    )
