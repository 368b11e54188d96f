"""Resolution of an `EngineConfig`: all decisions that follow from it, the checkpoint and the machine.

It takes no memory: of the checkpoint only its configuration and the tensors' headers are read.
"""

import contextlib
import logging
import os
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax

from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.configs import default_max_new_tokens, generation_settings, sampling_defaults
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import DType, EngineConfig, KernelBackend, ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.machine import allowed_processors, host_memory, host_memory_limit, processors
from jaxserve.core.model_name import model_name
from jaxserve.core.options import check_ranges
from jaxserve.core.sampling_defaults import MAX_NEW_TOKENS, overridden, overrides
from jaxserve.engine.client import ModelInfo
from jaxserve.kernels import GRANULE, is_elastic, native
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.devices import device_memory, devices
from jaxserve.parallel.padding import padded_config
from jaxserve.planning.budget import check_memory_gb
from jaxserve.planning.defaults import PLATFORMS, served_dtype
from jaxserve.planning.memory import MemoryPlan, plan_memory, runtime_bytes
from jaxserve.planning.sizes import BlockSizes, padding_cost
from jaxserve.planning.spec import EngineSpec, dtype_of, has_quantized

# The name of the most that a budget on an accelerator can be.
DEVICE_LIMIT = "JAX's share of the device's memory (--gpu-memory-utilization or XLA_CLIENT_MEM_FRACTION)"
log = logging.getLogger(__name__)

VIRTUAL_DEVICES = "xla_force_host_platform_device_count"
# Environment variable: the number of threads that XLA computes with on CPU, and that start its programs.
XLA_THREADS = "PJRT_NPROC"
# Flags to compile quickly what runs between native kernels: the older emitters, which JAX 0.10 still has and which need
# no MLIR context for each fusion, and one module for each program.
QUICK_COMPILATION = (
    *(("--xla_cpu_use_fusion_emitters=false",) if jax.__version_info__ < (0, 11) else ()),
    "--xla_cpu_parallel_codegen_split_count=1",
)
SMALL_MACHINE = 4  # processors
MAX_PADDING = 0.03  # share of the weights or of the KV cache that padding may add without a warning
THREADS_PER_DEVICE = 4  # of XLA, if there are several CPU devices


@dataclass(frozen=True)
class Resolved(MemoryPlan):
    """A resolved configuration: the memory plan, the checkpoint, the model and the devices of an engine."""

    checkpoint: Checkpoint
    padded_model: ModelConfig  # padded for the largest degree of tensor parallelism, and run at every degree
    info: ModelInfo
    devices: tuple[jax.Device, ...]


def resolve(config: EngineConfig) -> Resolved:
    """Decide everything that a configuration leaves open, for its checkpoint and this machine.

    Raise `ConfigError` for a configuration that cannot work here, `CheckpointError` for a checkpoint that cannot be
    read, `MemoryBudgetError` if the memory budget is too small.
    """
    check_ranges(config)
    path = Path(config.model) if config.model is not None else bundled_model_path()
    checkpoint = open_checkpoint(path, load_format=config.load_format)
    xla_multiplies = not _native_multiplies_all(config, _in_dtype(config, checkpoint, "cpu").config)
    if config.gpu_memory_utilization is not None:
        _set_memory_share(config.gpu_memory_utilization)
    devices = _chosen(config, _devices(_num_devices(config), xla_multiplies=xla_multiplies))
    platform = devices[0].platform
    if platform not in PLATFORMS:
        raise ConfigError(f"platform {platform!r} is not supported; supported: {', '.join(PLATFORMS)}")
    opened, checkpoint = checkpoint, _in_dtype(config, checkpoint, platform)
    model = checkpoint.config
    _log_dtype(config, opened, model.dtype, platform)
    spec = EngineSpec.of(config, model, _stored(checkpoint), platform, PLATFORMS[platform], len(devices))
    backend = _kernel_backend(config, platform)

    def padded_model(tp: int) -> ModelConfig:
        shards = config.degrees.padded_for(tp)
        padded = padded_config(model, shards, split_unit(spec.precisions) if shards > 1 else 1)
        return replace(padded, kernel_backend=backend)

    def sizes(tp: int) -> BlockSizes:
        padded = padded_model(tp)
        layout = partial(stored_layout, checkpoint, padded)
        return BlockSizes(padded, tp, config.page_size, spec.kv_dtype, platform, layout)

    granule = GRANULE if is_elastic(platform) else 0
    runtime = 0
    if platform == "cpu":  # elsewhere the process is not in the devices' memory
        runtime = runtime_bytes(spec, model, config.dp) // _devices_per_memory(config, platform)
    memory = plan_memory(spec, sizes, _budget(config, devices), granule, runtime=runtime)
    info = _info(config, checkpoint, path, memory)
    padded = padded_model(config.tp)
    _log_padding(model, padded, memory)
    return Resolved(**vars(memory), checkpoint=checkpoint, padded_model=padded, info=info, devices=devices)


def _in_dtype(config: EngineConfig, checkpoint: Checkpoint, platform: str) -> Checkpoint:
    """Return the checkpoint in the dtype that the engine computes in."""
    return checkpoint.in_dtype(dtype_of(config, checkpoint.config.dtype, _stored(checkpoint), platform))


def _stored(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the precision of each layer in the checkpoint."""
    return tuple(map(checkpoint.precision, checkpoint.config.block_ids[1:-1]))


def _log_dtype(config: EngineConfig, checkpoint: Checkpoint, dtype: DType, platform: str) -> None:
    """Log that a float16 checkpoint is computed in bfloat16, or that float16 will be slow."""
    stored = checkpoint.config.dtype
    if dtype != stored and config.dtype == "auto":
        log.info(
            "the checkpoint is in %s and is computed in %s, which is faster; --dtype %s keeps it", stored, dtype, stored
        )
    elif dtype == "float16" != served_dtype("float16", platform, quantized=has_quantized(config, _stored(checkpoint))):
        log.warning("dtype is float16, which is much slower than bfloat16 here (--dtype auto or bfloat16)")


def _log_padding(model: ModelConfig, padded: ModelConfig, memory: MemoryPlan) -> None:
    """Log what the zeros cost that split the model evenly, if it is much."""
    blocks = [(block.block, block.precision) for block in memory.plan.instances[0].blocks]
    weights, kv = padding_cost(model, padded, blocks)
    if max(weights, kv) > MAX_PADDING:
        log.warning(
            "splitting the model into %d parts enlarges its weights by %.0f %% and its KV cache by %.0f %% with zeros "
            "(tp, max_tp, precision, variants)",
            padded.shards,
            100 * weights,
            100 * kv,
        )


def _kernel_backend(config: EngineConfig, platform: str) -> KernelBackend:
    """Return the configuration's kernel backend. Raise `ConfigError` if it cannot run here."""
    backend = config.kernel_backend
    platforms = {"native": "cpu", "pallas": "gpu"}
    if platforms.get(backend, platform) != platform:
        raise ConfigError(
            f"kernel_backend is {backend!r}, which runs on {platforms[backend]}: the devices are {platform}"
        )
    if backend == "native" and not native.targets():
        raise ConfigError("kernel_backend is 'native', but the native kernels are missing: see the warning above")
    return backend


def _native_multiplies_all(config: EngineConfig, model: ModelConfig) -> bool:
    """Return whether native kernels do all products with the model's weights here, for any number of rows."""
    return (
        config.kernel_backend in ("auto", "native")
        and model.dtype == "bfloat16"
        and model.moe is None
        and native.multiplies_all()
    )


def _devices(wanted: int, *, xla_multiplies: bool) -> tuple[jax.Device, ...]:
    """Return the machine's devices; on CPU make `wanted` virtual devices, if JAX has not started yet.

    XLA needs all of its threads if it multiplies by weights (`xla_multiplies`). For several devices it needs clearly
    more than there are devices: a device's part of a program occupies a thread while it waits for the parts of other
    devices, so that programs which run at the same time could block each other for ever.
    """
    given = re.search(rf"{VIRTUAL_DEVICES}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    count = int(given[1]) if given else wanted
    if count > 1:
        os.environ.setdefault(XLA_THREADS, str(max(THREADS_PER_DEVICE * count, processors())))
    if not xla_multiplies and processors() <= SMALL_MACHINE:
        _limit_xla_to_one_thread()
    elif processors() < allowed_processors():
        # XLA respects the affinity of the process, but not the quota of a control group.
        os.environ.setdefault(XLA_THREADS, str(processors()))
    if wanted > 1 and not given:
        # After JAX has started, its devices can no longer change.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    return devices()


def _set_memory_share(share: float) -> None:
    """Let JAX take this share of each GPU's memory, unless the environment says another or JAX has started."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its former name; JAX refuses to have both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", f"{share:g}")


def _num_devices(config: EngineConfig) -> int:
    """Return the number of devices that a configuration wants, of which instances may use some only later."""
    return config.virtual_devices or config.tp * config.pp * config.dp


def _chosen(config: EngineConfig, devices: tuple[jax.Device, ...]) -> tuple[jax.Device, ...]:
    """Return the devices that a configuration may use. Raise `ConfigError` if `virtual_devices` is impossible."""
    count, needed, platform = config.virtual_devices, config.tp * config.pp * config.dp, devices[0].platform
    if count is None:
        if platform == "cpu" and needed > len(devices):
            raise ConfigError(
                f"tp x pp x dp is {config.tp} x {config.pp} x {config.dp}, which needs {needed} devices: this process "
                f"has {len(devices)} already (XLA_FLAGS, or JAX has started): use a new process or notebook"
            )
        return devices
    if platform != "cpu":
        raise ConfigError(
            f"virtual_devices is {count}: only the CPU has virtual devices, and JAX computes on {platform} "
            "(JAX_PLATFORMS=cpu chooses the CPU)"
        )
    if count < needed:
        raise ConfigError(f"virtual_devices is {count}: tp x pp x dp needs {needed} devices")
    if count > len(devices):
        raise ConfigError(
            f"virtual_devices is {count}: this process has {len(devices)} already (XLA_FLAGS, or JAX has started): "
            "use a new process or notebook"
        )
    return devices[:count]


def _limit_xla_to_one_thread() -> None:
    """Set environment variables that give XLA one thread and make it compile quickly, unless they are set already.

    This has an effect only before JAX has started. Native kernels have threads of their own. If XLA had several, the
    programs of a step would start on each in turn, and each would wait 0.1 ms for a processor, which the host's Python
    and the kernels' helpers use too.
    """
    os.environ.setdefault(XLA_THREADS, "1")
    given = os.environ.get("XLA_FLAGS", "").strip()
    # XLA_FLAGS may also be the name of a file with flags.
    if given and not given.startswith("-"):
        return
    flags = (flag for flag in QUICK_COMPILATION if flag.partition("=")[0] not in given)
    os.environ["XLA_FLAGS"] = " ".join((given, *flags)).strip()


def _budget(config: EngineConfig, devices: tuple[jax.Device, ...]) -> int:
    """Return the memory budget of one device in bytes."""
    platform = devices[0].platform
    memory = device_memory(devices[0]) if platform != "cpu" else None
    if platform == "cpu" and config.gpu_memory_utilization is not None:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization:g}: the CPU has no memory of its own: use "
            "memory_gb, the budget in GB (--memory-gb)"
        )
    if config.memory_gb is not None:
        limit = host_memory_limit() if platform == "cpu" else memory and (memory, DEVICE_LIMIT)
        check_memory_gb(config.memory_gb, limit, free=host_memory() if platform == "cpu" else None)
        budget = int(config.memory_gb * 1e9)
    else:
        budget = int((memory or host_memory()) * PLATFORMS[platform].memory_fraction)
    return budget // _devices_per_memory(config, platform)


def _devices_per_memory(config: EngineConfig, platform: str) -> int:
    """Return how many devices share one memory: on CPU all virtual devices share the host's."""
    return _num_devices(config) if platform == "cpu" else 1


def _info(config: EngineConfig, checkpoint: Checkpoint, path: Path, memory: MemoryPlan) -> ModelInfo:
    model = checkpoint.config
    generation, folder = generation_settings(config.generation_config, checkpoint.generation, checkpoint.path)
    changes = overrides(config.override_generation_config)
    return ModelInfo(
        name=config.served_model_name or model_name(path),
        max_model_len=memory.max_model_len,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        created=int(time.time()),
        max_n=config.max_n,
        max_logprobs=min(config.max_logprobs, model.vocab_size),
        max_stop_strings=config.max_stop_strings,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        default_sampling=overridden(sampling_defaults(generation, folder), changes),
        max_new_tokens=changes.get(MAX_NEW_TOKENS, default_max_new_tokens(generation, folder)),
        merged_len=memory.max_len(memory.degrees[-1]),
    )
