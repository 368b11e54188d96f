"""Defaults of each platform for options that the user leaves open. The simulator uses them too."""

from dataclasses import dataclass

from jaxserve.core.config import DType


@dataclass(frozen=True)
class PlatformDefaults:
    """Defaults of one platform."""

    max_num_seqs: int
    prefill_tokens: int  # prompt tokens of a step, in addition to its decodes
    tile: int  # tokens of a prefill tile; a prompt is padded to whole tiles
    min_rows: int  # rows of a step that decodes; fewer sequences are padded
    memory_fraction: float  # share of the host's available memory on CPU, elsewhere of the device's memory


PLATFORMS = {
    "cpu": PlatformDefaults(32, 512, 32, 1, 0.5),
    # On GPU eight rows cost what one costs: the tensor cores multiply eight, and XLA then fuses more around products.
    "gpu": PlatformDefaults(256, 2048, 64, 8, 0.9),
    "tpu": PlatformDefaults(256, 2048, 64, 8, 0.9),
}


def served_dtype(stored: DType, platform: str, *, quantized: bool) -> DType:
    """Return the dtype in which a checkpoint stored in `stored` is computed by default.

    That is `stored`, except that float16 becomes bfloat16 on platforms without kernels for it (on CPU float16 is tens
    of times slower) and wherever some weights are `quantized`.
    """
    if quantized or platform != "gpu":
        return dtype_with_quantized(stored)
    return stored


def dtype_with_quantized(stored: DType) -> DType:
    """Return the dtype in which a checkpoint is computed if some weights are quantised.

    Float16 becomes bfloat16: no platform has kernels that multiply quantised weights by float16.
    """
    return "bfloat16" if stored == "float16" else stored
