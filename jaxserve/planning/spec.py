"""The plan, variants and step shapes of an engine, which are decided before its memory is divided."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.control.plan import Plan, block_chain, parallel_plan
from jaxserve.control.policies import drops_layers, precisions_of
from jaxserve.core.config import DType, EngineConfig, ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import BITS, FULL, head_precision, layer_precisions, parse_precision
from jaxserve.core.step_shapes import Buckets
from jaxserve.planning.defaults import PlatformDefaults, served_dtype

STATIC = "static"  # the policy that changes nothing
MAX_LANES = 8  # instances that share their layers by default
MANUAL = "manual"  # the policy that changes what an operator asks for
SPARE_SLOTS = 2  # factor on the slots of an engine whose KV pages may grow
DEFAULT_VARIANT = "int4"  # for policies that name no precision


@dataclass(frozen=True)
class EngineSpec:
    """Decisions that follow from a configuration and a model, before memory is considered."""

    config: EngineConfig
    platform: str
    plan: Plan  # with 0 KV pages
    variants: tuple[str, ...]  # precisions that any layer may change to while serving; () if layers never change
    kv_dtype: str
    wanted_len: int  # tokens of the longest sequence that the user asks for
    buckets: Buckets
    devices: int  # of the machine

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        stored: Sequence[str],
        platform: str,
        defaults: PlatformDefaults,
        devices: int,
    ) -> "EngineSpec":
        """Return the spec of an engine. `stored` is the precision of each layer in the checkpoint.

        Raise `ConfigError` if the configuration contradicts itself, the model or the number of `devices`.
        """
        precisions = layer_precisions(config.precision, config.layer_precision, stored, model.dtype)
        variants = _variants(config, precisions, model.dtype)
        head = head_precision(config.head_precision, config.precision, model.dtype)
        chain = block_chain(head if model.tie_embeddings else model.dtype, precisions, head)
        plan = parallel_plan(chain, kv_pages=0, tp=config.tp, pp=config.pp, dp=config.dp, devices=devices)
        check_degrees(config, model)
        check_stages(config, model)
        if _has_spare_slots(config, platform):
            limited = (instance.with_max_num_seqs(defaults.max_num_seqs) for instance in plan.instances)
            plan = replace(plan, instances=tuple(limited))
        wanted_len = _wanted_len(config, model)
        buckets = _buckets(config, platform, defaults, wanted_len)
        return cls(config, platform, plan, variants, _kv_dtype(config, model), wanted_len, buckets, devices)

    @property
    def precisions(self) -> tuple[str, ...]:
        """All precisions that layers may have, at the start or later."""
        return tuple(dict.fromkeys((*self.plan.instances[0].layer_precisions, *self.variants)))


def check_degrees(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if instances cannot be merged up to the degree `max_tp`."""
    tp, max_tp = config.tp, config.degrees.max_tp
    if max_tp == tp:
        return
    given = f"max_tp is {max_tp}"
    if max_tp not in config.degrees.all():
        raise ConfigError(f"{given}: it must be tp ({tp}) times a power of two, as instances merge in pairs")
    if max_tp > tp * config.dp:
        raise ConfigError(
            f"{given}: it must be at most tp x dp = {tp} x {config.dp} = {tp * config.dp}, the devices of all instances"
        )
    if config.pp > 1:
        raise ConfigError(f"{given}: with pp = {config.pp} it must be tp ({tp}); only instances of one stage can merge")
    if max_tp > model.num_kv_heads:
        raise ConfigError(
            f"{given}: it must be at most {max(tp, model.num_kv_heads)}, because the model has {model.num_kv_heads} "
            "kv heads and a head cannot be cut; to copy heads would enlarge the KV cache at every degree"
        )


def max_lanes(config: EngineConfig, num_layers: int) -> int:
    """Return the most instances of the start that may share their layers; 1 if none may."""
    if config.max_pp is not None:
        return config.max_pp // config.pp
    return min(config.dp, num_layers // config.pp, MAX_LANES) if drops_layers(config.policy) else 1


def check_stages(config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if groups of instances cannot have `max_pp` stages."""
    max_pp, pp = config.max_pp, config.pp
    if max_pp is None or max_pp == pp:
        return
    given = f"max_pp is {max_pp}"
    if max_pp % pp:
        raise ConfigError(f"{given}: it must be a multiple of pp ({pp}), the stages of each instance")
    if max_pp > pp * config.dp:
        raise ConfigError(f"{given}: it must be at most pp x dp = {pp} x {config.dp} = {pp * config.dp}")
    if max_pp > model.num_layers:
        raise ConfigError(f"{given}: it must be at most {model.num_layers}, the number of the model's layers")


def dtype_of(config: EngineConfig, stored: DType, layers: Sequence[str], platform: str) -> DType:
    """Return the dtype that the engine computes in: the configuration's, or what `served_dtype` chooses for "auto".

    `stored` is the checkpoint's dtype, and `layers` are the precisions of its layers. For a float16 checkpoint, a
    precision option of float16 or bfloat16 decides, because an engine has only one full precision.
    """
    if config.dtype != "auto":
        return config.dtype
    given = {FULL.get(name) for name in _precisions_given(config)}
    named: list[DType] = [dtype for dtype in ("float16", "bfloat16") if dtype in given]
    if stored == "float16" and named:
        return named[0]
    return served_dtype(stored, platform, quantized=has_quantized(config, layers))


def has_quantized(config: EngineConfig, layers: Sequence[str]) -> bool:
    """Return whether some weights are quantised or may be while serving. `layers` are the checkpoint's precisions."""
    return changes_layers(config) or any(name in BITS for name in (*_precisions_given(config), *layers))


def changes_layers(config: EngineConfig) -> bool:
    """Return whether the policy may change the precisions of layers, and so the number of KV pages."""
    return precisions_of(config.policy) != ()


def _precisions_given(config: EngineConfig) -> set[str]:
    of_layers = re.findall(r":(\w+)", config.layer_precision or "")
    return {config.precision, config.head_precision, *of_layers, *config.variants}


def _variants(config: EngineConfig, precisions: Sequence[str], dtype: str) -> tuple[str, ...]:
    """Return the precisions that layers may change to: the policy's, the user's, and those they start with."""
    wanted = config.variants
    if changes_layers(config):
        needed = precisions_of(config.policy)
        # The policy's come first: they determine the swap order.
        wanted = wanted or (DEFAULT_VARIANT,) if needed is None else (*needed, *wanted)
    named = [parse_precision(name, dtype, "variants") for name in wanted]
    return tuple(dict.fromkeys((*named, *precisions))) if named else ()


def _kv_dtype(config: EngineConfig, model: ModelConfig) -> str:
    return model.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def _wanted_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position
    if not 1 < config.max_model_len <= model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}: it must be from 2 to the model's {model.max_position} positions"
        )
    return config.max_model_len


def _has_spare_slots(config: EngineConfig, platform: str) -> bool:
    """Return whether an engine has more slots than its plan uses at the start.

    Where defaults are few, as on CPU, a policy that grows the KV pages would otherwise gain room that nothing can use.
    """
    return platform == "cpu" and changes_layers(config) and config.max_num_seqs is None


def _buckets(config: EngineConfig, platform: str, defaults: PlatformDefaults, wanted_len: int) -> Buckets:
    spare = SPARE_SLOTS if _has_spare_slots(config, platform) else 1
    seqs = config.max_num_seqs or spare * defaults.max_num_seqs
    prefill = defaults.prefill_tokens
    if config.max_num_batched_tokens is not None:
        prefill = config.max_num_batched_tokens - seqs
    if prefill < defaults.tile:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}: it must be at least max_num_seqs + "
            f"{defaults.tile} = {seqs + defaults.tile}"
        )
    width = ceil_div(wanted_len, config.page_size)
    on_cpu = platform == "cpu"
    widths = (width,) if on_cpu else _width_buckets(width)
    return Buckets(seqs, prefill // defaults.tile, defaults.tile, min(defaults.min_rows, seqs), widths, finer=on_cpu)


def _width_buckets(width: int) -> tuple[int, ...]:
    """Return page-table widths for platforms whose attention reads the whole table: 64 pages, then times 4."""
    widths, size = [], 64
    while size < width:
        widths.append(size)
        size *= 4
    return (*widths, width)
