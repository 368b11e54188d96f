import os

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

from jaxserve.kernels.backend import uses_pallas
from pallas_kernels.mosaic import CAN_INTERPRET
from pallas_kernels.targets import compile_for, missing


@pytest.fixture
def interpret():
    """The argument with which kernels run on a Hopper GPU, or else in JAX's simulation of one.

    In the simulation memory starts as NaN, and races and reads out of bounds are errors.
    """
    if uses_pallas("auto"):
        return False
    if not CAN_INTERPRET:
        pytest.skip(f"needs a Hopper GPU, or jax 0.11 to interpret Mosaic GPU kernels; this is jax {jax.__version__}")
    return plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture
def compile_for_h200():
    """The function `targets.compile_for` for an H200. Tests are skipped where it cannot compile.

    With GPU_COMPILE=required they fail instead, so that a request to compile never passes by skipping.
    """
    if reason := missing():
        (pytest.fail if os.environ.get("GPU_COMPILE") == "required" else pytest.skip)(reason)

    def compiled(f, *arguments, **kwargs):
        return compile_for("h200", f, *arguments, **kwargs)

    return compiled


def lowered(f, *arguments):
    """Return the program for CUDA as text, which needs neither a GPU nor a plugin."""
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
