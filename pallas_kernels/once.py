"""Kernels that are lowered once in a process, whatever programs they are in.

Lowering one is 0.3 to 1.5 s of Python, and a start compiles some hundred programs of the same few kernels. A program
that contains one which has been lowered pays a few ms; XLA too compiles it only once, because it is the same to the
last byte.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax import Array, export

TARGET = "mosaic_gpu_v2"  # what Mosaic's custom calls are named, in all supported versions of JAX
Launch = Callable[..., Any]
"""A function of device arrays that launches a kernel."""

_lowered: dict[Hashable, Future[Launch]] = {}
_lock = threading.Lock()
# A kernel tells from which lines of code it was lowered. Those of a thread of its own do not depend on the program that
# is the first to have it, so that programs are found again in the persistent cache.
_thread = ThreadPoolExecutor(1, "jaxserve-lower")


def lowered_once(launch: Launch, identity: Hashable, operands: Sequence[Array]) -> Launch:
    """`launch` for operands of these shapes, for CUDA alone, as it was lowered first for an equal `identity`.

    Threads that ask for what is being lowered wait for it. Raises what failed.
    """
    shapes = tuple((operand.shape, operand.dtype) for operand in operands)
    mesh = jax.sharding.get_abstract_mesh()  # it may say which GPU to lower for
    key = (identity, shapes, mesh)
    with _lock:
        if key not in _lowered:
            _lowered[key] = _thread.submit(_lower, launch, shapes, mesh)
    return _lowered[key].result()


def _lower(launch: Launch, shapes: Sequence[tuple], mesh: jax.sharding.AbstractMesh) -> Launch:
    checks = [export.DisabledSafetyCheck.custom_call(TARGET)]  # what is exported stays in this process
    with jax.sharding.use_abstract_mesh(mesh):
        operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        exported = export.export(jax.jit(launch), platforms=("cuda",), disabled_checks=checks)(*operands)
    return jax.jit(exported.call)  # a program that launches it several times has it once
