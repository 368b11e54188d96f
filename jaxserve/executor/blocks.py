"""The block table: one row per block of the plan, an executable and the flat parameter leaves it is called with.

A row's executable is shared by all blocks of the same signature (graph definition, precision, window, placement), so
that layers can be exchanged without compiling. Inputs of a step come first, leaves last, all positional: the dispatch
path that costs least.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxserve.core.config import ModelConfig
from jaxserve.executor.batch import StepShape, attention_meta
from jaxserve.kernels import AttentionMeta, kv_write, paged_attention
from jaxserve.models import abstract_block, block_state, rope_cos_sin
from jaxserve.parallel.placement import POOL_AXES, TP, Placement
from jaxserve.quantization import QArray

Executable = Callable[..., tuple[Array, ...]]
Parameter = np.ndarray | Array | QArray


@dataclass(frozen=True)
class Row:
    """A block as it runs now."""

    block: str
    executable: Executable
    leaves: tuple[Array, ...]
    placement: Placement
    precision: str

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters on each device, summed over devices."""
        return sum(shard.data.nbytes for leaf in self.leaves for shard in leaf.addressable_shards)

    def free(self) -> None:
        """Gives the parameters' memory back: for a row that is in no table and shares them with none."""
        for leaf in self.leaves:
            leaf.delete()


class BlockBuilder:
    """Makes rows: places a block's parameters and finds (or makes) the executable of its signature."""

    def __init__(self, config: ModelConfig):
        """`config` is the physical one: padded for the degree of tensor parallelism."""
        self.config = config
        self._executables: dict[tuple, Executable] = {}

    def build(self, block: str, tensors: Mapping[str, Parameter], placement: Placement, precision: str) -> Row:
        """A row for a block with these parameters, keyed by their dotted paths in the module.

        In a quantised precision some are QArrays, of whatever group. A parameter that is a device array already (tied
        embeddings) is shared, not copied. Compiles nothing: what is compiled at its first use is the executable.
        """
        graphdef, variables = abstract_block(self.config, block, precision)
        state = block_state(variables, tensors)
        leaves: list[Array] = []
        for name, variable in variables.items():
            sharding = placement.sharding(variable.axes)
            parts = jax.tree.leaves(tensors[name])
            leaves += [part if isinstance(part, Array) else jax.device_put(part, sharding) for part in parts]
        executable = self._executable(block, graphdef, jax.tree.structure(state), placement)
        return Row(block, executable, tuple(leaves), placement, precision)

    def _executable(
        self, block: str, graphdef: nnx.GraphDef, structure: jax.tree_util.PyTreeDef, placement: Placement
    ) -> Executable:
        kind, _, number = block.partition(".")
        window = self.config.window(int(number)) if number else None
        signature = (kind, graphdef, structure, window, placement)
        if signature not in self._executables:
            module = partial(_merge, graphdef, structure)
            self._executables[signature] = {
                "embed": self._embed,
                "layers": partial(self._layer, window=window),
                "head": self._head,
            }[kind](module, placement)
        return self._executables[signature]

    def _embed(self, module: Callable, placement: Placement) -> Executable:
        """(tokens i32[T], newest tokens i32[slots], leaves) -> x [T, E]. A token of -1 - slot is that slot's newest."""

        def embed(tokens: Array, newest: Array, *leaves: Array) -> Array:
            tokens = jax.numpy.where(tokens < 0, newest[-1 - tokens], tokens)
            return module(leaves)(tokens)

        return jax.jit(embed, out_shardings=placement.sharding())

    def _layer(self, module: Callable, placement: Placement, window: int | None) -> Executable:
        """(x [T, E], cos, sin [T, D/2], slots i32[T], meta, pool, leaves) -> (x, pool); the pool is donated."""
        attention = _attention(
            placement, scale=self.config.head_dim**-0.5, window=window, backend=self.config.kernel_backend
        )

        def layer(
            x: Array, cos: Array, sin: Array, slots: Array, meta: AttentionMeta, pool: Array, *leaves: Array
        ) -> tuple[Array, Array]:
            def attend(q: Array, k: Array, v: Array) -> Array:
                nonlocal pool
                out, pool = attention(q, k, v, pool, slots, meta)
                return out

            x = module(leaves)(x, cos, sin, attend)
            return x, pool

        shardings = (placement.sharding(), placement.sharding(POOL_AXES))
        return jax.jit(layer, donate_argnames="pool", out_shardings=shardings)

    def _head(self, module: Callable, placement: Placement) -> Executable:
        """(x [T, E], rows i32[R], leaves) -> (normalised hidden states [R, E], logits f32[R, V])."""

        def head(x: Array, rows: Array, *leaves: Array) -> tuple[Array, Array]:
            head = module(leaves)
            return head.norm(x[rows]), head(x[rows])

        return jax.jit(head, out_shardings=placement.sharding())

    def step_inputs(self, placement: Placement) -> Callable[[Array, StepShape], tuple]:
        """An executable (packed i32, shape) -> (tokens, rows, cos, sin, slots, meta) for a stage on `placement`."""

        def unpack(packed: Array, shape: StepShape) -> tuple:
            fields = shape.unpack(packed)
            cos, sin = rope_cos_sin(self.config, fields["positions"])
            return fields["tokens"], fields["rows"], cos, sin, fields["slots"], attention_meta(fields)

        return jax.jit(unpack, static_argnums=1, out_shardings=placement.sharding())


def _merge(graphdef: nnx.GraphDef, structure: jax.tree_util.PyTreeDef, leaves: tuple[Array, ...]) -> nnx.Module:
    return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))


def _attention(placement: Placement, **kwargs: Any) -> Callable[..., tuple[Array, Array]]:
    """(q, k, v, pool, slots, meta) -> (out, pool), each device working on its own kv heads alone."""

    def attention(q: Array, k: Array, v: Array, pool: Array, slots: Array, meta: AttentionMeta) -> tuple[Array, Array]:
        pool = kv_write(pool, k, v, slots)
        return paged_attention(q, pool, meta, **kwargs), pool

    if len(placement.devices) == 1:
        return attention
    heads, whole = PartitionSpec(None, TP), PartitionSpec()
    return jax.shard_map(
        attention,
        mesh=placement.mesh,
        in_specs=(heads, heads, heads, heads, whole, whole),
        out_specs=(heads, heads),
        check_vma=False,  # custom calls do not say how their outputs vary
    )
