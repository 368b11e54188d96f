"""BlockExecutor: runs one instance of the plan, block by block.

A step is a host loop over the block table that only dispatches; nothing waits for the device until the step's tokens
are fetched, which the engine does one step later.
"""

from collections import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding

from jaxserve.compilation.programs import Compiler, Program
from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Sequence
from jaxserve.core.step_shapes import Buckets, StepShape
from jaxserve.core.work import Chunk, Work
from jaxserve.executor.batch import pack
from jaxserve.executor.blocks import BlockBuilder, BlockSignature, LoadedBlock, Parameter
from jaxserve.executor.fused import FusedTier, StageProgram
from jaxserve.executor.pending import DispatchedStep
from jaxserve.executor.pools import PoolOutline, Pools
from jaxserve.executor.stages import Stage, stages_of
from jaxserve.kvcache import PageTable
from jaxserve.sampling.device_sampler import DeviceSampler
from jaxserve.sampling.ops import Logprobs

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
        blocks: abc.Sequence[LoadedBlock],
        pools: Pools,
        builder: BlockBuilder,
        sampler: DeviceSampler,
        buckets: Buckets,
        table: PageTable,
        page_size: int,
        fused: FusedTier | None = None,
        compiler: Compiler | None = None,
    ):
        """`blocks` are the blocks in order, `pools` the KV pools of their decoder layers; `fused`: see there.

        `compiler` makes executables ahead of use; by default one that knows of none that are saved.
        """
        self.blocks = list(blocks)
        self.pools = pools
        self.sampler = sampler
        self.buckets = buckets
        self.table = table
        self.page_size = page_size
        self._fused = fused
        self._compiler = compiler or Compiler()
        self._builder = builder
        self._lent: dict[tuple[str, str], tuple[Mapping[str, Parameter], LoadedBlock]] = {}  # rows that own nothing
        self._stages = stages_of(blocks)
        several = [stage.placement.devices for stage in self._stages if len(stage.placement.devices) > 1]
        self._in_turn = any(devices[0].platform == "cpu" for devices in several)  # see `_ended`
        self._inputs = {stage.placement: builder.step_inputs(stage.placement) for stage in self._stages}
        last = blocks[-1].placement.sharding()
        tile_of = partial(lax.dynamic_slice_in_dim, slice_size=buckets.tile)
        self._tile_of = Program(f"tile {buckets.tile}", jax.jit(tile_of, out_shardings=last))
        # A function of its own for each engine: JAX would not ask its cache for one that another engine has compiled.
        self._normalize = Program("normalize", jax.jit(partial(unit_length), out_shardings=last))
        self._layers: dict[tuple[int, StepShape, int], tuple[Callable, ...]] = {}  # what each runs, as of `_run_stage`

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
        return DispatchedStep(work, sampled, scores, self._normalized(out.hidden) if embeds else None)

    def warm(self) -> None:
        """Compiles every executable of every shape, or loads it, and runs some of them on padding."""
        for shape in self.buckets.all():
            self._compile(shape)
        for stage in self._stages:
            if stage.layers:
                self.pools.compile(stage.first_layer, self._compiler)
        for row in {row.executable: row for stage in self._stages for row in stage.layers}.values():
            self._compile_for_growth(row)
        self.fuse_decodes([row.signature() for stage in self._stages for row in stage.layers])
        self._compiler.wait()
        if self._fused is not None:
            self._fused.wait()
        for shape in self._rehearsed():
            self._rehearse(shape)
        for stage in self._stages:
            if stage.layers:
                self.pools.rehearse(stage.first_layer)
        self.wait_for_pools()

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
        self._compiler.wait()
        if self._fused is not None:
            self._fused.wait()
        self._compiler.save()

    def prepare(
        self,
        block: str,
        parameters: Mapping[str, Parameter],
        precision: str,
        copied: Callable[[int], None] | None = None,
    ) -> LoadedBlock:
        """A row that may take the place of a block's, on the same devices: for `replace`, or to be freed.

        Only copies; steps may go on meanwhile. `copied` is told the bytes of each array once it is
        there, and may wait. A row that owns nothing is the same each time that it is prepared of the same parameters.
        """
        known = self._lent.get((block, precision))
        if known is not None and known[0] is parameters:
            return known[1]
        row = self._builder.build(block, parameters, self.blocks[self._index(block)].placement, precision, copied)
        if not row.owned:
            self._lent[block, precision] = parameters, row
        return row

    def place(
        self, block: str, parameters: Mapping[str, Parameter], precision: str, memory: str | None = None
    ) -> Mapping[str, Parameter]:
        """Parameters on the devices of a block's row. Rows that are prepared of them share them, and copy nothing.

        With `memory`: in the devices' memory of that kind, split as the row's; rows are then copied from there.
        """
        return self._builder.place(
            block, parameters, self.blocks[self._index(block)].placement, precision, memory=memory
        )

    def replace(self, rows: abc.Sequence[LoadedBlock]) -> list[LoadedBlock]:
        """Exchanges decoder layers' rows between two steps; returns the old ones, for the caller to free. Mutates.

        Steps that were dispatched keep what they need of them. Nothing is compiled if the executables were warmed.
        """
        table = list(self.blocks)
        replaced: list[LoadedBlock] = []
        for row in rows:
            index = self._index(row.block)
            assert table[index].placement == row.placement, "a row is exchanged on its own devices"
            replaced.append(table[index])
            table[index] = row
        self._stages, self.blocks = stages_of(table), table
        self._layers.clear()
        if self._fused is not None:
            self._fused.table_changed()
        return replaced

    def warm_layer(self, row: LoadedBlock) -> None:
        """Compiles the executable of a decoder layer's row that is not in the table, and runs it on padding.

        Mutates the null page alone.
        """
        stage = self._stage_of(row)
        layer = stage.first_layer
        for shape in self.buckets.all():
            self._compile_layer(stage, row, shape)
        self._compile_for_growth(row)
        self._compiler.wait()
        for shape in self._rehearsed():
            inputs = jax.tree.map(zeros, self._layer_inputs(stage, shape))
            run = row.executable.at((shape, self.pools.segments))
            _, self.pools[layer] = run(*inputs, self.pools[layer], *row.leaves)
        jax.block_until_ready(self.pools[layer])

    def fuse_decodes(self, layers: abc.Sequence[BlockSignature]) -> None:
        """Compiles the shapes of steps that only decode for such decoder layers, if the fused tier is to be warmed."""
        if self._fused is None or not self._fused.at_warmup:
            return
        for number, stage in enumerate(self._stages):
            for shape in self.buckets.all():
                if not shape.tiles:
                    self._fuse(number, stage, shape, layers[stage.pools])

    def close(self) -> None:
        """Frees the device: parameters, pools and the sampler's state. The executor cannot be used afterwards."""
        if self._fused is not None:
            self._fused.close()
        for array in {id(leaf): leaf for row in self.blocks for leaf in row.leaves}.values():
            array.delete()
        self.pools.close()
        self.sampler.close()

    def _compile_for_growth(self, row: LoadedBlock) -> None:
        """Starts to compile what a decoder layer's row runs for all numbers of segments that pools may grow to."""
        stage = self._stage_of(row)
        for shape in self.buckets.all():
            for pool in self.pools.grown(stage.first_layer):
                self._compile_layer(stage, row, shape, pool)

    def _compile_layer(self, stage: Stage, row: LoadedBlock, shape: StepShape, pool: PoolOutline | None = None) -> None:
        """Starts to compile what a decoder layer's row runs for a shape; `pool`: for pools other than there are."""
        pool = self.pools[stage.first_layer] if pool is None else pool
        arguments = (*self._layer_inputs(stage, shape), pool, *row.leaves)
        self._compiler.compile(row.executable, (shape, len(pool)), *arguments)

    def _stage_of(self, row: LoadedBlock) -> Stage:
        return next(stage for stage in self._stages if stage.placement == row.placement and stage.layers)

    def _compile(self, shape: StepShape) -> None:
        """Starts to compile what a step of this shape runs."""
        compile = self._compiler.compile
        for stage in self._stages:
            tokens, rows, *_ = self._step_inputs(stage, shape)
            if stage.embed is not None:
                carried = self._newest_tokens(stage)
                compile(stage.embed.executable, shape.tokens, tokens, carried, *stage.embed.leaves)
            for row in {row.executable: row for row in stage.layers}.values():
                self._compile_layer(stage, row, shape)
            if stage.head is None:
                continue
            x, *_ = self._layer_inputs(stage, shape)
            logits = self._compile_head(stage, stage.head, x, rows)
            self.sampler.compile(logits, shape.tile, self._compiler)
            if shape.tiles:
                compile(self._tile_of, shape.tokens, x, np.int32(0))
                sharding = stage.placement.sharding()
                tile = jax.ShapeDtypeStruct((shape.tile, *x.shape[1:]), x.dtype, sharding=sharding)
                self._compile_head(stage, stage.head, tile, np.zeros(shape.tile, np.int32))

    def _compile_head(self, stage: Stage, head: LoadedBlock, x: Any, rows: Any) -> jax.ShapeDtypeStruct:
        """Starts to compile the head for some rows of x, and what embeds them. Returns the outline of the logits."""
        key = x.shape[0], rows.shape[0]
        results = self._compiler.compile(head.executable, key, x, rows, *head.leaves)
        hidden, logits = placed(stage.placement.sharding(), results)
        self._compiler.compile(self._normalize, hidden.shape[0], hidden)
        return logits

    def _rehearsed(self) -> abc.Sequence[StepShape]:
        """The shapes to run before serving: all of them, but on CPU, where large ones take long and nothing is made at
        the first run, the smallest that only decodes and the smallest that does not.
        """
        shapes = self.buckets.all()
        if self._stages[0].placement.platform != "cpu":
            return shapes
        smallest = {bool(shape.tiles): shape for shape in shapes}  # the largest come first
        return tuple(smallest.values())

    def _rehearse(self, shape: StepShape) -> None:
        """Runs a step of a shape on padding, block by block, through one decoder layer of those that run the same."""
        packed, x = np.zeros(shape.size, np.int32), None
        for number, stage in enumerate(self._stages):
            carried = self._newest_tokens(stage) if x is None else jax.device_put(x, stage.placement.sharding())
            layers = {row.executable: layer for layer, row in enumerate(stage.layers)}.values()
            x, results = self._run_blocks(number, stage, shape, packed, carried, layers)
        out = self._ended(Forwarded(x, *results))
        self.sampler.rehearse(out.logits)
        self._normalized(out.hidden)
        if shape.tiles:
            self._score_tile(out, 0, np.zeros(shape.tile, np.int32))

    def _step_inputs(self, stage: Stage, shape: StepShape) -> tuple:
        """Starts to compile what unpacks a step; returns outlines of (tokens, rows, cos, sin, slots, meta)."""
        sharding = stage.placement.sharding()
        packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=sharding)
        results = self._compiler.compile(self._inputs[stage.placement], shape, packed, static=(shape,))
        return placed(sharding, results)

    def _layer_inputs(self, stage: Stage, shape: StepShape) -> tuple:
        """What a decoder layer of the stage is called with before its pool and leaves, without values."""
        tokens, _, *context = self._step_inputs(stage, shape)
        config = self._builder.config
        x = jax.ShapeDtypeStruct((tokens.shape[0], config.hidden_size), config.dtype, sharding=tokens.sharding)
        return x, *context

    def _index(self, block: str) -> int:
        return next(index for index, row in enumerate(self.blocks) if row.block == block)

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
                self._fuse(number, stage, shape, [row.signature() for row in stage.layers])
        return self._run_blocks(number, stage, shape, packed, carried, range(len(stage.layers)))

    def _run_blocks(
        self, number: int, stage: Stage, shape: StepShape, packed: np.ndarray, carried: Array, layers: Iterable[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        """A stage block by block, through these of its decoder layers."""
        inputs = self._inputs[stage.placement].executables.get(shape)
        unpacked = self._inputs[stage.placement](packed, shape) if inputs is None else inputs(packed)
        tokens, rows, *context = unpacked
        x = carried
        if stage.embed is not None:
            x = stage.embed.executable.at(shape.tokens)(tokens, carried, *stage.embed.leaves)
        runs = self._layers_of(number, stage, shape)
        for layer in layers:
            pool = stage.first_layer + layer
            x, self.pools[pool] = runs[layer](x, *context, self.pools[pool], *stage.layers[layer].leaves)
        if stage.head is None:
            return x, ()
        return x, stage.head.executable.at((shape.tokens, shape.rows))(x, rows, *stage.head.leaves)

    def _layers_of(self, number: int, stage: Stage, shape: StepShape) -> tuple[Callable, ...]:
        """What the decoder layers of a stage run in a step of this shape; looked up once."""
        key = number, shape, self.pools.segments
        if key not in self._layers:
            self._layers[key] = tuple(row.executable.at((shape, self.pools.segments)) for row in stage.layers)
        return self._layers[key]

    def _fuse(self, number: int, stage: Stage, shape: StepShape, layers: abc.Sequence[BlockSignature]) -> None:
        """Starts to compile a stage with such decoder layers as one program."""
        assert self._fused is not None
        sharding = stage.placement.sharding()
        embed, head = (None if row is None else row.executable for row in (stage.embed, stage.head))
        executables = tuple(layer.executable for layer in layers)
        program = StageProgram(self._inputs[stage.placement], shape, embed, executables, head)
        packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=sharding)
        carried = self._layer_inputs(stage, shape)[0] if embed is None else self._newest_tokens(stage)
        blocks = (stage.embed and stage.embed.signature(), *layers, stage.head and stage.head.signature())
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
            tiles = ceil_div(chunk.length, shape.tile)
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
        head = self.blocks[-1]
        tile = len(targets)
        x = self._tile_of.at(out.x.shape[0])(self._ended(out).x, np.int32(start))
        _, logits = head.executable.at((tile, tile))(x, np.arange(tile, dtype=np.int32), *head.leaves)
        return self._ended(self.sampler.score.at(tile)(logits, targets))

    def _normalized(self, hidden: Array) -> Array:
        return self._normalize.at(hidden.shape[0])(hidden)

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
