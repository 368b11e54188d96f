import os

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

from jaxserve.kernels.backend import uses_pallas
from pallas_kernels.mosaic import CAN_INTERPRET
from pallas_kernels.targets import compile_for, missing


@pytest.fixture
def interpret():
    """How to run a kernel: on the GPU if it is a Hopper, else in JAX's simulation of one.

    There memory starts as NaN, and races and reads out of bounds are errors.
    """
    if uses_pallas("auto"):
        return False
    if not CAN_INTERPRET:
        pytest.skip(f"needs a Hopper GPU, or jax 0.11 to interpret Mosaic GPU kernels; this is jax {jax.__version__}")
    return plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture
def compile_for_h200():
    """`targets.compile_for`, for an H200. Where something is missing for it, tests are skipped.

    With GPU_COMPILE=required they fail instead: whoever asks for compilation must not be told that all is well.
    """
    if reason := missing():
        (pytest.fail if os.environ.get("GPU_COMPILE") == "required" else pytest.skip)(reason)

    def compiled(f, *arguments, **kwargs):
        return compile_for("h200", f, *arguments, **kwargs)

    return compiled


def lowered(f, *arguments):
    """The program for CUDA, as text. Needs neither a GPU nor a plugin."""
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
