"""The cost model: the time of a step, from the sizes of the model and the rates of the hardware.

A decoder layer reads its weights and multiplies n tokens by them:

    max(bytes / bandwidth, n * operations / rate) / efficiency(n) + overhead

Attention adds the time to read the KV cache of decodes, and the time of the pairs of tokens that prefill chunks
multiply. A chunk of c tokens after a prefix of p tokens counts as p c + c^2 + c pairs, as in KunServe's cost model
(lookahead batch formulation), although a causal kernel needs only half of c^2. With tensor parallelism, a layer has two
all-reduces of its outputs. With pipeline parallelism, a step goes through one stage after the other, and the stages
compute different steps at once (`sim.pipeline`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from jaxserve.control.costs import InstanceCost
from jaxserve.control.plan import InstancePlan, StagePlan
from jaxserve.core.block_names import is_layer
from jaxserve.core.step_load import StepLoad as StepLoad
from jaxserve.sim.hardware import Hardware, Link
from jaxserve.sim.pipeline import StageTime
from jaxserve.sim.shape import ModelShape


@dataclass(frozen=True)
class RooflineModel:
    """A cost model of a model shape on some hardware, for any plan (`CostModel`, `TrueCostModel`)."""

    shape: ModelShape
    hardware: Hardware
    kv_dtype: str = "auto"  # "auto" or "int8"

    @property
    def host(self) -> float:
        """The time (s) from an arrival at an idle engine to its first step."""
        return self.hardware.overheads.host

    def of(self, instance: InstancePlan) -> "InstanceRoofline":
        """Return the step times of an instance. Raise `ConfigError` if the hardware lacks a precision or a link."""
        return InstanceRoofline(self, instance)


@dataclass(frozen=True)
class StepParts:
    """The time (s) of a step by what it is spent on."""

    compute: float = 0.0
    bandwidth: float = 0.0  # of the memory
    links: float = 0.0  # between devices
    host: float = 0.0  # and other overheads

    def __add__(self, other: "StepParts") -> "StepParts":
        return StepParts(
            self.compute + other.compute,
            self.bandwidth + other.bandwidth,
            self.links + other.links,
            self.host + other.host,
        )

    def __mul__(self, factor: float) -> "StepParts":
        return StepParts(self.compute * factor, self.bandwidth * factor, self.links * factor, self.host * factor)

    @property
    def seconds(self) -> float:
        """The time of the whole step."""
        return self.compute + self.bandwidth + self.links + self.host


class InstanceRoofline:
    """Step times of one instance under one plan (`TrueInstanceCost`)."""

    def __init__(self, model: RooflineModel, instance: InstancePlan):
        self._model = model
        self._stages = [_StageRoofline(model, stage) for stage in instance.stages]
        self._hand_offs = [
            model.hardware.link(before.devices[-1], after.devices[0]) for before, after in pairwise(instance.stages)
        ]
        self._fixed: dict[tuple[int, int], float] = {}  # s, by (tokens, rows)
        self.per_context = sum(stage.per_context for stage in self._stages)
        """The time (s) of each token that a decode attends to, in all layers."""
        self.per_prefill = sum(stage.per_prefill for stage in self._stages)
        """The time (s) of each unit of `StepLoad.prefill`, in all layers."""
        # Raises now, and not at the first step, if the hardware lacks a precision.
        self.fixed(1, 1, 1)

    def seconds(self, load: StepLoad) -> float:
        """Return the time (s) of a step on the device."""
        fixed = self.fixed(load.tokens, load.rows, load.sequences)
        return fixed + self.per_context * load.context + self.per_prefill * load.prefill

    def parts(self, load: StepLoad) -> "StepParts":
        """Return what a step spends its time on."""
        size = load.tokens * self._model.shape.hidden_size * self._model.shape.itemsize
        overheads = self._model.hardware.overheads
        hand_offs = sum(link.seconds(size) for link in self._hand_offs)
        host = overheads.step + overheads.sequence * load.sequences
        attention = StepParts(self.per_prefill * load.prefill, self.per_context * load.context, hand_offs, host)
        return sum((stage.parts(load.tokens, load.rows) for stage in self._stages), attention)

    def stages(self, load: StepLoad) -> list[StageTime]:
        """Return what a step takes on each stage. Together that is `seconds`: sampling belongs to the last stage."""
        size = load.tokens * self._model.shape.hidden_size * self._model.shape.itemsize
        overheads, times = self._model.hardware.overheads, []
        for index, stage in enumerate(self._stages):
            attention = stage.per_context * load.context + stage.per_prefill * load.prefill
            seconds = stage.seconds(load.tokens, load.rows) + attention + overheads.step / len(self._stages)
            hand_off = self._hand_offs[index].seconds(size) if index < len(self._hand_offs) else 0.0
            times.append(StageTime(seconds, hand_off))
        times[-1] = StageTime(times[-1].seconds + overheads.sequence * load.sequences, 0.0)
        return times

    def fixed(self, tokens: int, rows: int, sequences: int) -> float:
        """Return the time (s) of a step without attention."""
        key = (tokens, rows)
        # The cache is unlimited, because keys are as few as step shapes.
        if key not in self._fixed:
            size = tokens * self._model.shape.hidden_size * self._model.shape.itemsize
            stages = sum(stage.seconds(tokens, rows) for stage in self._stages)
            self._fixed[key] = stages + sum(link.seconds(size) for link in self._hand_offs)
        overheads = self._model.hardware.overheads
        return self._fixed[key] + overheads.step + overheads.sequence * sequences


class _StageRoofline:
    """Step times of one stage. Layers of equal precision are computed once."""

    def __init__(self, model: RooflineModel, stage: StagePlan):
        self._shape, self._hardware, self._tp = model.shape, model.hardware, stage.tp
        self._layers: dict[str, int] = {}  # number of layers by precision
        self._head: str | None = None
        for block in stage.blocks:
            if is_layer(block.block):
                self._layers[block.precision] = self._layers.get(block.precision, 0) + 1
            elif block.block == "head":
                self._head = block.precision
        self._link = _slowest(self._hardware, stage.devices)
        count, hardware = sum(self._layers.values()), self._hardware
        read = self._shape.kv_bytes_per_token(self._tp, model.kv_dtype, self._hardware.platform)
        self.per_context = count * read / (hardware.bandwidth * hardware.decode_share)
        rate = hardware.rate(self._shape.dtype)
        self.per_prefill = count * self._shape.attention_ops(self._tp) / (rate * hardware.prefill_share)

    def seconds(self, tokens: int, rows: int) -> float:
        """Return the time (s) of the stage's blocks without attention.

        The embedding takes no time: it only reads one row for each token.
        """
        total = sum(count * self._layer(precision, tokens) for precision, count in self._layers.items())
        return total if self._head is None else total + self._head_seconds(self._head, rows)

    def parts(self, tokens: int, rows: int) -> StepParts:
        """Return what `seconds` is spent on."""
        layers = (self._layer_parts(precision, tokens) * count for precision, count in self._layers.items())
        head = StepParts() if self._head is None else self._head_parts(self._head, rows)
        return sum(layers, head)

    def _layer(self, precision: str, tokens: int) -> float:
        return self._layer_parts(precision, tokens).seconds

    def _layer_parts(self, precision: str, tokens: int) -> StepParts:
        hardware, shape = self._hardware, self._shape
        reading = shape.read_bytes(precision, tokens, self._tp) / hardware.bandwidth
        computing = tokens * shape.layer_ops(self._tp) / hardware.rate(precision)
        size = tokens * shape.hidden_size * shape.itemsize
        products = _products(reading, computing, hardware.curve(precision)(tokens))
        return products + StepParts(links=2 * self._all_reduce(size), host=hardware.overheads.layer)

    def _head_seconds(self, precision: str, rows: int) -> float:
        return self._head_parts(precision, rows).seconds

    def _head_parts(self, precision: str, rows: int) -> StepParts:
        hardware, shape = self._hardware, self._shape
        reading = shape.head_bytes(precision, self._tp) / hardware.bandwidth
        computing = rows * shape.head_ops(self._tp) / hardware.rate(precision)
        curve = hardware.head_curve or hardware.curve(precision)
        logits = 4 * rows * shape.vocab_size  # bytes, float32
        return _products(reading, computing, curve(rows)) + StepParts(links=self._all_gather(logits))

    def _all_reduce(self, size: float) -> float:
        return 0.0 if self._link is None else all_reduce(size, self._tp, self._link)

    def _all_gather(self, size: float) -> float:
        return 0.0 if self._link is None else self._link.seconds(size * (self._tp - 1) / self._tp)


def _products(reading: float, computing: float, share: float) -> StepParts:
    """Return the time of products at a share of the roofline, all of it spent on what bounds them."""
    return StepParts(compute=computing / share) if computing > reading else StepParts(bandwidth=reading / share)


def all_reduce(size: float, devices: int, link: Link) -> float:
    """Return the time (s) of an all-reduce of `size` bytes.

    Each device sends all bytes except its own share, twice. There is one latency for any number of devices, as was
    measured (`bench.sim.fit_tables`).
    """
    return link.seconds(2 * (devices - 1) / devices * size)


def _slowest(hardware: Hardware, devices: Sequence[int]) -> Link | None:
    """Return the slowest link between consecutive devices of a stage; None for a single device."""
    links = [hardware.link(before, after) for before, after in pairwise(devices)]
    return min(links, key=lambda link: link.bandwidth, default=None)


class TrueInstanceCost(InstanceCost, Protocol):
    """Step times of one instance under one plan, as the event loop needs them."""

    @property
    def per_context(self) -> float | None:
        """The time (s) that each further token of context adds to a step.

        None if it is not constant, so that `seconds` must be called for every step.
        """
        ...


@runtime_checkable
class TruePipelineCost(TrueInstanceCost, Protocol):
    """Step times of an instance with several stages."""

    def stages(self, load: StepLoad) -> Sequence[StageTime]:
        """Return what a step takes on each stage."""
        ...


class TrueCostModel(Protocol):
    """Step times for any plan, as the event loop needs them: what steps take, whatever policies believe."""

    @property
    def host(self) -> float:
        """The time (s) from a step's begin to its dispatch, and to the next begin, while the device is idle."""
        ...

    def of(self, instance: InstancePlan) -> TrueInstanceCost:
        """Return the step times of an instance under a plan."""
        ...
