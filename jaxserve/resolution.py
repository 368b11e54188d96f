"""From an `EngineConfig` to numbers: everything that follows from the user's wishes, the checkpoint and the machine,
decided before any memory is taken.
"""

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import jax

from jaxserve.bundled import bundled_model_path
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.control import Ledger, Plan, StagePlan, chain_of, static_plan
from jaxserve.control.resources import Resources
from jaxserve.core.config import EngineConfig, KernelBackend, KVCacheDType, ModelConfig
from jaxserve.core.errors import ConfigError, MemoryBudgetError
from jaxserve.core.precision import BITS, head_precision, layer_precisions, parse_precision
from jaxserve.engine.client import ModelInfo
from jaxserve.executor.buckets import Buckets
from jaxserve.executor.memory import StageMemory, block_bytes, stage_memory
from jaxserve.hardware import device_memory, host_memory, processors
from jaxserve.kernels import GRANULE, is_elastic, native
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.padding import physical_config
from jaxserve.platforms import PLATFORMS

log = logging.getLogger(__name__)

VIRTUAL_DEVICES = "xla_force_host_platform_device_count"
XLA_THREADS = "PJRT_NPROC"  # environment variable: how many XLA computes with on CPU, and how many start its programs
SMALL_MACHINE = 4  # processors
RUNTIME = 700_000_000  # bytes on the host for interpreter, JAX, server and compiled code: 650 MB after a cold start
STATIC = "static"  # the policy that changes nothing
DEFAULT_VARIANTS = ("int4",)  # of any other
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json


@dataclass(frozen=True)
class Resolved:
    """A configuration with nothing left open. The ledger is that of the fullest device."""

    config: EngineConfig
    checkpoint: Checkpoint
    physical: ModelConfig  # padded for the degree of tensor parallelism
    plan: Plan
    variants: tuple[str, ...]  # precisions that any layer may change to while serving; () if none ever does
    kv_dtype: str  # of the KV pools
    reserved_kv_pages: int  # that the pools have room for, the null page included; the plan says how many are used
    buckets: Buckets
    ledger: Ledger
    info: ModelInfo
    stages: tuple[StageMemory, ...]
    devices: tuple[jax.Device, ...]
    layer_bytes: Mapping[tuple[str, str], int]  # (layer, precision it may have) -> bytes on each device of its stage
    elastic: bool  # whether KV pools take memory only for the pages in use

    def stage_bytes(self, plan: Plan) -> tuple[tuple[int, int], ...]:
        """Weights and KV of every stage of a plan on each of its devices, instance by instance."""
        first = self.plan.instances[0].stages
        sizes = []
        for instance in plan.instances:
            for memory, stage, start in zip(self.stages, instance.stages, first, strict=True):
                changed = self._layers(stage) - self._layers(start)
                sizes.append((memory.weights + changed, self.kv_bytes(memory, stage.kv_pages)))
        return tuple(sizes)

    def kv_bytes(self, memory: StageMemory, pages: int) -> int:
        """What the KV pools of a stage take on each device while so many pages are in use."""
        room = self.reserved_kv_pages * memory.page
        return min(pages * memory.page + memory.pools * GRANULE, room) if self.elastic else room

    def ledger_entries(self, plan: Plan) -> dict[str, int]:
        """The ledger's entries that follow from a plan: those of its fullest stage."""
        weights, kv = max(self.stage_bytes(plan), key=sum)
        return {"weights": weights, "kv": kv}

    def resources(self, copy_rate: float) -> Resources:
        """What plans may use. Where a number of pages was given alone, it grows by what weights free, and no more."""
        others = sum(size for name, size in self.ledger.entries.items() if name not in ("weights", "kv"))
        stages = self.plan.instances[0].stages
        granules = [memory.pools * GRANULE if self.elastic else 0 for memory in self.stages]
        fixed = tuple(
            others + memory.weights - self._layers(stage) + granule
            for memory, stage, granule in zip(self.stages, stages, granules, strict=True)
        )
        budget = self.ledger.budget
        if self.config.kv_pages is not None and self.config.max_kv_pages is None:
            in_use = (memory.page * stage.kv_pages for memory, stage in zip(self.stages, stages, strict=True))
            layers = (self._layers(stage) for stage in stages)
            budget = min(budget, max(map(sum, zip(fixed, layers, in_use, strict=True))))
        return Resources(
            budget=budget,
            fixed=fixed,
            layer_bytes=self.layer_bytes,
            page_bytes=tuple(memory.page for memory in self.stages),
            least_pages=-(-self.info.max_model_len // self.config.page_size) + 1,
            most_pages=self.reserved_kv_pages if self.elastic else stages[0].kv_pages,
            copy_rate=copy_rate,
        )

    def _layers(self, stage: StagePlan) -> int:
        return sum(self.layer_bytes.get((block.block, block.precision), 0) for block in stage.blocks)


def resolve(config: EngineConfig) -> Resolved:
    """Decides everything; of the checkpoint it reads only the configuration and the tensors' headers.

    Raises `ConfigError`, `CheckpointError` or `MemoryBudgetError`.
    """
    _check(config)
    path = Path(config.model) if config.model is not None else bundled_model_path()
    checkpoint = open_checkpoint(path, load_format=config.load_format, dtype=config.dtype)
    devices = _devices(config.tp * config.pp * config.dp)
    model, platform = checkpoint.config, devices[0].platform
    if platform not in PLATFORMS:
        raise ConfigError(f"platform {platform!r} is not supported; supported: {', '.join(PLATFORMS)}")
    degrees = {"tp": config.tp, "pp": config.pp, "dp": config.dp}
    stored = tuple(checkpoint.precision(f"layers.{layer}") for layer in range(model.num_layers))
    precisions = layer_precisions(config.precision, config.layer_precision, stored, model.dtype)
    variants = _variants(config, precisions, model.dtype)
    head = head_precision(config.head_precision, config.precision, model.dtype)
    chain = chain_of(head if model.tie_embeddings else model.dtype, precisions, head)
    plan = static_plan(chain, kv_pages=0, devices=len(devices), **degrees)
    physical = physical_config(model, config.tp, split_unit((*precisions, *variants)) if config.tp > 1 else 1)
    physical = replace(physical, kernel_backend=_kernel_backend(config, platform))
    wanted_len = _wanted_len(config, model)
    buckets = _buckets(config, platform, wanted_len)
    kv_dtype = _kv_dtype(config, model)
    top = max(config.max_logprobs, 1)

    def bytes_of(block: str, precision: str) -> int:
        return block_bytes(physical, block, precision, config.tp, stored_layout(checkpoint, physical, block, precision))

    stages = tuple(
        stage_memory(physical, stage, bytes_of, buckets, config.page_size, kv_dtype, top, variants)
        for stage in plan.instances[0].stages
    )
    ledger = _ledger(config, devices)
    useful = buckets.max_num_seqs * -(-wanted_len // config.page_size) + 1
    elastic = is_elastic(platform)
    sizes = {(b.block, p): bytes_of(b.block, p) for b in chain[1:-1] for p in variants or (b.precision,)}
    if platform == "cpu" and config.policy != STATIC:  # else they lie in memory of the host
        kept = sum(size for (_, precision), size in sizes.items() if precision in BITS)
        ledger.reserve("variants", kept)
    spare = _spare(plan, stages, sizes) if config.policy != STATIC and elastic else (0,) * len(stages)
    pages, reserved, max_len = _fill(ledger, config, stages, spare, wanted_len, useful, elastic=elastic)
    info = _info(config, checkpoint, path, max_len)
    plan = _with_pages(plan, pages)
    return Resolved(
        config=config,
        checkpoint=checkpoint,
        physical=physical,
        plan=plan,
        variants=variants,
        kv_dtype=kv_dtype,
        reserved_kv_pages=reserved,
        buckets=buckets,
        ledger=ledger,
        info=info,
        stages=stages,
        devices=devices,
        layer_bytes=sizes,
        elastic=elastic,
    )


def _check(config: EngineConfig) -> None:
    """Raises `ConfigError` for numbers that mean nothing."""
    above_zero = ("max_num_seqs", "page_size", "kv_pages", "max_kv_pages", "memory_gb")
    for name in (*above_zero, "max_queued_requests", "max_queued_tokens"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}, it must be above 0")


def _variants(config: EngineConfig, precisions: Sequence[str], dtype: str) -> tuple[str, ...]:
    """Those that the user names, and those that layers start with, to which they may return."""
    wanted = config.variants or (() if config.policy == STATIC else DEFAULT_VARIANTS)
    named = [parse_precision(name, dtype, "variants") for name in wanted]
    return tuple(dict.fromkeys((*named, *precisions))) if named else ()


def _kv_dtype(config: EngineConfig, model: ModelConfig) -> str:
    if config.kv_cache_dtype not in get_args(KVCacheDType):
        names = ", ".join(get_args(KVCacheDType))
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}; there are {names}")
    return model.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def _kernel_backend(config: EngineConfig, platform: str) -> KernelBackend:
    """As the user says. Raises `ConfigError` for kernels that cannot run here."""
    backend = config.kernel_backend
    if backend not in get_args(KernelBackend):
        raise ConfigError(f"kernel_backend is {backend!r}; there are {', '.join(get_args(KernelBackend))}")
    homes = {"native": "cpu", "pallas": "gpu"}
    if homes.get(backend, platform) != platform:
        raise ConfigError(f"kernel_backend is {backend!r}, which runs on {homes[backend]}; the devices are {platform}")
    if backend == "native" and not native.targets():
        raise ConfigError("kernel_backend is 'native', and the native kernels are not there: see the warning above")
    return backend


def _devices(wanted: int) -> tuple[jax.Device, ...]:
    """The machine's devices; on CPU, if JAX has not started yet, as many virtual ones as are wanted."""
    if native.targets() and processors() <= SMALL_MACHINE:
        # Native kernels have threads of their own. With several of XLA's, the programs of a step start on one after the
        # other in turn, and each waits 0.1 ms for a processor that the host's Python and the kernels' helpers share.
        os.environ.setdefault(XLA_THREADS, "1")
    if wanted > 1 and VIRTUAL_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what they are
            jax.config.update("jax_num_cpu_devices", wanted)
    return tuple(jax.devices())


def _wanted_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the longest sequence that is asked for."""
    if config.max_model_len is None:
        return model.max_position
    if not 1 < config.max_model_len <= model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, it must be from 2 to the model's {model.max_position} positions"
        )
    return config.max_model_len


def _buckets(config: EngineConfig, platform: str, wanted_len: int) -> Buckets:
    defaults = PLATFORMS[platform]
    seqs = config.max_num_seqs or defaults.max_num_seqs
    prefill = defaults.prefill_tokens
    if config.max_num_batched_tokens is not None:
        prefill = config.max_num_batched_tokens - seqs
    if prefill < defaults.tile:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, it must be at least max_num_seqs + "
            f"{defaults.tile} = {seqs + defaults.tile}"
        )
    width = -(-wanted_len // config.page_size)
    widths = (width,) if platform == "cpu" else _width_buckets(width)
    return Buckets(seqs, prefill // defaults.tile, defaults.tile, min(defaults.min_rows, seqs), widths)


def _width_buckets(width: int) -> tuple[int, ...]:
    """Page-table widths on platforms whose attention reads the whole table: 64 pages, then times 4."""
    widths, size = [], 64
    while size < width:
        widths.append(size)
        size *= 4
    return (*widths, width)


def _ledger(config: EngineConfig, devices: tuple[jax.Device, ...]) -> Ledger:
    """The memory of one device. Virtual CPU devices share the host's, and the process itself counts there."""
    platform = devices[0].platform
    used = config.tp * config.pp * config.dp
    memory = device_memory(devices[0]) if platform != "cpu" else None
    if config.memory_gb is not None:
        budget = int(config.memory_gb * 1e9)
    else:
        budget = int((memory or host_memory()) * PLATFORMS[platform].memory_fraction)
    if platform != "cpu":
        return Ledger(budget)
    ledger = Ledger(budget // used)
    ledger.reserve("runtime", RUNTIME // used)
    return ledger


def _fill(
    ledger: Ledger,
    config: EngineConfig,
    stages: tuple[StageMemory, ...],
    spare: tuple[int, ...],
    wanted_len: int,
    useful: int,
    *,
    elastic: bool,
) -> tuple[int, int, int]:
    """Enters the stage that leaves room for the fewest pages; returns how many there are, how many the pools have room
    for, both with the null page, and the longest sequence they hold.

    No more than `useful` pages are taken unasked. `spare`: what each stage's layers can give for pages. Bytes of
    `elastic` pools are those of the pages that may be in use, up to whole granules; of others, all that they have room
    for. Mutates `ledger`.
    """
    size = config.page_size
    fullest = min(stages, key=lambda s: (ledger.free - s.weights - s.workspace - s.exchange) / s.page)
    least = 2 if config.max_model_len is None else -(-config.max_model_len // size) + 1
    fixed = {"weights": fullest.weights, "workspace": fullest.workspace}
    if fullest.exchange:
        fixed["exchange"] = fullest.exchange
    needs = fixed | {"KV pages": least * fullest.page}
    if sum(needs.values()) > ledger.free:
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in (ledger.entries | needs).items())
        raise MemoryBudgetError(
            f"the memory budget is {ledger.budget / 1e9:.3f} GB per device, at least "
            f"{(ledger.used + sum(needs.values())) / 1e9:.3f} GB are needed: {parts} "
            "(memory_gb, max_model_len, max_num_seqs)"
        )
    for name, needed in fixed.items():
        ledger.reserve(name, needed)
    pages, reserved = _pages(config, min(ledger.free // fullest.page, useful))
    if config.max_kv_pages is None:
        more = min(extra // stage.page for stage, extra in zip(stages, spare, strict=True))
        reserved = max(reserved, min(pages + more, useful))
    in_use, room = pages * fullest.page + fullest.pools * GRANULE, reserved * fullest.page
    ledger.reserve("kv", min(in_use, room) if elastic else room)
    max_len = min(wanted_len, (pages - 1) * size)
    if config.max_model_len is not None and max_len < wanted_len:
        raise ConfigError(f"{pages - 1} KV pages of {size} tokens hold {max_len} tokens, max_model_len is {wanted_len}")
    if max_len < wanted_len:
        log.warning("max_model_len is lowered from %d to the %d tokens that the memory holds", wanted_len, max_len)
    return pages, reserved, max_len


def _spare(plan: Plan, stages: tuple[StageMemory, ...], sizes: Mapping[tuple[str, str], int]) -> tuple[int, ...]:
    """Bytes that each stage's layers can give on each device, from what they start with to the least they may have."""
    least: dict[str, int] = {}
    for (block, _), size in sizes.items():
        least[block] = min(size, least.get(block, size))
    return tuple(
        sum(sizes[b.block, b.precision] - least[b.block] for b in stage.blocks if b.block in least)
        for stage in plan.instances[0].stages
    )


def _pages(config: EngineConfig, fitting: int) -> tuple[int, int]:
    """Pages in use at the start, of `fitting` that would fit, and those to have room for; both with the null page."""
    pages = fitting if config.kv_pages is None else config.kv_pages + 1
    if config.max_kv_pages is None:
        return pages, pages
    if config.kv_pages is not None and config.max_kv_pages < config.kv_pages:
        raise ConfigError(f"max_kv_pages is {config.max_kv_pages}, it must be at least kv_pages, {config.kv_pages}")
    reserved = config.max_kv_pages + 1
    return min(pages, reserved), reserved


def _with_pages(plan: Plan, pages: int) -> Plan:
    instances = tuple(
        replace(instance, stages=tuple(replace(stage, kv_pages=pages) for stage in instance.stages))
        for instance in plan.instances
    )
    return replace(plan, instances=instances)


def _info(config: EngineConfig, checkpoint: Checkpoint, path: Path, max_len: int) -> ModelInfo:
    model, generation = checkpoint.config, checkpoint.generation
    return ModelInfo(
        name=config.served_model_name or path.resolve().name,
        max_model_len=max_len,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        created=int(time.time()),
        max_n=config.max_n,
        max_logprobs=min(config.max_logprobs, model.vocab_size),
        max_stop_strings=config.max_stop_strings,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        default_sampling={name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None},
    )
