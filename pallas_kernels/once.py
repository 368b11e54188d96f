"""A cache of lowered kernels, so that each kernel is lowered once in a process.

Lowering a kernel takes 0.3 to 1.5 s of Python, and a start compiles about a hundred programs of the same few kernels.
With this cache further programs of a kernel cost a few ms. XLA compiles the kernel only once as well, because it is
equal to the last byte.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax import Array, export

TARGET = "mosaic_gpu_v2"  # the name of Mosaic's custom calls in all supported versions of JAX
Launch = Callable[..., Any]
"""A function of device arrays that launches a kernel."""

_lowered: dict[Hashable, Future[Launch]] = {}
_lock = threading.Lock()
# A lowered kernel names the lines of code that it was lowered from. A thread of its own keeps the calling program out
# of these lines, so that later starts find the programs in the persistent cache.
_thread = ThreadPoolExecutor(1, "jaxserve-lower")


def lowered_once(launch: Launch, identity: Hashable, operands: Sequence[Array]) -> Launch:
    """Return `launch`, lowered for CUDA and these shapes by the first call with an equal `identity`.

    Other threads wait while a kernel is being lowered. Raise what lowering raises.
    """
    shapes = tuple((operand.shape, operand.dtype) for operand in operands)
    mesh = jax.sharding.get_abstract_mesh()  # it may name the GPU to lower for
    key = (identity, shapes, mesh)
    with _lock:
        if key not in _lowered:
            _lowered[key] = _thread.submit(_lower, launch, shapes, mesh)
    return _lowered[key].result()


def _lower(launch: Launch, shapes: Sequence[tuple], mesh: jax.sharding.AbstractMesh) -> Launch:
    checks = [export.DisabledSafetyCheck.custom_call(TARGET)]  # the exported kernel stays in this process
    with jax.sharding.use_abstract_mesh(mesh):
        operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        exported = export.export(jax.jit(launch), platforms=("cuda",), disabled_checks=checks)(*operands)
    return jax.jit(exported.call)  # so that a program that launches it several times contains it once
