"""StepLoad: what a step has to compute, in the numbers that its time follows from. Imports no JAX."""

from dataclasses import dataclass

from jaxserve.core.numeric import ceil_div
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import Work


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to compute."""

    tokens: int  # through the layers, padded as the executor pads them
    rows: int  # through the head, padded too
    sequences: int  # that decode
    context: int  # tokens that these attend to, in all
    prefill: int  # p c + c^2 + c, over the chunks of c tokens after p


class Loads:
    """Tells the load of steps of one engine's shapes."""

    def __init__(self, buckets: Buckets):
        self._buckets = buckets

    def of(self, work: Work) -> StepLoad:
        """Of a step that has just been scheduled: before the next one is."""
        decodes, tile = len(work.decodes), self._buckets.tile
        context = prefill = tiles = 0
        for sequence in work.decodes:
            context += sequence.num_computed
        for chunk in work.chunks:
            tiles += ceil_div(chunk.length, tile)
            prefill += chunk.length * (chunk.start + chunk.length + 1)
        shape = self._buckets.shape(decodes, tiles, 0)
        return StepLoad(shape.tokens, shape.rows, decodes, context, prefill)
