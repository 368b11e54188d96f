"""What is chosen on each platform where the user leaves it open. Imports no JAX: a simulator chooses alike."""

from dataclasses import dataclass


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
