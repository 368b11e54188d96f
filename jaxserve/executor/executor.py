"""BlockExecutor: runs one instance of the plan, block by block.

A step is a host loop over the block table that only dispatches; nothing waits for the device until the step's tokens
are fetched, which the engine does one step later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding

from jaxserve.core.request import Sequence
from jaxserve.core.work import Chunk, Work
from jaxserve.executor.ahead import Call, CompiledAhead, compile_all
from jaxserve.executor.batch import pack
from jaxserve.executor.blocks import BlockBuilder, Parameter, Row, RowOutline
from jaxserve.executor.buckets import Buckets
from jaxserve.executor.dispatched import DispatchedStep
from jaxserve.executor.fused import FusedTier, StageProgram
from jaxserve.executor.pools import Pools
from jaxserve.executor.sampler import Logprobs
from jaxserve.executor.sampling import DeviceSampler
from jaxserve.executor.shapes import StepShape
from jaxserve.executor.stages import Stage, stages_of
from jaxserve.kvcache import PageTable

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forwarded:
    """The result of the blocks, on the device: x [T, E], rows' normalised states [R, E] and logits f32[R, V]."""

    x: Array
    hidden: Array
    logits: Array


class BlockExecutor:
    """The `core.work.Executor` of real devices."""

    def __init__(
        self,
        rows: SequenceOf[Row],
        pools: Pools,
        builder: BlockBuilder,
        sampler: DeviceSampler,
        buckets: Buckets,
        table: PageTable,
        page_size: int,
        fused: FusedTier | None = None,
    ):
        """`rows` are the blocks in order, `pools` the KV pools of their decoder layers; `fused`: see there."""
        self.rows = list(rows)
        self.pools = pools
        self.sampler = sampler
        self.buckets = buckets
        self.table = table
        self.page_size = page_size
        self._fused = fused
        self._ahead = CompiledAhead()
        self._builder = builder
        self._lent: dict[tuple[str, str], tuple[Mapping[str, Parameter], Row]] = {}  # rows that own nothing
        self._stages = stages_of(rows)
        several = [stage.placement.devices for stage in self._stages if len(stage.placement.devices) > 1]
        self._in_turn = any(devices[0].platform == "cpu" for devices in several)  # see `_ended`
        self._inputs = {stage.placement: builder.step_inputs(stage.placement) for stage in self._stages}
        self._tile_of = jax.jit(partial(lax.dynamic_slice_in_dim, slice_size=buckets.tile))
        self._normalize = jax.jit(unit_length)

    def execute(self, work: Work) -> DispatchedStep:
        """Dispatches a step without waiting for it."""
        shape = self.buckets.of(work)
        out = self._forward(pack(work, shape, self.table.rows, self.page_size), shape)
        sequences: list[Sequence | None] = [
            *work.decodes,
            *(c.sequence if c.last and not c.sequence.request.embed else None for c in work.chunks),
        ]
        sampled = self.sampler.sample(out.logits, sequences)
        scores = self._score_prompts(work, shape, out)
        embeds = any(chunk.last and chunk.sequence.request.embed for chunk in work.chunks)
        return DispatchedStep(work, sampled, scores, self._normalize(out.hidden) if embeds else None)

    def warm(self) -> None:
        """Compiles every executable of every shape, and runs it once on padding."""
        compile_all(call for shape in self.buckets.all() for call in self._calls(shape))
        rows = set()
        for shape in self.buckets.all():
            out = self._ended(self._forward(np.zeros(shape.size, np.int32), shape))
            if shape.rows not in rows:
                rows.add(shape.rows)
                self.sampler.warm(out.logits)
                self._normalize(out.hidden)
            if shape.tiles:
                self._score_tile(out, 0, np.zeros(shape.tile, np.int32))
        for stage in self._stages:
            if stage.layers:
                self.pools.warm(stage.first_layer)
        self.wait_for_pools()
        self.fuse_decodes([row.outline() for stage in self._stages for row in stage.layers])
        for row in {row.executable: row for stage in self._stages for row in stage.layers}.values():
            self._compile_for_growth(row)

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        """Between two steps: each key's page of every KV pool moves to its value, then memory from `pages` on is given
        back where the platform can. Steps that were dispatched use pages as they were. Mutates.
        """
        self.pools.shrink(moves, pages)

    def wait_for_pools(self) -> None:
        """Waits until nothing that was dispatched changes the KV pools any more."""
        jax.block_until_ready(self.pools[:])

    def fuse(self, tier: FusedTier | None) -> None:
        """From the next step on runs with this fused tier, or with none. Mutates; the tier before is the caller's."""
        self._fused = tier

    def settle(self) -> None:
        """Waits for executables that are being compiled in the background."""
        self.pools.settle()
        self._ahead.wait()
        if self._fused is not None:
            self._fused.wait()

    def prepare(
        self,
        block: str,
        parameters: Mapping[str, Parameter],
        precision: str,
        copied: Callable[[int], None] | None = None,
    ) -> Row:
        """A row that may take the place of a block's, on the same devices: for `replace`, or to be freed.

        Only copies; steps may go on meanwhile. `copied` is told the bytes of each array once it is
        there, and may wait. A row that owns nothing is the same each time that it is prepared of the same parameters.
        """
        known = self._lent.get((block, precision))
        if known is not None and known[0] is parameters:
            return known[1]
        row = self._builder.build(block, parameters, self.rows[self._index(block)].placement, precision, copied)
        if not row.owned:
            self._lent[block, precision] = parameters, row
        return row

    def place(
        self, block: str, parameters: Mapping[str, Parameter], precision: str, memory: str | None = None
    ) -> Mapping[str, Parameter]:
        """Parameters on the devices of a block's row. Rows that are prepared of them share them, and copy nothing.

        With `memory`: in the devices' memory of that kind, split as the row's; rows are then copied from there.
        """
        return self._builder.place(block, parameters, self.rows[self._index(block)].placement, precision, memory=memory)

    def replace(self, rows: SequenceOf[Row]) -> list[Row]:
        """Exchanges decoder layers' rows between two steps; returns the old ones, for the caller to free. Mutates.

        Steps that were dispatched keep what they need of them. Nothing is compiled if the executables were warmed.
        """
        table = list(self.rows)
        replaced: list[Row] = []
        for row in rows:
            index = self._index(row.block)
            assert table[index].placement == row.placement, "a row is exchanged on its own devices"
            replaced.append(table[index])
            table[index] = row
        self._stages, self.rows = stages_of(table), table
        if self._fused is not None:
            self._fused.table_changed()
        return replaced

    def warm_layer(self, row: Row) -> None:
        """Compiles the executable of a decoder layer's row that is not in the table, and runs it on padding.

        Mutates the null page alone.
        """
        stage = self._stage_of(row)
        layer = stage.first_layer
        inputs = [self._layer_inputs(stage, shape) for shape in self.buckets.all()]
        compile_all((row.executable, (*some, self.pools[layer], *row.leaves)) for some in inputs)
        for some in inputs:
            _, self.pools[layer] = row.executable(*jax.tree.map(zeros, some), self.pools[layer], *row.leaves)
        jax.block_until_ready(self.pools[layer])
        self._compile_for_growth(row)

    def fuse_decodes(self, layers: SequenceOf[RowOutline]) -> None:
        """Compiles the shapes of steps that only decode for such decoder layers, if the fused tier is to be warmed."""
        if self._fused is None or not self._fused.at_warmup:
            return
        for number, stage in enumerate(self._stages):
            for shape in self.buckets.all():
                if not shape.tiles:
                    self._fuse(number, stage, shape, layers[stage.pools])
        self._fused.wait()

    def close(self) -> None:
        """Frees the device: parameters, pools and the sampler's state. The executor cannot be used afterwards."""
        if self._fused is not None:
            self._fused.close()
        for array in {id(leaf): leaf for row in self.rows for leaf in row.leaves}.values():
            array.delete()
        self.pools.close()
        self.sampler.close()

    def _compile_for_growth(self, row: Row) -> None:
        """Starts to compile what a decoder layer's row runs for all numbers of segments that pools may grow to."""
        stage = self._stage_of(row)
        for shape in self.buckets.all():
            inputs = self._layer_inputs(stage, shape)
            for pool in self.pools.grown(stage.first_layer):
                self._ahead.compile((row.executable, shape, len(pool)), row.executable, *inputs, pool, *row.leaves)

    def _stage_of(self, row: Row) -> Stage:
        return next(stage for stage in self._stages if stage.placement == row.placement and stage.layers)

    def _calls(self, shape: StepShape) -> Iterator[Call]:
        """What a step of this shape calls, each executable once."""
        packed = np.zeros(shape.size, np.int32)
        for stage in self._stages:
            inputs, sharding = self._inputs[stage.placement], stage.placement.sharding()
            yield inputs, (packed, shape)
            tokens, rows, *_ = placed(sharding, inputs.eval_shape(packed, shape))
            if stage.embed is not None:
                yield stage.embed.executable, (tokens, self._newest_tokens(stage), *stage.embed.leaves)
            x, *context = self._layer_inputs(stage, shape)
            for row in {row.executable: row for row in stage.layers}.values():
                yield row.executable, (x, *context, self.pools[stage.first_layer], *row.leaves)
            if stage.head is not None:
                arguments = (x, rows, *stage.head.leaves)
                yield stage.head.executable, arguments
                hidden, logits = placed(sharding, stage.head.executable.eval_shape(*arguments))
                yield self._normalize, (hidden,)
                yield from self.sampler.calls(logits)

    def _layer_inputs(self, stage: Stage, shape: StepShape) -> tuple:
        """What a decoder layer of the stage is called with before its pool and leaves, without values."""
        tokens, _, *context = self._inputs[stage.placement].eval_shape(np.zeros(shape.size, np.int32), shape)
        config = self._builder.config
        x = jax.ShapeDtypeStruct((tokens.shape[0], config.hidden_size), config.dtype)
        return placed(stage.placement.sharding(), (x, *context))

    def _index(self, block: str) -> int:
        return next(index for index, row in enumerate(self.rows) if row.block == block)

    def _forward(self, packed: np.ndarray, shape: StepShape) -> Forwarded:
        x: Array | None = None
        for number, stage in enumerate(self._stages):
            if stage.embed is not None:
                carried = self._newest_tokens(stage)
            else:
                carried = jax.device_put(x, stage.placement.sharding())
            x, results = self._run_stage(number, stage, shape, packed, carried)
            if results:
                return Forwarded(x, *results)
        raise AssertionError("the plan has no head")

    def _run_stage(
        self, number: int, stage: Stage, shape: StepShape, packed: np.ndarray, carried: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `StageProgram`: fused where that is ready, else block by block."""
        segments = self.pools.segments
        if self._fused is not None:
            key, pools = (number, shape, stage.executables, segments), tuple(self.pools[stage.pools])
            fused = self._fused.find(key)
            if fused is not None:
                x, results, self.pools[stage.pools] = fused(packed, carried, pools, stage.leaves)
                return x, results
            if self._fused.used(key):
                self._fuse(number, stage, shape, [row.outline() for row in stage.layers])
        tokens, rows, *context = self._inputs[stage.placement](packed, shape)
        x = carried if stage.embed is None else stage.embed.executable(tokens, carried, *stage.embed.leaves)
        for layer, row in enumerate(stage.layers, stage.first_layer):
            run = row.executable
            if segments > 1:
                run = self._ahead.find((run, shape, segments)) or run
            x, self.pools[layer] = run(x, *context, self.pools[layer], *row.leaves)
        return x, () if stage.head is None else stage.head.executable(x, rows, *stage.head.leaves)

    def _fuse(self, number: int, stage: Stage, shape: StepShape, layers: SequenceOf[RowOutline]) -> None:
        """Starts to compile a stage with such decoder layers as one program."""
        assert self._fused is not None
        sharding = stage.placement.sharding()
        embed, head = (None if row is None else row.executable for row in (stage.embed, stage.head))
        executables = tuple(layer.executable for layer in layers)
        program = StageProgram(self._inputs[stage.placement], shape, embed, executables, head)
        packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=sharding)
        carried = self._layer_inputs(stage, shape)[0] if embed is None else self._newest_tokens(stage)
        blocks = (stage.embed and stage.embed.outline(), *layers, stage.head and stage.head.outline())
        leaves = tuple(block.leaves for block in blocks if block is not None)
        key = (number, shape, executables, self.pools.segments)
        self._fused.compile(key, program, packed, carried, tuple(self.pools[stage.pools]), leaves)

    def _newest_tokens(self, stage: Stage) -> Array:
        """The sampler's newest tokens where the embedding can read them."""
        if len(self._stages) == 1:
            return self.sampler.newest
        return jax.device_put(self.sampler.newest, stage.placement.sharding())

    def _score_prompts(self, work: Work, shape: StepShape, out: Forwarded) -> dict[int, list[Logprobs]]:
        """Log-probabilities of the prompt tokens that follow the tokens of each chunk that asks for them."""
        scores: dict[int, list[Logprobs]] = {}
        tile = 0
        for index, chunk in enumerate(work.chunks):
            tiles = -(-chunk.length // shape.tile)
            if wants_prompt_logprobs(chunk):
                targets = np.zeros(tiles * shape.tile, np.int32)
                following = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.length + 1]
                targets[: len(following)] = following
                scores[index] = [
                    self._score_tile(out, shape.decodes + (tile + i) * shape.tile, part)
                    for i, part in enumerate(targets.reshape(tiles, shape.tile))
                ]
            tile += tiles
        return scores

    def _score_tile(self, out: Forwarded, start: int, targets: np.ndarray) -> Logprobs:
        head = self.rows[-1]
        x = self._tile_of(self._ended(out).x, np.int32(start))
        _, logits = head.executable(x, np.arange(len(targets), dtype=np.int32), *head.leaves)
        return self._ended(self.sampler.score(logits, targets))

    def _ended(self, made: T) -> T:
        """What programs make that do not need each other, before the next one is dispatched: waits for it where several
        devices are the processor's. XLA has as many threads for these as there are devices, and a device's part of a
        program keeps one while it waits for the others' parts, for which two programs at once may leave none.
        """
        return jax.block_until_ready(made) if self._in_turn else made


def placed(sharding: Sharding, outlines: Any) -> Any:
    """Arrays without values, of which nobody had said where they lie."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), outlines)


def zeros(outline: jax.ShapeDtypeStruct) -> Array:
    """An array of a shape, where that says."""
    return jax.device_put(np.zeros(outline.shape, outline.dtype), outline.sharding)


def wants_prompt_logprobs(chunk: Chunk) -> bool:
    """Whether log-probabilities of the prompt tokens after this chunk's tokens are to be computed."""
    sequence = chunk.sequence
    return (
        sequence.params.prompt_logprobs is not None
        and sequence.index == 0
        and len(sequence.prompt_logprobs) < sequence.num_prompt
        and chunk.start < sequence.num_prompt - 1
    )


def unit_length(hidden: Array) -> Array:
    """Embeddings f32[R, E] of length 1."""
    wide = hidden.astype(jnp.float32)
    return wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
