"""The degrees of tensor parallelism that the instances of an engine may have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Degrees:
    """The degree at the start, and the largest one that instances may be merged to: the first times a power of two."""

    tp: int
    max_tp: int

    def all(self) -> tuple[int, ...]:
        """Return every degree that an instance may have: tp, 2 tp, ..., max_tp."""
        degrees, degree = [], self.tp
        while degree <= self.max_tp:
            degrees.append(degree)
            degree *= 2
        return tuple(degrees)

    def larger(self) -> tuple[int, ...]:
        """Return the degrees that only merged instances have."""
        return self.all()[1:]

    def at_once(self, devices: int) -> int:
        """Return the largest number of different degrees that instances of one stage have at once."""
        counts = range(1, len(self.all()) + 1)
        return max((count for count in counts if sum(self.all()[:count]) <= devices), default=1)

    def members(self, degree: int) -> int:
        """Return how many instances of the start an instance of this degree takes the place of.

        It is 1 for a degree that no instance ever has, whose bytes can be asked for all the same.
        """
        return degree // self.tp if degree in self.all() else 1

    def padded_for(self, degree: int) -> int:
        """Return the degree for which the model is padded that runs at `degree`.

        That is `max_tp` for all that divide it, so that the same weights are only cut or joined when instances merge
        or split.
        """
        return self.max_tp if self.max_tp % degree == 0 else degree
