"""Compilation of an executor's programs ahead of its steps, from shapes alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Sharding

from jaxserve.compilation.programs import Compiler, Program
from jaxserve.core.step_shapes import Buckets, StepShape
from jaxserve.executor.blocks import BlockBuilder, BlockSignature, LoadedBlock
from jaxserve.executor.fused import FusedTier, StageKey, StageProgram
from jaxserve.executor.outputs import unit_length
from jaxserve.executor.pools import AbstractPool, Pools
from jaxserve.executor.stages import Stage
from jaxserve.parallel.placement import Placement
from jaxserve.sampling.device_sampler import DeviceSampler


@dataclass(frozen=True)
class StepPrograms:
    """The programs of an executor's steps that belong neither to blocks nor to the sampler."""

    inputs: Mapping[Placement, Program]  # packed i32 -> (tokens, rows, cos, sin, slots, meta), see `BlockBuilder`
    slice_tile: Program  # (x [T, E], start) -> x [tile, E]
    normalize: Program  # hidden states [R, E] -> embeddings f32[R, E]

    @classmethod
    def create(cls, builder: BlockBuilder, stages: Sequence[Stage], tile: int) -> "StepPrograms":
        """Return the programs for these stages; the results of the head are on the last one."""
        sharding = stages[-1].placement.sharding()
        slice_tile = partial(lax.dynamic_slice_in_dim, slice_size=tile)
        # Each engine has functions of its own, because JAX does not ask its cache for a function that another engine
        # has compiled.
        normalize = partial(unit_length)
        return cls(
            {stage.placement: builder.step_inputs(stage.placement) for stage in stages},
            Program(f"tile {tile}", jax.jit(slice_tile, out_shardings=sharding)),
            Program("normalize", jax.jit(normalize, out_shardings=sharding)),
        )


class StepCompiler:
    """Starts the compilation of everything that the steps of an executor run. `wait` waits for it."""

    def __init__(
        self,
        compiler: Compiler,
        programs: StepPrograms,
        builder: BlockBuilder,
        pools: Pools,
        sampler: DeviceSampler,
        buckets: Buckets,
    ):
        self._compiler = compiler
        self._programs = programs
        self._config = builder.config
        self._pools = pools
        self._sampler = sampler
        self._buckets = buckets

    def compile_step(self, stages: Sequence[Stage], shape: StepShape) -> None:
        """Start to compile the programs that a step of this shape runs block by block."""
        compile = self._compiler.compile
        for stage in stages:
            tokens, rows, *_ = self._step_inputs(stage, shape)
            if stage.embed is not None:
                newest = self._newest_tokens(stage)
                compile(stage.embed.executable, shape.tokens, tokens, newest, *stage.embed.leaves)
            for loaded in stage.distinct_layers:
                self.compile_layer(stage, loaded, shape)
            if stage.head is None:
                continue
            x, *_ = self.layer_inputs(stage, shape)
            logits = self._compile_head(stage, stage.head, x, rows)
            self._sampler.compile(logits, shape.tile, self._compiler)
            if shape.tiles:
                compile(self._programs.slice_tile, shape.tokens, x, np.int32(0))
                sharding = stage.placement.sharding()
                tile = jax.ShapeDtypeStruct((shape.tile, *x.shape[1:]), x.dtype, sharding=sharding)
                self._compile_head(stage, stage.head, tile, np.zeros(shape.tile, np.int32))

    def compile_pools(self, stages: Sequence[Stage]) -> None:
        """Start to compile the programs that shrink the KV pools of these stages."""
        for stage in stages:
            if stage.layers:
                self._pools.compile(stage.first_layer, self._compiler)

    def compile_layer(
        self, stage: Stage, loaded: LoadedBlock, shape: StepShape, pool: AbstractPool | None = None
    ) -> None:
        """Start to compile a decoder layer for a shape, with the present KV pool by default."""
        pool = self._pools[stage.first_layer] if pool is None else pool
        arguments = (*self.layer_inputs(stage, shape), pool, *loaded.leaves)
        self._compiler.compile(loaded.executable, (shape, len(pool)), *arguments)

    def compile_layer_for_growth(self, stage: Stage, loaded: LoadedBlock) -> None:
        """Start to compile a decoder layer for all numbers of segments that its KV pool may grow to."""
        for shape in self._buckets.all():
            for pool in self._pools.grown(stage.first_layer):
                self.compile_layer(stage, loaded, shape, pool)

    def fuse(
        self, fused: FusedTier, index: int, stage: Stage, shape: StepShape, layers: Sequence[BlockSignature]
    ) -> None:
        """Start to compile stage `index` with these decoder layers as one program of the fused tier."""
        embed, head = (None if loaded is None else loaded.executable for loaded in (stage.embed, stage.head))
        executables = tuple(layer.executable for layer in layers)
        program = StageProgram(self._programs.inputs[stage.placement], shape, embed, executables, head)
        packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=stage.placement.sharding())
        carried = self.layer_inputs(stage, shape)[0] if embed is None else self._newest_tokens(stage)
        signatures = (stage.embed and stage.embed.signature(), *layers, stage.head and stage.head.signature())
        leaves = tuple(signature.leaves for signature in signatures if signature is not None)
        key = StageKey(index, shape, executables, self._pools.segments)
        fused.compile(key, program, packed, carried, tuple(self._pools[stage.pools]), leaves)

    def layer_inputs(self, stage: Stage, shape: StepShape) -> tuple:
        """Return the abstract (x, cos, sin, slots, meta) that a decoder layer is called with."""
        tokens, _, *context = self._step_inputs(stage, shape)
        size = (tokens.shape[0], self._config.hidden_size)
        return jax.ShapeDtypeStruct(size, self._config.dtype, sharding=tokens.sharding), *context

    def wait(self) -> None:
        """Wait until all started executables are ready, and raise the first error among them."""
        self._compiler.wait()

    def save(self) -> None:
        """Save an index of the executables in JAX's cache, for the next start."""
        self._compiler.save()

    def _step_inputs(self, stage: Stage, shape: StepShape) -> tuple:
        """Start to compile the unpacking of a step, and return its results (tokens, rows, cos, sin, slots, meta)."""
        sharding = stage.placement.sharding()
        packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=sharding)
        program = self._programs.inputs[stage.placement]
        return _with_sharding(self._compiler.compile(program, shape, packed, static=(shape,)), sharding)

    def _compile_head(self, stage: Stage, head: LoadedBlock, x: Any, rows: Any) -> jax.ShapeDtypeStruct:
        """Start to compile the head and the normalisation of embeddings; return the abstract logits."""
        key = x.shape[0], rows.shape[0]
        results = self._compiler.compile(head.executable, key, x, rows, *head.leaves)
        hidden, logits = _with_sharding(results, stage.placement.sharding())
        self._compiler.compile(self._programs.normalize, hidden.shape[0], hidden)
        return logits

    def _newest_tokens(self, stage: Stage) -> jax.ShapeDtypeStruct:
        newest = self._sampler.newest
        return jax.ShapeDtypeStruct(newest.shape, newest.dtype, sharding=stage.placement.sharding())


def _with_sharding(results: Any, sharding: Sharding) -> Any:
    """Attach a sharding to abstract results, which have none when they come from lowering."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), results)
