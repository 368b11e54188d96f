"""The programs of an engine, which belong to placements and are shared by all instances that run there."""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike

from jaxserve.compilation.programs import Program, untraced
from jaxserve.core.step_shapes import Buckets
from jaxserve.executor.blocks import BlockBuilder
from jaxserve.executor.fused import FusedPrograms
from jaxserve.executor.kv_exchange import KVExchange, Side
from jaxserve.executor.outputs import unit_length
from jaxserve.executor.pools import PoolPrograms
from jaxserve.kvcache import Lanes
from jaxserve.parallel.placement import Placement
from jaxserve.sampling.programs import SamplerPrograms


@dataclass(frozen=True)
class InstanceSizes:
    """The sizes of an instance that the shapes of its programs follow from."""

    buckets: Buckets
    segments: tuple[int, ...]  # pages of one lane in each segment that its KV pools may have
    max_len: int  # tokens of a sequence
    lanes: int = 1  # of its KV pools

    @property
    def slots(self) -> int:
        """Sequences that may run at once."""
        return self.lanes * self.buckets.max_num_seqs

    @property
    def kv_lanes(self) -> Lanes:
        """The lanes of its KV pools."""
        return Lanes(self.segments, self.lanes)


class Programs:
    """The programs of an engine by placement. Thread-safe.

    Instances come and go, and their programs stay: one that is made again on the same devices compiles nothing.
    """

    def __init__(self, builder: BlockBuilder, *, page_size: int, kv_dtype: DTypeLike, top_logprobs: int = 1):
        """Take the factory of the blocks. At most `top_logprobs` of the most likely tokens are returned for a token."""
        self.builder = builder
        self.fused = FusedPrograms()
        self._page_size, self._kv_dtype, self._top_logprobs = page_size, kv_dtype, top_logprobs
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def pools(self, placement: Placement) -> PoolPrograms:
        """Return the programs of the KV pools on a placement."""
        model = self.builder.config
        make = partial(
            PoolPrograms,
            placement,
            kv_heads=model.num_kv_heads,
            page_size=self._page_size,
            head_dim=model.head_dim,
            dtype=self._kv_dtype,
        )
        return self._once(("pools", placement), make)

    def exchange(self, members: Sequence[Side], merged: Side) -> KVExchange:
        """Return the exchange of KV pages between instances and the one that they merge to."""
        key = "exchange", tuple(members), merged
        return self._once(key, partial(KVExchange, members, merged))

    def sampler(self, placement: Placement, sizes: InstanceSizes) -> SamplerPrograms:
        """Return the programs that sample the tokens of an instance whose last stage has this placement."""
        model = self.builder.config
        own = {"slots": sizes.slots, "max_len": sizes.max_len}
        shared = {"vocab": model.vocab_rows, "top_logprobs": self._top_logprobs, "backend": model.kernel_backend}
        make = partial(SamplerPrograms, placement, **own, **shared)
        return self._once(("sampler", placement, *own.values()), make)

    def inputs(self, placement: Placement) -> Program:
        """Return packed i32 -> (tokens, rows, cos, sin, slots, meta), see `BlockBuilder.step_inputs`."""
        return self._once(("inputs", placement), partial(self.builder.step_inputs, placement))

    def slice_tile(self, placement: Placement, tile: int) -> Program:
        """Return (x [T, E], start) -> x [tile, E]."""

        def make() -> Program:
            function = partial(lax.dynamic_slice_in_dim, slice_size=tile)
            return Program(f"tile {tile}", jax.jit(function, out_shardings=placement.sharding()))

        return self._once(("tile", placement, tile), make)

    def normalize(self, placement: Placement) -> Program:
        """Return hidden states [R, E] -> embeddings f32[R, E]."""

        def make() -> Program:
            return Program("normalize", jax.jit(untraced(unit_length), out_shardings=placement.sharding()))

        return self._once(("normalize", placement), make)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]
