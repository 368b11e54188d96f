"""BlockExecutor: runs one instance of the plan, block by block.

A step is a host loop over the blocks that only dispatches. Nothing waits for the device until the engine fetches the
step's tokens, which it does one step later.
"""

from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array

from jaxserve.compilation.programs import Compiler
from jaxserve.core.errors import StageFailed
from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Sequence
from jaxserve.core.step_shapes import Buckets, StepShape
from jaxserve.core.work import Work
from jaxserve.executor.batch import pack
from jaxserve.executor.blocks import BlockSignature, LoadedBlock
from jaxserve.executor.compile_ahead import StepCompiler
from jaxserve.executor.faults import Fault
from jaxserve.executor.fused import FusedTier, StageKey, StageProgram
from jaxserve.executor.outputs import DispatchedStep, ForwardOutput, wants_prompt_logprobs
from jaxserve.executor.pools import Pools
from jaxserve.executor.programs import InstanceSizes, Programs
from jaxserve.executor.stage_threads import StageThreads
from jaxserve.executor.stages import Stage, stages_of
from jaxserve.kvcache import PageTable
from jaxserve.parallel.placement import Placement
from jaxserve.sampling.device_sampler import DeviceSampler, Sampled
from jaxserve.sampling.ops import Logprobs

T = TypeVar("T")


class BlockExecutor:
    """An executor that runs the blocks of a plan on real devices (`core.work.Executor`)."""

    def __init__(
        self,
        blocks: abc.Sequence[LoadedBlock],
        pools: Pools,
        programs: Programs,
        sampler: DeviceSampler,
        buckets: Buckets,
        table: PageTable,
        page_size: int,
        fused: FusedTier | None = None,
        compiler: Compiler | None = None,
        faults: Mapping[int, Fault] | None = None,
    ):
        """Take the model's `blocks` in order, the KV pools of their decoder layers, and all instances' programs.

        Steps run block by block without `fused`. The default `compiler` has no saved executables. `faults` are those of
        stages whose devices shall fail.
        """
        self.blocks = list(blocks)
        self.pools = pools
        self.sampler = sampler
        self.buckets = buckets
        self.table = table
        self.page_size = page_size
        self._fused = fused
        self._builder = programs.builder
        self._stages = stages_of(blocks)
        split = [stage.placement.devices for stage in self._stages if len(stage.placement.devices) > 1]
        self._devices_share_threads = any(devices[0].platform == "cpu" for devices in split)
        last = self._stages[-1].placement
        self._inputs = {stage.placement: programs.inputs(stage.placement) for stage in self._stages}
        self._slice_tile, self._normalize = programs.slice_tile(last, buckets.tile), programs.normalize(last)
        self._compiler, self._faults = compiler or Compiler(), faults or {}
        sizes = InstanceSizes(buckets, pools.sizes, sampler.max_len, pools.lanes.count)
        self._ahead = StepCompiler(self._compiler, programs, sizes)
        on_cpu = self._stages[0].placement.platform == "cpu"
        self._threads = StageThreads(len(self._stages) if on_cpu else 1)
        self._no_tokens: Array | None = None  # on the first of several stages
        # The calls of a stage's decoder layers, by the stage's index, the step's shape and the segments of KV pools.
        self._layer_calls: dict[tuple[int, StepShape, int], tuple[Callable, ...]] = {}

    def execute(self, work: Work) -> DispatchedStep:
        """Dispatch a step without waiting for it. Raise `StageFailed` if that fails at a stage."""
        shape = self.buckets.of(work)
        packed, x = pack(work, shape, self.table.rows, self.page_size), None
        *before, last = range(len(self._stages))
        for stage in before:
            x, _ = self._run_at(stage, self._run_stage, shape, packed, x)
        return self._run_at(last, self._finish, work, shape, packed, x)

    def _run_at(self, stage: int, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns in a stage's thread."""
        try:
            if fault := self._faults.get(stage):
                fault.reached()
            return self._threads.run(stage, function, stage, *arguments)
        except Exception as error:
            raise StageFailed(stage, error) from error

    def failure_of(self, error: Exception) -> StageFailed:
        """Return the failure of a step whose results could not be fetched, with the stage that has failed.

        That is the first one whose KV has been lost with it, otherwise the last one.
        """
        for index, stage in enumerate(self._stages):
            try:
                jax.block_until_ready(self.pools[stage.pools])
            except Exception:
                return StageFailed(index, error)
        return StageFailed(len(self._stages) - 1, error)

    def _finish(self, stage: int, work: Work, shape: StepShape, packed: np.ndarray, x: Array | None) -> DispatchedStep:
        """Dispatch the last stage of a step, and what follows from its results."""
        x, results = self._run_stage(stage, shape, packed, x)
        out = ForwardOutput(x, *results)
        scores = self._score_prompts(work, shape, out)
        embeds = any(chunk.last and chunk.sequence.request.embed for chunk in work.chunks)
        embeddings = self._normalized(out.hidden) if embeds else None
        if work.sampled_late:
            sample = partial(self._threads.run, stage, self._sample, work, out.logits)
        else:
            sample = partial(self._sample, work, out.logits)
        return DispatchedStep(work, sample, scores, embeddings, self.failure_of)

    def start_compiling(self) -> None:
        """Start to compile or load the executables of every shape, in other threads."""
        self._ahead.compile(self._stages, self.pools.segments)
        self.fuse_decodes([loaded.signature() for stage in self._stages for loaded in stage.layers])

    def compile(self) -> None:
        """Compile or load the executables of every shape, unless they are there. Nothing runs on the devices."""
        self.start_compiling()
        self._compiler.wait()
        if self._fused is not None:
            self._fused.wait()

    def warm(self) -> None:
        """Compile or load the executables of every shape, and run some of them on padding."""
        self.compile()
        for shape in self._warm_up_shapes():
            self._run_on_padding(shape)
        for stage in self._stages:
            if stage.layers:
                self.pools.run_on_padding(stage.first_layer)
        self.wait_for_pools()

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        """Copy pages as `moves` (source: target) says, then release all pages from `pages` on.

        Call it between two steps. Steps that were dispatched before use the pages as they were. Memory is given back
        where the platform can do so.
        """
        self.pools.shrink(moves, pages)

    def wait_for_pools(self) -> None:
        """Wait until nothing that was dispatched changes the KV pools any more."""
        jax.block_until_ready(self.pools[:])

    def fuse(self, tier: FusedTier | None) -> None:
        """Use this fused tier, or none, from the next step on. The caller keeps the tier used before."""
        self._fused = tier

    def settle(self) -> None:
        """Wait for the executables that are being compiled in the background, and save them for the next start."""
        self._compiler.wait()
        if self._fused is not None:
            self._fused.wait()
        self._compiler.save()

    def prepare(
        self,
        block: str,
        precision: str,
        *,
        between: Callable[[], None] | None = None,
        copied: Callable[[int], None] | None = None,
    ) -> LoadedBlock:
        """Return a loaded block that can take the place of `block` on its devices, by `replace`, or be freed.

        Steps may go on meanwhile. `between` and `copied` may wait, and are called as by `BlockStore.acquire`.
        """
        placement = self.blocks[self._index(block)].placement
        return self._builder.load(block, precision, placement, between=between, copied=copied)

    def replace(self, new: abc.Sequence[LoadedBlock]) -> list[LoadedBlock]:
        """Replace blocks between two steps, and return the replaced ones for the caller to free.

        Steps that were dispatched before still use their parameters. Nothing is compiled if the executables
        were warmed.
        """
        blocks = list(self.blocks)
        replaced: list[LoadedBlock] = []
        for loaded in new:
            index = self._index(loaded.block)
            assert blocks[index].placement == loaded.placement, "a block is replaced on its own devices"
            replaced.append(blocks[index])
            blocks[index] = loaded
        self.blocks = blocks
        self._use_stages(stages_of(blocks))
        return replaced

    def hold(self, block: str, precision: str) -> None:
        """Have a variant of a block in the host's memory if the store holds it there."""
        self._builder.hold(block, precision, self.blocks[self._index(block)].placement)

    def exchange(self, block: str, precision: str) -> None:
        """Free a block between two steps, and then load it in another precision in its place.

        This waits for the steps that were dispatched, and for the copy. If the block cannot be loaded, it is loaded in
        its old precision again before this raises.
        """
        old = self.blocks[self._index(block)]
        self.wait_for_pools()
        old.free()
        try:
            new = self._load_whole(block, precision, old.placement)
        except BaseException:
            self.replace([self._load_whole(block, old.precision, old.placement)])
            raise
        self.replace([new])

    def _load_whole(self, block: str, precision: str, placement: Placement) -> LoadedBlock:
        """Return a loaded block whose parameters have arrived."""
        loaded = self._builder.load(block, precision, placement)
        try:
            jax.block_until_ready(loaded.leaves)
        except BaseException:
            loaded.free()
            raise
        return loaded

    def warm_layer(self, loaded: LoadedBlock) -> None:
        """Compile the executable of a decoder layer that is not in use, and run it on padding.

        Only the null page of the KV pool changes.
        """
        stage = next(stage for stage in self._stages if stage.placement == loaded.placement and stage.layers)
        layer = stage.first_layer
        self._ahead.compile_layer(stage.placement, loaded, self.pools.segments)
        self._compiler.wait()
        for shape in self._warm_up_shapes():
            inputs = jax.tree.map(_zeros, self._ahead.layer_inputs(stage.placement, shape))
            run = loaded.executable.at((shape.of_layers, self.pools.pages))
            _, self.pools[layer] = run(*inputs, self.pools[layer], *loaded.leaves)
        jax.block_until_ready(self.pools[layer])

    @property
    def fuses(self) -> bool:
        """True if `fuse_decodes` fuses steps."""
        return self._fused is not None

    def fuse_decodes(self, layers: abc.Sequence[BlockSignature]) -> None:
        """Start to fuse the shapes of decode-only steps for these decoder layers, if there is a fused tier."""
        if self._fused is None:
            return
        segments = self.pools.segments
        for index, shape, program, arguments in self._ahead.fused_stages(self._stages, layers, segments):
            self._fused.compile(StageKey(index, shape, program.layers, segments), program, *arguments)

    @contextmanager
    def running(self, layers: abc.Sequence[LoadedBlock], *, fused: bool = False) -> Iterator[None]:
        """Run steps through these decoder layers alone, block by block or `fused`, while nothing else runs steps.

        Each layer runs on its own devices. The results are wrong: such steps are only good to be timed.
        """
        stages, tier = self._stages, self._fused
        if not fused:
            self._fused = None
        self._use_stages(
            tuple(
                replace(stage, layers=tuple(loaded for loaded in layers if loaded.placement == stage.placement))
                for stage in stages
            )
        )
        try:
            yield
        finally:
            self._fused = tier
            self._use_stages(stages)

    def close(self) -> None:
        """Release the parameters; free the pools and the sampler's state. The executor cannot be used afterwards.

        Blocks that were freed before, and pools that were given up to another instance, are left alone.
        """
        for loaded in self.blocks:
            loaded.free()
        self.pools.close()
        self.end()

    def end(self) -> None:
        """Free what belongs to the executor alone, not its blocks and pools. It cannot be used afterwards."""
        self._threads.close()
        if self._fused is not None:
            self._fused.close()
        self.sampler.close()

    def _use_stages(self, stages: tuple[Stage, ...]) -> None:
        self._stages = stages
        self._layer_calls.clear()
        if self._fused is not None:
            self._fused.blocks_changed()

    def _index(self, block: str) -> int:
        return next(index for index, loaded in enumerate(self.blocks) if loaded.block == block)

    def _warm_up_shapes(self) -> abc.Sequence[StepShape]:
        """Return the shapes to run before serving: all, or on CPU the smallest decode and the smallest prefill shape.

        On CPU large shapes take long, and the first run of an executable creates nothing.
        """
        shapes = self.buckets.all()
        if self._stages[0].placement.platform != "cpu":
            return shapes
        smallest = {bool(shape.tiles): shape for shape in shapes}  # the largest come first
        return tuple(smallest.values())

    def _run_on_padding(self, shape: StepShape) -> None:
        """Run a step of a shape on padding, block by block, through one decoder layer of each executable."""
        packed, x = np.zeros(shape.size, np.int32), None
        for index, stage in enumerate(self._stages):
            carried = self._newest_tokens(stage) if x is None else jax.device_put(x, stage.placement.sharding())
            layers = {loaded.executable: layer for layer, loaded in enumerate(stage.layers)}.values()
            x, results = self._run_blocks(index, stage, shape, packed, carried, layers)
        out = self._one_program_at_a_time(ForwardOutput(x, *results))
        self.sampler.run_on_padding(out.logits)
        self._normalized(out.hidden)
        if shape.tiles:
            self._score_tile(out, 0, np.zeros(shape.tile, np.int32))

    def _sample(self, work: Work, logits: Array) -> Sampled:
        """Dispatch the sampling of a step's rows; those whose token is known or not needed any more sample nothing."""
        sequences: list[Sequence | None] = [
            *work.decodes,
            *(c.sequence if c.last and c.sequence.request.generates else None for c in work.chunks),
        ]
        if work.sampled_late:
            sequences = [None if s is None or s.slot < 0 or s.num_known_inflight else s for s in sequences]
        return self.sampler.sample(logits, sequences)

    def _run_stage(
        self, index: int, shape: StepShape, packed: np.ndarray, x: Array | None
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return (x, results of the head) of a stage, fused if that is ready. `x` is that of the stage before."""
        stage = self._stages[index]
        carried = self._newest_tokens(stage) if x is None else jax.device_put(x, stage.placement.sharding())
        if self._fused is not None and not any(loaded.apart for loaded in stage.layers):  # they are soon replaced
            key = StageKey(index, shape, stage.executables, self.pools.segments)
            fused = self._fused.find(key) or self._fused.seek(key, partial(self._outline, stage, shape))
            if fused is not None:
                pools = tuple(self.pools[stage.pools])
                x, results, self.pools[stage.pools] = fused(packed, carried, pools, stage.leaves)
                return x, results
        return self._run_blocks(index, stage, shape, packed, carried, range(len(stage.layers)))

    def _outline(self, stage: Stage, shape: StepShape) -> tuple[StageProgram, tuple]:
        """Return a stage as one program, and its abstract arguments."""
        return self._ahead.fused_stage(stage, shape, stage.layers, self.pools.segments)

    def _run_blocks(
        self, index: int, stage: Stage, shape: StepShape, packed: np.ndarray, carried: Array, layers: Iterable[int]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Run a stage block by block, through the given decoder layers of it."""
        inputs = self._inputs[stage.placement].executables.get(shape)
        unpacked = self._inputs[stage.placement](packed, shape) if inputs is None else inputs(packed)
        tokens, rows, *context = unpacked
        x = carried
        if stage.embed is not None:
            embed = stage.embed.executable.at((shape.tokens, self.sampler.slots))
            x = embed(tokens, carried, *stage.embed.leaves)
        calls = self._layer_calls_of(index, stage, shape)
        for layer in layers:
            pool = stage.first_layer + layer
            x, self.pools[pool] = calls[layer](x, *context, self.pools[pool], *stage.layers[layer].leaves)
        if stage.head is None:
            return x, ()
        return x, stage.head.executable.at((shape.tokens, shape.rows))(x, rows, *stage.head.leaves)

    def _layer_calls_of(self, index: int, stage: Stage, shape: StepShape) -> tuple[Callable, ...]:
        key = index, shape, self.pools.segments
        if key not in self._layer_calls:
            pages = self.pools.pages
            self._layer_calls[key] = tuple(loaded.executable.at((shape.of_layers, pages)) for loaded in stage.layers)
        return self._layer_calls[key]

    def _newest_tokens(self, stage: Stage) -> Array:
        """Return the tokens that rows of a step may name which the host does not know yet: the sampler's newest ones.

        With several stages the host knows all tokens, so that no step waits for another one's sampler.
        """
        if len(self._stages) == 1:
            return self.sampler.newest
        if self._no_tokens is None:
            nothing = np.zeros(self.sampler.newest.shape, self.sampler.newest.dtype)
            self._no_tokens = jax.device_put(nothing, stage.placement.sharding())
        return self._no_tokens

    def _score_prompts(self, work: Work, shape: StepShape, out: ForwardOutput) -> dict[int, list[Logprobs]]:
        """Return log-probabilities of the prompt tokens that follow the tokens of each chunk that asks for them."""
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

    def _score_tile(self, out: ForwardOutput, start: int, targets: np.ndarray) -> Logprobs:
        head = self.blocks[-1]
        tile = len(targets)
        x = self._slice_tile.at(out.x.shape[0])(self._one_program_at_a_time(out).x, np.int32(start))
        _, logits = head.executable.at((tile, tile))(x, np.arange(tile, dtype=np.int32), *head.leaves)
        return self._one_program_at_a_time(self.sampler.programs.score.at(tile)(logits, targets))

    def _normalized(self, hidden: Array) -> Array:
        return self._normalize.at(hidden.shape[0])(hidden)

    def _one_program_at_a_time(self, results: T) -> T:
        """Return a program's results, after waiting for them if several devices share the processor's threads.

        A device's part of a program occupies a thread while it waits for the parts of other devices, so that two
        independent programs at once may block each other if XLA has hardly more threads than devices. `resolve` asks
        for more, but a user, or a program that started JAX before, may have decided otherwise.
        """
        return jax.block_until_ready(results) if self._devices_share_threads else results


def _zeros(abstract: jax.ShapeDtypeStruct) -> Array:
    return jax.device_put(np.zeros(abstract.shape, abstract.dtype), abstract.sharding)
