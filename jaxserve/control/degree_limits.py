"""The limits of an instance that depend on its degree of tensor parallelism and on the lanes of its KV pools."""

from dataclasses import dataclass

from jaxserve.core.step_shapes import Buckets


@dataclass(frozen=True)
class DegreeLimits:
    """Limits of instances with one degree and number of lanes. Numbers of pages include the null page.

    An instance merged of n others has n times their slots, and its pools n times the room of theirs: a merge gives each
    device an n-th of the kv heads and n times the pages, in the same memory. A group of n has n times their slots too,
    and n lanes with the room of their pools, but steps as theirs.
    """

    tp: int
    max_len: int  # tokens of the longest sequence that it holds in its precisions at the start
    min_pages: int  # KV pages of that sequence
    max_pages: int  # largest number of KV pages that a plan may have
    start_pages: int  # KV pages at the start, together with those of the instances that were merged
    room: int  # KV pages that its pools can ever hold
    segments: tuple[int, ...]  # pages of each segment that pools grow by; () if they grow page by page
    shapes: Buckets  # of steps
    lanes: int = 1

    @property
    def slots(self) -> int:
        """Sequences that may run at once."""
        return self.lanes * self.shapes.max_num_seqs
