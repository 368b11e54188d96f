"""Cluster: a configuration resolved for simulated hardware, as `planning.resolve` resolves it for a machine.

The specification, pages and bytes are decided by the same code, from the sizes of `ModelShape` instead of the headers
of a checkpoint.
What differs from a real engine's, in bytes:

- without `memory_gb` the budget is the platform's share of what the hardware file says, not of what is free just now;
- a device of a CPU is a machine of its own, with all of its memory, where a real engine's virtual ones share one;
- quantised layers are as the engine rounds them itself, in groups of 128 inputs with one scale: what `jaxserve
  quantize` has prepared in other groups, and what others have quantised, may be larger;
- biases are left out, and all layers are alike.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig, ModelConfig, MoEConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.options import check_ranges
from jaxserve.core.precision import BITS
from jaxserve.engine.client import ModelInfo
from jaxserve.parallel.padding import padded_config
from jaxserve.planning.defaults import PLATFORMS, PlatformDefaults
from jaxserve.planning.memory import COPY_RATES, MemoryPlan, plan_memory, runtime_bytes
from jaxserve.planning.spec import EngineSpec, dtype_of
from jaxserve.sim.hardware import Hardware
from jaxserve.sim.shape import GROUP, UNIT, ModelShape

GRANULE = 2 << 20  # bytes: that of `kernels.elastic`, and of CUDA's virtual memory
ANY_TOKEN = 2**31 - 1  # the vocabulary: prompts are made of numbers that stand for what they share


@dataclass(frozen=True)
class Cluster:
    """Equal instances of one model on equal devices."""

    shape: ModelShape  # padded for the degree of tensor parallelism
    hardware: Hardware
    memory: MemoryPlan
    info: ModelInfo

    @property
    def config(self) -> EngineConfig:
        """What was asked for."""
        return self.memory.config

    @property
    def copy_rate(self) -> float:
        """Bytes/s that a change of the plan copies while steps go on."""
        return COPY_RATES[self.hardware.platform]


def resolve_cluster(
    config: EngineConfig, shape: ModelShape, hardware: Hardware, *, elastic: bool | None = None
) -> Cluster:
    """Decides everything: dp instances, `config.memory_gb` on each device.

    `elastic`: whether KV pools take memory page by page and not in segments; None: as the engine's do on the platform,
    which is on CPU alone.
    Raises `ConfigError` or `MemoryBudgetError`.
    """
    check_ranges(config)
    platform = hardware.platform
    shape = replace(shape, dtype=dtype_of(config, shape.dtype, (), platform))
    model = _model_config(shape)
    fraction = PLATFORMS[platform].memory_fraction
    shapes = (hardware.max_num_seqs, hardware.prefill_tokens, hardware.tile, hardware.min_rows)
    defaults, devices = PlatformDefaults(*shapes, fraction), config.tp * config.pp * config.dp
    outline = EngineSpec.of(config, model, (shape.dtype,) * shape.num_layers, platform, defaults, devices)
    physical = padded_config(model, config.tp, _split_unit(outline.precisions) if config.tp > 1 else 1)
    padded = _padded(shape, physical)
    budget = int(hardware.memory * fraction if config.memory_gb is None else config.memory_gb * 1e9)
    runtime = runtime_bytes(outline, model) if platform == "cpu" else 0
    sizes = ShapeSizes(padded, config.tp, config.page_size, config.kv_cache_dtype, platform)
    elastic = platform == "cpu" if elastic is None else elastic
    memory = plan_memory(outline, physical, sizes, budget, GRANULE if elastic else 0, runtime=runtime)
    info = ModelInfo(
        name=shape.name,
        max_model_len=memory.max_model_len,
        vocab_size=ANY_TOKEN,
        hidden_size=shape.hidden_size,
        created=0,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )
    return Cluster(padded, hardware, memory, info)


def parse_cluster(text: str | None, hardware: Hardware, least: int) -> tuple[int, Hardware]:
    """From "8" (devices) or "2x8" (hosts of so many): the number of devices, and the hardware with so many per host.

    None: `least` devices, those of one instance. Raises `ConfigError`.
    """
    if text is None:
        return least, hardware
    hosts, times, devices = text.lower().partition("x")
    numbers = [hosts, devices] if times else [hosts]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ConfigError(f"--cluster {text!r}: give a number of devices, such as 8, or HOSTSxDEVICES, such as 2x8")
    if times:
        hardware = replace(hardware, devices_per_host=int(devices))
    return math.prod(map(int, numbers)), hardware


@dataclass(frozen=True)
class ShapeSizes:
    """`Sizes` on each of tp devices, of a shape that is padded for them."""

    shape: ModelShape
    tp: int
    page_size: int
    kv_cache_dtype: str
    platform: str

    def block(self, block: str, precision: str) -> int:
        if block == "embed":
            return self.shape.embed_bytes(self.tp, precision)
        if block == "head":
            return self.shape.head_bytes(precision, self.tp)
        return self.shape.layer_bytes(precision, self.tp)

    def dequantized(self, block: str, precision: str) -> int:
        if not is_layer(block) or precision not in BITS:
            return 0
        shape = self.shape
        attention = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        outputs = max(attention, 2 * shape.intermediate_size)  # those with the model's width as inputs are the largest
        return 2 * (outputs * shape.hidden_size // self.tp) * shape.itemsize

    @property
    def page(self) -> int:
        return self.page_size * self.shape.kv_bytes_per_token(self.tp, self.kv_cache_dtype, self.platform)


def _model_config(shape: ModelShape) -> ModelConfig:
    moe = None
    if shape.num_experts:
        layers = (True,) * shape.num_layers
        moe = MoEConfig(shape.num_experts, shape.experts_per_token, shape.intermediate_size, True, layers)
    return ModelConfig(
        architecture="",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position=shape.max_position,
        tie_embeddings=shape.tie_embeddings,
        moe=moe,
        dtype=shape.dtype,
    )


def _padded(shape: ModelShape, physical: ModelConfig) -> ModelShape:
    inner = physical.intermediate_size if physical.moe is None else physical.moe.intermediate_size
    return replace(
        shape,
        vocab_size=physical.vocab_rows,
        num_heads=physical.num_heads,
        num_kv_heads=physical.num_kv_heads,
        intermediate_size=inner,
    )


def _split_unit(precisions: Iterable[str]) -> int:
    """What a device's share of the inputs of a weight is a multiple of, in all precisions (`models.quantized`)."""
    return math.lcm(*(math.lcm(GROUP, UNIT[BITS[name]]) for name in precisions if name in BITS))
