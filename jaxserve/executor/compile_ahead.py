"""Compilation of all programs of an instance ahead of its steps, from shapes alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.compilation.programs import StartsCompiling
from jaxserve.core.step_shapes import StepShape
from jaxserve.executor.apart import POOL, ApartPlacement
from jaxserve.executor.blocks import BlockSignature, LoadedBlock
from jaxserve.executor.fused import StageProgram
from jaxserve.executor.programs import InstanceSizes, Programs
from jaxserve.executor.stages import Stage
from jaxserve.parallel.placement import Placement

Block = LoadedBlock | BlockSignature


class StepCompiler:
    """Starts the compilation of everything that the steps of an instance run, with loaded blocks or their signatures.

    `segments` is the number of segments that KV pools have at present.
    """

    def __init__(self, compiler: StartsCompiling, programs: Programs, sizes: InstanceSizes):
        self._compiler = compiler
        self._programs = programs
        self._config = programs.builder.config
        self._sizes = sizes
        self._inputs: dict[tuple[Placement, StepShape], tuple] = {}  # the results of unpacking a step

    def compile(self, stages: Sequence[Stage], segments: int = 1) -> None:
        """Start to compile what steps of all shapes run block by block, at all sizes that KV pools may grow to."""
        for shape in self._sizes.buckets.all():
            self.compile_step(stages, shape, segments)
        for stage in stages:
            if stage.layers:
                pools = self._programs.pools(stage.placement)
                pools.compile(self._sizes.kv_lanes, segments, self._compiler)
            for layer in stage.distinct_layers:
                self.compile_layer(stage.placement, layer, segments)

    def compile_step(self, stages: Sequence[Stage], shape: StepShape, segments: int) -> None:
        """Start to compile the programs that a step of this shape runs block by block."""
        compile = self._compiler.compile
        sampler = self._programs.sampler(stages[-1].placement, self._sizes)
        for stage in stages:
            placement = stage.placement
            tokens, rows, *_ = self._step_inputs(placement, shape)
            if stage.embed is not None:
                newest = self._newest_tokens(placement)
                compile(stage.embed.executable, (shape.tokens, sampler.slots), tokens, newest, *stage.embed.leaves)
            for layer in stage.distinct_layers:
                self._compile_layer(placement, layer, shape, segments)
            if stage.head is None:
                continue
            x, *_ = self.layer_inputs(placement, shape)
            logits = self._compile_head(placement, stage.head, x, rows)
            sampler.compile(logits, shape.tile, self._compiler)
            if shape.tiles:
                compile(self._programs.slice_tile(placement, shape.tile), shape.tokens, x, np.int32(0))
                tile = jax.ShapeDtypeStruct((shape.tile, *x.shape[1:]), x.dtype, sharding=placement.sharding())
                self._compile_head(placement, stage.head, tile, np.zeros(shape.tile, np.int32))

    def compile_layer(self, placement: Placement, layer: Block, segments: int = 1) -> None:
        """Start to compile a decoder layer for all shapes, and for all sizes that its KV pool may grow to."""
        for shape in self._sizes.buckets.all():
            for count in range(segments, len(self._sizes.segments) + 1):
                self._compile_layer(placement, layer, shape, count)

    def compile_apart(self, place: ApartPlacement, layer: Block) -> None:
        """Start to compile a layer that the members of an instance run apart, for all shapes and sizes of its pool."""
        for shape in self._sizes.buckets.all():
            inputs = self.layer_inputs(place.placement, shape)
            for count in range(1, len(self._sizes.segments) + 1):
                pages = self._sizes.kv_lanes.arrays(count)
                pool = _with_sharding(self._programs.pools(place.placement).abstract(pages), place.sharding(POOL))
                arguments = (*_with_sharding(inputs, place.sharding()), pool)
                self._compiler.compile(layer.executable, (shape.of_layers, pages), *arguments, *layer.leaves)

    def fused_stages(
        self, stages: Sequence[Stage], layers: Sequence[Block], segments: int = 1
    ) -> Iterator[tuple[int, StepShape, StageProgram, tuple]]:
        """Yield every stage with these decoder layers as one program, and its arguments, for steps that only decode."""
        for index, stage in enumerate(stages):
            for shape in self._sizes.buckets.all():
                if not shape.tiles:
                    yield index, shape, *self.fused_stage(stage, shape, layers[stage.pools], segments)

    def fused_stage(
        self, stage: Stage, shape: StepShape, layers: Sequence[Block], segments: int
    ) -> tuple[StageProgram, tuple]:
        """Return a stage with these decoder layers as one program, and its abstract arguments."""
        placement = stage.placement
        embed, head = (None if block is None else block.executable for block in (stage.embed, stage.head))
        executables = tuple(layer.executable for layer in layers)
        program = StageProgram(self._programs.inputs(placement), shape, embed, executables, head)
        packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=placement.sharding())
        carried = self.layer_inputs(placement, shape)[0] if embed is None else self._newest_tokens(placement)
        blocks = (stage.embed, *layers, stage.head)
        leaves = tuple(block.signature().leaves for block in blocks if block is not None)
        pool = self._programs.pools(placement).abstract(self._sizes.kv_lanes.arrays(segments))
        return program, (packed, carried, (pool,) * len(layers), leaves)

    def layer_inputs(self, placement: Placement, shape: StepShape) -> tuple:
        """Return the abstract (x, cos, sin, slots, meta) that a decoder layer is called with."""
        tokens, _, *context = self._step_inputs(placement, shape)
        size = (tokens.shape[0], self._config.hidden_size)
        return jax.ShapeDtypeStruct(size, self._config.dtype, sharding=tokens.sharding), *context

    def _compile_layer(self, placement: Placement, layer: Block, shape: StepShape, segments: int) -> None:
        """Start to compile a decoder layer for a shape and a number of segments of its KV pool."""
        pages = self._sizes.kv_lanes.arrays(segments)
        arguments = (*self.layer_inputs(placement, shape), self._programs.pools(placement).abstract(pages))
        self._compiler.compile(layer.executable, (shape.of_layers, pages), *arguments, *layer.leaves)

    def _step_inputs(self, placement: Placement, shape: StepShape) -> tuple:
        """Start to compile the unpacking of a step, and return its results (tokens, rows, cos, sin, slots, meta)."""
        if (placement, shape) not in self._inputs:
            sharding = placement.sharding()
            packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=sharding)
            results = self._compiler.compile(self._programs.inputs(placement), shape, packed, static=(shape,))
            self._inputs[placement, shape] = _with_sharding(results, sharding)
        return self._inputs[placement, shape]

    def _compile_head(self, placement: Placement, head: Block, x: Any, rows: Any) -> jax.ShapeDtypeStruct:
        """Start to compile the head and the normalisation of embeddings; return the abstract logits."""
        key = x.shape[0], rows.shape[0]
        results = self._compiler.compile(head.executable, key, x, rows, *head.leaves)
        hidden, logits = _with_sharding(results, placement.sharding())
        self._compiler.compile(self._programs.normalize(placement), hidden.shape[0], hidden)
        return logits

    def _newest_tokens(self, placement: Placement) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._sizes.slots + 1,), np.int32, sharding=placement.sharding())


def _with_sharding(results: Any, sharding: Sharding) -> Any:
    """Attach a sharding to abstract results, which have none."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), results)
