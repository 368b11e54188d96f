"""Resolves a configuration for simulated hardware, as `planning.resolve` resolves it for a real machine.

The same code decides the specification, pages and bytes. It reads sizes from `ModelShape` instead of the headers of a
checkpoint. The bytes differ from a real engine's in four ways:

- Without `memory_gb` the budget is the platform's share of the memory in the hardware file, not of the free memory.
- Each simulated CPU device has the memory of a whole machine. Virtual CPU devices of a real engine share one machine.
- Quantised layers have the size to which the engine itself rounds them: groups of 128 inputs with one scale. Variants
  prepared in other groups by `jaxserve quantize`, or quantised by third parties, may be larger.
- Biases are left out, and all layers are alike.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxserve.control.costs import CostModel
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig, ModelConfig, MoEConfig
from jaxserve.core.dequantization import tile_bytes
from jaxserve.core.errors import ConfigError
from jaxserve.core.options import check_ranges
from jaxserve.core.precision import BITS
from jaxserve.core.scale_groups import GROUP
from jaxserve.engine.client import ModelInfo
from jaxserve.parallel.padding import padded_config
from jaxserve.planning.budget import check_memory_gb
from jaxserve.planning.defaults import PLATFORMS, PlatformDefaults
from jaxserve.planning.memory import COPY_RATES, MemoryPlan, plan_memory, runtime_bytes
from jaxserve.planning.spec import EngineSpec, dtype_of
from jaxserve.sim.cost_model import RooflineModel
from jaxserve.sim.hardware import Hardware, Link
from jaxserve.sim.shape import UNIT, ModelShape

GRANULE = 2 << 20  # bytes; as in `kernels.elastic` and in CUDA's virtual memory
# The size of the vocabulary. Simulated token ids only say which parts prompts share, so that any number is valid.
ANY_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class Cluster:
    """Equal instances of one model on equal devices."""

    shape: ModelShape  # padded for the largest degree of tensor parallelism
    hardware: Hardware
    memory: MemoryPlan
    info: ModelInfo
    believed_costs: CostModel | None = None  # the costs that policies are told; None for the true ones

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine."""
        return self.memory.config

    @property
    def true_costs(self) -> RooflineModel:
        """The costs of steps on the hardware."""
        return RooflineModel(self.shape, self.hardware, self.config.kv_cache_dtype)

    @property
    def costs(self) -> CostModel:
        """The costs that policies are told."""
        return self.believed_costs or self.true_costs

    @property
    def resources(self) -> Resources:
        """The limits of plans, with the costs that policies are told and the rates of the hardware.

        A copy within a device reads and writes its memory.
        """
        hardware, link = self.hardware, self._device_link
        return replace(
            self.memory.resources(self.copy_rate),
            costs=self.costs,
            link_rate=hardware.bandwidth if link is None else link.bandwidth,
            link_latency=0.0 if link is None else link.latency,
            memory_rate=hardware.bandwidth / 2,
        )

    @property
    def _device_link(self) -> Link | None:
        """The slowest link between devices that an instance may have; None if there is none."""
        members = self.memory.limits.max_lanes * self.config.tp * self.config.pp
        degree = min(max(2, self.config.degrees.max_tp, members), self.hardware.devices_per_host + 1)
        try:
            return self.hardware.link(0, degree - 1)
        except ConfigError:
            return None

    @property
    def copy_rate(self) -> float:
        """The rate (bytes/s) at which a change of the plan copies while steps go on: on GPU that of the link."""
        link = self.hardware.links.get("pcie")
        on_cpu = self.hardware.platform == "cpu"
        return COPY_RATES[self.hardware.platform] if on_cpu or link is None else link.bandwidth


def resolve_cluster(
    config: EngineConfig, shape: ModelShape, hardware: Hardware, *, elastic: bool | None = None
) -> Cluster:
    """Resolve `config` into a cluster of dp instances with `config.memory_gb` on each device.

    With `elastic`, KV pools take memory page by page instead of in segments. None means as the engine does: elastic on
    CPU alone. Raise `ConfigError` for invalid options and `MemoryBudgetError` if the model does not fit.
    """
    check_ranges(config)
    platform = hardware.platform
    shape = replace(shape, dtype=dtype_of(config, shape.dtype, (), platform))
    model = model_config(shape)
    fraction = PLATFORMS[platform].memory_fraction
    shapes = (hardware.max_num_seqs, hardware.prefill_tokens, hardware.tile, hardware.min_rows)
    defaults, devices = PlatformDefaults(*shapes, fraction), config.tp * config.pp * config.dp
    spec = EngineSpec.of(config, model, (shape.dtype,) * shape.num_layers, platform, defaults, devices)
    if config.memory_gb is not None:
        check_memory_gb(config.memory_gb, (hardware.memory, "the memory of a device in the hardware file"), free=None)
    budget = int(hardware.memory * fraction if config.memory_gb is None else config.memory_gb * 1e9)
    runtime = runtime_bytes(spec, model) if platform == "cpu" else 0

    def sizes(tp: int) -> ShapeSizes:
        shards = config.degrees.padded_for(tp)
        padded = padded_config(model, shards, _split_unit(spec.precisions) if shards > 1 else 1)
        return ShapeSizes(_padded(shape, padded), padded, tp, config.page_size, config.kv_cache_dtype, platform)

    elastic = platform == "cpu" if elastic is None else elastic
    memory = plan_memory(spec, sizes, budget, GRANULE if elastic else 0, runtime=runtime)
    info = ModelInfo(
        name=shape.name,
        max_model_len=memory.max_model_len,
        vocab_size=ANY_TOKEN,
        hidden_size=shape.hidden_size,
        created=0,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )
    return Cluster(sizes(config.tp).shape, hardware, memory, info)


def parse_cluster(text: str | None, hardware: Hardware, instance_devices: int) -> tuple[int, Hardware]:
    """Parse "8" (devices) or "2x8" (hosts x devices per host) into the number of devices and their hardware.

    None stands for the devices of one instance, `instance_devices`. "2x8" also sets `devices_per_host` of the hardware
    that is returned. Raise `ConfigError` if `text` has another form.
    """
    if text is None:
        return instance_devices, hardware
    hosts, times, devices = text.lower().partition("x")
    numbers = [hosts, devices] if times else [hosts]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ConfigError(f"--cluster is {text!r}: give a number of devices, such as 8, or HOSTSxDEVICES, such as 2x8")
    if times:
        hardware = replace(hardware, devices_per_host=int(devices))
    return math.prod(map(int, numbers)), hardware


@dataclass(frozen=True)
class ShapeSizes:
    """The bytes of a padded model on each of `tp` devices (`planning.workspace.DegreeSizes`)."""

    shape: ModelShape
    config: ModelConfig  # of the same model
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
        return max(tile_bytes(*size, self.shape.itemsize) for size in self.shape.matrices(self.tp))

    @property
    def page(self) -> int:
        return self.page_size * self.shape.kv_bytes_per_token(self.tp, self.kv_cache_dtype, self.platform)


def model_config(shape: ModelShape) -> ModelConfig:
    """Return the configuration of a model as far as its shape has it."""
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


def _padded(shape: ModelShape, config: ModelConfig) -> ModelShape:
    inner = config.intermediate_size if config.moe is None else config.moe.intermediate_size
    return replace(
        shape,
        vocab_size=config.vocab_rows,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        intermediate_size=inner,
    )


def _split_unit(precisions: Iterable[str]) -> int:
    """Return the number that a device's share of a weight's inputs is a multiple of (as in `models.quantized`)."""
    return math.lcm(*(math.lcm(GROUP, UNIT[BITS[name]]) for name in precisions if name in BITS))
