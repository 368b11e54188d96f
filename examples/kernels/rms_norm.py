"""An example of a kernel: an operation with a reference in plain JAX and a native kernel for CPUs.

    python examples/kernels/rms_norm.py      # compile the kernel, and compare it with the reference

The parts are those of every operation in jaxserve/kernels/: the reference, `supports`, the kernel, and a function that
chooses between them when a program is lowered.
"""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.core.config import KernelBackend
from jaxserve.kernels.backend import uses_native
from jaxserve.kernels.native.build import FAILURES, compiler

SOURCE = Path(__file__).with_name("rms_norm.cc")
TARGET = "example_rms_norm"
EPS = 1e-6


def rms_norm(x: Array, weight: Array, *, backend: KernelBackend = "auto") -> Array:
    """Return each row of x [R, C] over its root mean square, times weight [C]. Sums are in float32."""
    if uses_native(backend) and supports(x):
        return lax.platform_dependent(x, weight, cpu=native, default=reference)
    return reference(x, weight)


def reference(x: Array, weight: Array) -> Array:
    """Return what every implementation must return, in plain JAX."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPS)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def supports(x: Array) -> bool:
    """Return whether the native kernel exists and takes x."""
    return x.ndim == 2 and x.dtype == jnp.float32 and is_registered()


def native(x: Array, weight: Array) -> Array:
    """Return what `reference` returns, by the custom call."""
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, weight, eps=np.float32(EPS))


@functools.cache
def is_registered() -> bool:
    """Compile the kernel and register its custom call once. Return False without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/rms_norm.so"
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-isystem", jax.ffi.include_dir(), "-o", library]
        try:
            subprocess.run([*compiler(), *flags, str(SOURCE)], check=True)
        except FAILURES:
            return False
        call = getattr(ctypes.CDLL(library), TARGET)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(call), platform="cpu")
    return True


def main() -> None:
    """Compare the kernel with the reference."""
    x, weight = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(5, 300), (300,)]))
    difference = jnp.abs(jax.jit(rms_norm)(x, weight) - reference(x, weight)).max()
    print(f"native: {supports(x)}, largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
