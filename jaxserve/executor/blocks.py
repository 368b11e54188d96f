"""Loaded blocks: for each block of the plan an executable and the flat parameter leaves that it is called with.

All blocks with the same graph definition, precision, window and placement share an executable, so that layers can be
replaced without compiling. Executables take the inputs of a step first and the leaves last, all positional, which is
the cheapest way to dispatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxserve.checkpoint.layout import Layout
from jaxserve.compilation.programs import Program, StartsCompiling, abstract
from jaxserve.core.config import ModelConfig
from jaxserve.core.step_shapes import StepShape
from jaxserve.executor.apart import ApartPlacement, Layer, on_members
from jaxserve.executor.batch import attention_meta, unpack
from jaxserve.executor.block_store import BlockStore, Reference
from jaxserve.executor.host_memory import Parameter
from jaxserve.kernels import AttentionMeta, Pool, ProjectedQKV, write_and_attend
from jaxserve.models import abstract_block, representative, rope_cos_sin, shard_state
from jaxserve.parallel.placement import POOL_AXES, TP, Placement, bytes_held, spec
from jaxserve.quantization import QArray

REPLICATED = PartitionSpec()
# (block, precision) -> layout of quantised weights that are stored, or None
Layouts = Callable[[str, str], Layout | None]
AbstractParameters = Mapping[str, "jax.ShapeDtypeStruct | QArray"]


@dataclass(frozen=True)
class ModuleShard:
    """A block's module with the shapes of one device's shares, and the partition of its leaves."""

    graphdef: nnx.GraphDef
    structure: jax.tree_util.PyTreeDef
    specs: tuple[PartitionSpec, ...]

    def merge(self, leaves: Sequence[Array]) -> nnx.Module:
        """Return the module with one device's leaves."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, leaves))


@dataclass(frozen=True)
class LoadedBlock:
    """A block with its parameters on devices, ready to run."""

    block: str
    executable: Program
    leaves: tuple[Array, ...]
    placement: Placement
    precision: str
    reference: Reference  # to the parameters, which the leaves are
    apart: bool = False  # whether the members of a merged instance run it, each for its own rows

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters, summed over devices."""
        return sum(map(bytes_held, self.leaves))

    @property
    def in_place(self) -> bool:
        """True if the parameters are a variant that the store holds anyway, and take no memory of their own."""
        return self.reference.in_place

    def signature(self) -> "BlockSignature":
        """Return the signature, with which programs can be compiled after the parameters are freed."""
        return BlockSignature(self.executable, jax.tree.map(abstract, self.leaves))

    def free(self) -> None:
        """Release the parameters, which are freed if no other block uses them. This one must not run any more."""
        self.reference.release()


@dataclass(frozen=True)
class BlockSignature:
    """The executable and the abstract leaves of a loaded block: enough to compile for it."""

    executable: Program
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    def signature(self) -> "BlockSignature":
        """Return this signature."""
        return self


class BlockBuilder:
    """A factory of loaded blocks, which share executables where they are equal, and parameters through a store.

    There is one for all instances of an engine.
    """

    def __init__(self, config: ModelConfig, store: BlockStore, layouts: Layouts = lambda block, precision: None):
        """Take a configuration that is padded for the degree of tensor parallelism, and the layouts of stored weights.

        Only `signature` needs the layouts.
        """
        self.config, self._store, self._layouts = config, store, layouts
        self._executables: dict[tuple, Program] = {}
        # The shapes of what was loaded, by block or kind of block, and precision. Only reading a layer that other tools
        # have quantised shows whether its weights have zeros.
        self._loaded: dict[tuple[str, str], AbstractParameters] = {}

    def load(
        self,
        block: str,
        precision: str,
        placement: Placement,
        *,
        between: Callable[[], None] | None = None,
        copied: Callable[[int], None] | None = None,
    ) -> LoadedBlock:
        """Return a block with its parameters from the store. `between` and `copied` are as in `BlockStore.acquire`."""
        reference = self._store.acquire(block, precision, placement, between=between, copied=copied)
        return self.build(block, precision, placement, reference)

    def hold(self, block: str, precision: str, placement: Placement) -> None:
        """Have a block in the host's memory for `load`, as `BlockStore.hold`."""
        self._store.hold(block, precision, placement)

    def apart(self, members: Sequence[LoadedBlock], place: ApartPlacement) -> LoadedBlock:
        """Return a decoder layer that each member of a merged instance runs for its own rows, on what it has.

        The layer shares the members' parameters, which must not be freed before it.
        """
        first = members[0]
        _, variables = abstract_block(self.config, first.block, first.precision)
        parameters = first.reference.parameters
        axes = [variable.axes for name, variable in variables.items() for _ in jax.tree.leaves(parameters[name])]
        leaves = tuple(map(place.join, zip(*(member.leaves for member in members), strict=True), axes))
        executable = self._executable(first.block, parameters, place, first.precision)
        reference = Reference(parameters)
        return LoadedBlock(first.block, executable, leaves, place.placement, first.precision, reference, apart=True)

    def build(self, block: str, precision: str, placement: Placement, reference: Reference) -> LoadedBlock:
        """Return a block that runs on parameters of its devices. In a quantised precision some are QArrays.

        This compiles nothing: an executable is compiled ahead by its user, or at its first use.
        """
        _, variables = abstract_block(self.config, block, precision)
        leaves = tuple(leaf for name in variables for leaf in jax.tree.leaves(reference.parameters[name]))
        executable = self._executable(block, reference.parameters, placement, precision)
        if (block, precision) not in self._loaded:
            shapes = jax.tree.map(_shape, dict(reference.parameters))
            self._loaded[block, precision] = shapes
            self._loaded.setdefault((representative(self.config, block), precision), shapes)
        return LoadedBlock(block, executable, leaves, placement, precision, reference)

    def signature(self, block: str, precision: str, placement: Placement) -> BlockSignature:
        """Return the signature that a block has when it is loaded on the devices of a placement."""
        _, variables = abstract_block(self.config, block, precision)
        parameters = self._abstract_parameters(block, precision)
        leaves = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.sharding(variable.axes))
            for name, variable in variables.items()
            for leaf in jax.tree.leaves(parameters[name])
        )
        return BlockSignature(self._executable(block, parameters, placement, precision), leaves)

    def apart_signature(self, block: str, precision: str, place: ApartPlacement) -> BlockSignature:
        """Return the signature of a decoder layer that `apart` makes."""
        _, variables = abstract_block(self.config, block, precision)
        parameters = self._abstract_parameters(block, precision)
        leaves = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place.sharding(spec(variable.axes)))
            for name, variable in variables.items()
            for leaf in jax.tree.leaves(parameters[name])
        )
        return BlockSignature(self._executable(block, parameters, place, precision), leaves)

    def compile_copies(
        self,
        compiler: StartsCompiling,
        block: str,
        precision: str,
        target: Placement,
        copies: Sequence[Placement],
    ) -> None:
        """Start to compile what `load` runs for a target placement if the block is on devices only as `copies`."""
        shapes = Reference(self._abstract_parameters(block, precision))
        self._store.compile_copies(compiler, shapes, block, precision, target, copies)

    def _abstract_parameters(self, block: str, precision: str) -> AbstractParameters:
        for known in (block, representative(self.config, block)):
            if (known, precision) in self._loaded:
                return self._loaded[known, precision]
        _, variables = abstract_block(self.config, block, precision)
        values = {name: variable.get_value() for name, variable in variables.items()}
        layout = self._layouts(block, precision)
        if layout is None:
            return values
        return {
            name: layout.abstract(name, value) if isinstance(value, QArray) else value for name, value in values.items()
        }

    def _executable(
        self,
        block: str,
        tensors: Mapping[str, Parameter] | AbstractParameters,
        placement: Placement | ApartPlacement,
        precision: str,
    ) -> Program:
        kind, _, index = block.partition(".")
        window = self.config.window(int(index)) if index else None
        # QArrays of one precision differ in zeros, groups and the type of scales.
        values = [tensors[name] for name in sorted(tensors)]
        structure = tuple(map(jax.tree.structure, values))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(values))
        kind_of_block = (representative(self.config, block), precision, window)
        signature = (*kind_of_block, placement, structure, shapes)
        if signature not in self._executables:  # graph definitions are not part of it: they take long to compare
            if isinstance(placement, ApartPlacement):
                module = self._shard(block, tensors, placement.member(0), precision)
                function = on_members(self._layer_function(module, placement.degree, window), placement, module.specs)
            else:
                module = self._shard(block, tensors, placement, precision)
                function = {
                    "embed": self._embed,
                    "layers": partial(self._layer, window=window),
                    "head": self._head,
                }[kind](module, placement)
            self._executables.setdefault(signature, Program(repr(kind_of_block), function))
        return self._executables[signature]

    def _shard(
        self, block: str, tensors: Mapping[str, Parameter] | AbstractParameters, placement: Placement, precision: str
    ) -> ModuleShard:
        graphdef, variables = abstract_block(self.config, block, precision)
        specs: list[PartitionSpec] = []
        for name, variable in variables.items():
            specs += [spec(variable.axes)] * len(jax.tree.leaves(tensors[name]))
        shards = {name: _local_size(tensors[name], variable.axes, placement) for name, variable in variables.items()}
        return ModuleShard(graphdef, jax.tree.structure(shard_state(variables, shards)), tuple(specs))

    def _embed(self, module: ModuleShard, placement: Placement) -> Callable:
        """Return (tokens i32[T], newest i32[slots], leaves) -> x [T, E]. A token -1 - slot stands for newest[slot]."""

        def embed(tokens: Array, newest: Array, *leaves: Array) -> Array:
            tokens = jax.numpy.where(tokens < 0, newest[-1 - tokens], tokens)
            return module.merge(leaves)(tokens)

        return jax.jit(embed, out_shardings=placement.sharding())

    def _layer(self, module: ModuleShard, placement: Placement, window: int | None) -> Callable:
        """Return (x [T, E], cos, sin [T, D/2], slots i32[T], meta, pool, leaves) -> (x, pool). The pool is donated."""
        heads = spec(POOL_AXES)
        layer = self._layer_function(module, len(placement.devices), window)
        layer = _on_each_device(layer, placement, (*[REPLICATED] * 5, heads, *module.specs), (REPLICATED, heads))
        shardings = (placement.sharding(), placement.sharding(POOL_AXES))
        return jax.jit(layer, donate_argnums=5, out_shardings=shardings)

    def _layer_function(self, module: ModuleShard, degree: int, window: int | None) -> Layer:
        """Return what each of `degree` devices computes of a layer."""
        attention = partial(
            write_and_attend, scale=self.config.head_dim**-0.5, window=window, backend=self.config.kernel_backend
        )
        all_reduce = partial(jax.lax.psum, axis_name=TP) if degree > 1 else None

        def layer(
            x: Array, cos: Array, sin: Array, slots: Array, meta: AttentionMeta, pool: Pool, *leaves: Array
        ) -> tuple[Array, Pool]:
            def attend(qkv: ProjectedQKV) -> Array:
                nonlocal pool
                out, pool = attention(qkv, pool, slots, meta)
                return out

            x = module.merge(leaves)(x, cos, sin, attend, all_reduce)
            return x, pool

        return layer

    def _head(self, module: ModuleShard, placement: Placement) -> Callable:
        """Return (x [T, E], rows i32[R], leaves) -> (normalised hidden [R, E], logits f32[R, V]). Row T is zeros."""
        several = len(placement.devices) > 1
        all_gather = partial(jax.lax.all_gather, axis_name=TP, axis=1, tiled=True) if several else None

        def head(x: Array, rows: Array, *leaves: Array) -> tuple[Array, Array]:
            head = module.merge(leaves)
            x = x.at[rows].get(mode="fill", fill_value=0)
            return head.norm(x), head(x, all_gather)

        head = _on_each_device(head, placement, (REPLICATED, REPLICATED, *module.specs), (REPLICATED, REPLICATED))
        return jax.jit(head, out_shardings=placement.sharding())

    def step_inputs(self, placement: Placement) -> Program:
        """Return a program (packed i32, shape) -> (tokens, rows, cos, sin, slots, meta) for a stage."""

        def inputs(packed: Array, shape: StepShape) -> tuple:
            fields = unpack(packed, shape)
            cos, sin = rope_cos_sin(self.config, fields["positions"])
            return fields["tokens"], fields["rows"], cos, sin, fields["slots"], attention_meta(fields)

        return Program("inputs", jax.jit(inputs, static_argnums=1, out_shardings=placement.sharding()))


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _local_size(value: Any, axes: Sequence[str | None], placement: Placement) -> Any:
    """Give a QArray that is split over inputs the number of inputs of one device; its leaves stay."""
    if not isinstance(value, QArray) or spec(axes)[-1] is None:
        return value
    return replace(value, size=value.size // len(placement.devices))


def _on_each_device(
    function: Callable, placement: Placement, inputs: tuple[PartitionSpec, ...], outputs: tuple[PartitionSpec, ...]
) -> Callable:
    """Run a function on each device with the device's shares of the arrays, as custom kernels need it."""
    if len(placement.devices) == 1:
        return function
    # Custom calls do not declare how their outputs vary over devices, so that cannot be checked.
    return jax.shard_map(function, mesh=placement.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
