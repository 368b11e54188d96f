"""Compilation for a GPU without having one: XLA, Mosaic and ptxas run to the end, and nothing is executed.

It needs JAX's CUDA plugin (`pip install --no-deps jax-cuda13-plugin==V jax-cuda13-pjrt==V` for version V of jax) and
ptxas of the CUDA toolkit on PATH, but no driver and no GPU. It finds shared memory that does not fit, instructions that
the chip lacks, and copies of donated buffers. It checks neither results nor speed.
"""

import importlib.util
import shutil
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def missing() -> str | None:
    """Return what is missing for `compile_for`, or None."""
    if not any(importlib.util.find_spec(name) for name in PLUGINS):
        return "JAX's CUDA plugin is not installed"
    if shutil.which("ptxas") is None:
        return "ptxas is not on PATH"
    return None


def compile_for(
    target: str, f: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Return `f` compiled for one device of a target ("h200"). Arguments are arrays or shapes.

    The arguments with the indices `donate` are donated.
    """
    config = files(__package__).joinpath(f"{target}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(f, donate_argnums=donate).trace(*shapes).lower().compile()
