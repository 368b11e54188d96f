"""From an `EngineConfig` to numbers: everything that follows from the user's wishes, the checkpoint and the machine,
decided before any memory is taken.
"""

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax

from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.generation import default_max_new_tokens, sampling_defaults
from jaxserve.checkpoint.layout import stored_layout
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import DType, EngineConfig, KernelBackend, ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.machine import allowed_processors, host_memory, processors
from jaxserve.core.model_name import model_name
from jaxserve.core.options import check_ranges
from jaxserve.engine.client import ModelInfo
from jaxserve.kernels import GRANULE, is_elastic, native
from jaxserve.models.quantized import split_unit
from jaxserve.parallel.devices import device_memory, devices
from jaxserve.parallel.padding import padded_config
from jaxserve.planning.defaults import PLATFORMS, served_dtype
from jaxserve.planning.memory import MemoryPlan, plan_memory, runtime_bytes
from jaxserve.planning.sizes import BlockSizes
from jaxserve.planning.spec import EngineSpec, dtype_of, has_quantized

log = logging.getLogger(__name__)

VIRTUAL_DEVICES = "xla_force_host_platform_device_count"
XLA_THREADS = "PJRT_NPROC"  # environment variable: how many XLA computes with on CPU, and how many start its programs
# For what is between native kernels: the older emitters, which JAX 0.10 still has and which need no MLIR context for
# each fusion, and one module for each program.
QUICK_COMPILATION = (
    *(("--xla_cpu_use_fusion_emitters=false",) if jax.__version_info__ < (0, 11) else ()),
    "--xla_cpu_parallel_codegen_split_count=1",
)
SMALL_MACHINE = 4  # processors


@dataclass(frozen=True)
class Resolved(MemoryPlan):
    """A configuration with nothing left open, and what it is resolved for."""

    checkpoint: Checkpoint
    padded_model: ModelConfig  # padded for the degree of tensor parallelism
    info: ModelInfo
    devices: tuple[jax.Device, ...]


def resolve(config: EngineConfig) -> Resolved:
    """Decides everything; of the checkpoint it reads only the configuration and the tensors' headers.

    Raises `ConfigError`, `CheckpointError` or `MemoryBudgetError`.
    """
    check_ranges(config)
    path = Path(config.model) if config.model is not None else bundled_model_path()
    checkpoint = open_checkpoint(path, load_format=config.load_format)
    busy = not _leaves_xla_little(config, _in_dtype(config, checkpoint, "cpu").config)
    devices = _devices(config.tp * config.pp * config.dp, busy=busy)
    platform = devices[0].platform
    if platform not in PLATFORMS:
        raise ConfigError(f"platform {platform!r} is not supported; supported: {', '.join(PLATFORMS)}")
    opened, checkpoint = checkpoint, _in_dtype(config, checkpoint, platform)
    model = checkpoint.config
    _tell_dtype(config, opened, model.dtype, platform)
    outline = EngineSpec.of(config, model, _stored(checkpoint), platform, PLATFORMS[platform], len(devices))
    padded = padded_config(model, config.tp, split_unit(outline.precisions) if config.tp > 1 else 1)
    padded = replace(padded, kernel_backend=_kernel_backend(config, platform))
    layout = partial(stored_layout, checkpoint, padded)
    sizes = BlockSizes(padded, config.tp, config.page_size, outline.kv_dtype, platform, layout)
    granule = GRANULE if is_elastic(platform) else 0
    runtime = runtime_bytes(outline, model, config.dp) // _sharing(config, platform) if platform == "cpu" else 0
    memory = plan_memory(outline, padded, sizes, _budget(config, devices), granule, runtime=runtime)
    info = _info(config, checkpoint, path, memory.max_model_len)
    return Resolved(**vars(memory), checkpoint=checkpoint, padded_model=padded, info=info, devices=devices)


def _in_dtype(config: EngineConfig, checkpoint: Checkpoint, platform: str) -> Checkpoint:
    """Return the checkpoint in the dtype that it is computed in."""
    return checkpoint.in_dtype(dtype_of(config, checkpoint.config.dtype, _stored(checkpoint), platform))


def _stored(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the precision of each layer in the checkpoint."""
    return tuple(map(checkpoint.precision, checkpoint.config.block_ids[1:-1]))


def _tell_dtype(config: EngineConfig, checkpoint: Checkpoint, dtype: DType, platform: str) -> None:
    """Log that a float16 checkpoint is computed in bfloat16, or that float16 will be slow."""
    stored = checkpoint.config.dtype
    if dtype != stored and config.dtype == "auto":
        log.info(
            "the checkpoint is in %s and is computed in %s, which is faster; --dtype %s keeps it", stored, dtype, stored
        )
    elif dtype == "float16" != served_dtype("float16", platform, quantized=has_quantized(config, _stored(checkpoint))):
        log.warning("dtype is float16, which is much slower than bfloat16 here (--dtype auto or bfloat16)")


def _kernel_backend(config: EngineConfig, platform: str) -> KernelBackend:
    """As the user says. Raises `ConfigError` for kernels that cannot run here."""
    backend = config.kernel_backend
    homes = {"native": "cpu", "pallas": "gpu"}
    if homes.get(backend, platform) != platform:
        raise ConfigError(f"kernel_backend is {backend!r}, which runs on {homes[backend]}; the devices are {platform}")
    if backend == "native" and not native.targets():
        raise ConfigError("kernel_backend is 'native', and the native kernels are not there: see the warning above")
    return backend


def _leaves_xla_little(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether native kernels do all products with a model's weights on this machine, whatever the rows."""
    return (
        config.kernel_backend in ("auto", "native")
        and model.dtype == "bfloat16"
        and model.moe is None
        and native.multiplies_all()
    )


def _devices(wanted: int, *, busy: bool) -> tuple[jax.Device, ...]:
    """The machine's devices; on CPU, if JAX has not started yet, as many virtual ones as are wanted.

    `busy`: XLA has products to do, so that it needs all of its threads.
    """
    if not busy and processors() <= SMALL_MACHINE:
        _leave_little_to_xla()
    elif processors() < allowed_processors():  # XLA knows affinity, and no quota of a control group
        os.environ.setdefault(XLA_THREADS, str(processors()))
    if wanted > 1 and VIRTUAL_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what they are
            jax.config.update("jax_num_cpu_devices", wanted)
    return devices()


def _leave_little_to_xla() -> None:
    """Asks XLA for one thread, and to compile in little time, if JAX has not started yet and where the environment does
    not say otherwise. Mutates the environment.

    Native kernels have threads of their own. With several of XLA's, the programs of a step start on one after the other
    in turn, and each waits 0.1 ms for a processor that the host's Python and the kernels' helpers share.
    """
    os.environ.setdefault(XLA_THREADS, "1")
    given = os.environ.get("XLA_FLAGS", "").strip()
    if given and not given.startswith("-"):  # a file's name
        return
    flags = (flag for flag in QUICK_COMPILATION if flag.partition("=")[0] not in given)
    os.environ["XLA_FLAGS"] = " ".join((given, *flags)).strip()


def _budget(config: EngineConfig, devices: tuple[jax.Device, ...]) -> int:
    """Bytes of one device. Virtual CPU devices share the host's."""
    platform = devices[0].platform
    memory = device_memory(devices[0]) if platform != "cpu" else None
    if config.memory_gb is not None:
        budget = int(config.memory_gb * 1e9)
    else:
        budget = int((memory or host_memory()) * PLATFORMS[platform].memory_fraction)
    return budget // _sharing(config, platform)


def _sharing(config: EngineConfig, platform: str) -> int:
    """How many devices there are in one memory, in which the process itself counts too if it is the host's."""
    return config.tp * config.pp * config.dp if platform == "cpu" else 1


def _info(config: EngineConfig, checkpoint: Checkpoint, path: Path, max_len: int) -> ModelInfo:
    model, generation = checkpoint.config, checkpoint.generation
    return ModelInfo(
        name=config.served_model_name or model_name(path),
        max_model_len=max_len,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        created=int(time.time()),
        max_n=config.max_n,
        max_logprobs=min(config.max_logprobs, model.vocab_size),
        max_stop_strings=config.max_stop_strings,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        default_sampling=sampling_defaults(generation, checkpoint.path),
        max_new_tokens=default_max_new_tokens(generation, checkpoint.path),
    )
