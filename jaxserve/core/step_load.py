"""The load of a step: counts of its tokens, rows and attended tokens, from which its duration can be estimated."""

from dataclasses import dataclass

from jaxserve.core.numeric import ceil_div
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import Work


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Load of one step."""

    tokens: int  # tokens that pass through the layers, padding included
    rows: int  # rows that pass through the head, padding included
    sequences: int  # sequences that decode
    context: int  # sum of the tokens that the decodes attend to
    prefill: int  # sum of p c + c^2 + c over all chunks of c tokens that follow p tokens


class Loads:
    """A calculator of the load of steps, which are padded to the shapes of `buckets`."""

    def __init__(self, buckets: Buckets):
        self._buckets = buckets

    def of(self, work: Work) -> StepLoad:
        """Return the load of a step. Call it before the next step is scheduled, which changes the sequences."""
        decodes, tiles = len(work.decodes), self.tiles(work)
        context = prefill = 0
        for sequence in work.decodes:
            context += sequence.num_computed
        for chunk in work.chunks:
            prefill += chunk.length * (chunk.start + chunk.length + 1)
        shape = self._buckets.shape(decodes, tiles, 0, len(work.chunks))
        return StepLoad(shape.tokens, shape.rows, decodes, context, prefill)

    def tiles(self, work: Work) -> int:
        """Return the tiles of a step's chunks, without those that the step is padded with."""
        return sum(ceil_div(chunk.length, self._buckets.tile) for chunk in work.chunks)
