"""What is chosen on each platform where the user leaves it open. Imports no JAX: a simulator chooses alike."""

from dataclasses import dataclass

from jaxserve.core.config import DType


@dataclass(frozen=True)
class PlatformDefaults:
    """What is chosen where the user leaves it open."""

    max_num_seqs: int
    prefill_tokens: int  # of a step, beside the decodes
    tile: int  # tokens of a prefill tile; a prompt is padded to whole tiles
    min_rows: int  # that a step decodes; fewer are padded
    memory_fraction: float  # of what is available on the host, or of the device's memory


PLATFORMS = {
    "cpu": PlatformDefaults(32, 512, 32, 1, 0.5),
    # On GPU eight rows cost what one costs: the tensor cores multiply eight, and XLA then fuses more around products.
    "gpu": PlatformDefaults(256, 2048, 64, 8, 0.9),
    "tpu": PlatformDefaults(256, 2048, 64, 8, 0.9),
}


def served_dtype(stored: DType, platform: str, *, quantized: bool) -> DType:
    """Return what a checkpoint is computed in where the user leaves it open. `quantized`: some weights have fewer bits.

    It is the checkpoint's own dtype, but bfloat16 for float16 on platforms without kernels for it: on CPU float16 is
    tens of times slower.
    """
    if quantized or platform != "gpu":
        return dtype_beside_quantized(stored)
    return stored


def dtype_beside_quantized(stored: DType) -> DType:
    """Return what a checkpoint is computed in where some weights have fewer bits: on no platform do kernels multiply
    these by float16.
    """
    return "bfloat16" if stored == "float16" else stored
