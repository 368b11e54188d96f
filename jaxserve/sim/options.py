"""The options of `jaxserve sim`, in groups."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from jaxserve.bench.options import LoadOptions
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig, KVCacheDType, Microbatches
from jaxserve.core.errors import ConfigError
from jaxserve.core.options import Option, given_options, options_of

RENAMED = {"variant": "variants"}


# Options that `jaxserve bench` and `jaxserve serve` also have are defined there.
LOAD = {field.name: field.option for field in options_of(LoadOptions)}
SERVE = {field.name: field.option for field in options_of(EngineConfig)}


@dataclass(frozen=True)
class ClusterOptions:
    """Options of the simulated cluster: model, hardware, memory and policy."""

    model: Annotated[
        str | None,
        Option(
            "Model",
            "A config.json, a folder with one, a name in configs/models, or a name on the hub.",
            default="the bundled model",
            first=True,
        ),
    ] = None
    precision: Annotated[str | None, SERVE["precision"]] = None
    layer_precision: Annotated[str | None, SERVE["layer_precision"]] = None
    head_precision: Annotated[str | None, SERVE["head_precision"]] = None
    hardware: Annotated[
        str | None, Option("Cluster", "A YAML file, or a name in configs/hardware; required.", first=True)
    ] = None
    cluster: Annotated[
        str | None,
        Option(
            "Cluster", "Devices, as in 8, or HOSTSxDEVICES, as in 2x8.", default="those of one instance", first=True
        ),
    ] = None
    tp: Annotated[int, replace(SERVE["tp"], group="Cluster")] = 1
    pp: Annotated[int, replace(SERVE["pp"], group="Cluster")] = 1
    max_tp: Annotated[int | None, replace(SERVE["max_tp"], group="Cluster")] = None
    max_pp: Annotated[int | None, replace(SERVE["max_pp"], group="Cluster")] = None
    memory_gb: Annotated[
        float | None,
        Option("Memory", "Budget of a device in GB.", default="a share of the hardware's", above=0, first=True),
    ] = None
    kv_cache_dtype: Annotated[KVCacheDType | None, SERVE["kv_cache_dtype"]] = None
    max_model_len: Annotated[int | None, SERVE["max_model_len"]] = None
    page_size: Annotated[int | None, SERVE["page_size"]] = None
    kv_pages: Annotated[int | None, SERVE["kv_pages"]] = None
    max_kv_pages: Annotated[int | None, SERVE["max_kv_pages"]] = None
    elastic_kv: Annotated[
        bool | None,
        Option("Memory", "KV pools grow page by page and not in segments.", default="on CPU alone, as in a server"),
    ] = None
    prefix_caching: Annotated[
        bool | None, replace(SERVE["prefix_caching"], default="where prompts share something")
    ] = None
    variant: Annotated[list[str] | None, replace(SERVE["variants"], flags=())] = None
    policy: Annotated[
        str | None,
        Option(
            "Adaptation",
            "static, morph, morph-int8, morph-performance, tp_transform, param_drop, several with +, or a file.",
            default="static",
            first=True,
        ),
    ] = None
    slo_ttft: Annotated[float | None, SERVE["slo_ttft"]] = None
    slo_tpot: Annotated[float | None, SERVE["slo_tpot"]] = None
    max_quality_loss: Annotated[float | None, SERVE["max_quality_loss"]] = None
    warmup: Annotated[bool | None, Option("Adaptation", "Compile variants before they are needed.", default="yes")] = (
        None
    )
    max_num_seqs: Annotated[int | None, SERVE["max_num_seqs"]] = None
    max_num_batched_tokens: Annotated[int | None, SERVE["max_num_batched_tokens"]] = None
    microbatches: Annotated[Microbatches | None, SERVE["microbatches"]] = None
    microbatch_cost: Annotated[str | None, SERVE["microbatch_cost"]] = None
    max_queued_requests: Annotated[int | None, SERVE["max_queued_requests"]] = None
    max_queued_tokens: Annotated[int | None, SERVE["max_queued_tokens"]] = None

    @property
    def model_path(self) -> str:
        """The model for `ModelShape.load`: a path or a name."""
        return str(bundled_model_path()) if self.model is None else self.model

    @property
    def model_folder(self) -> Path | None:
        """The folder in which a sensitivity profile is looked for; None for a file of configs/models."""
        path = Path(self.model_path)
        if path.is_dir():
            return path
        return path.parent if path.name == "config.json" else None

    def config(self, devices: int, *, prefix_caching: bool) -> EngineConfig:
        """Return the engine's configuration with as many instances as `devices` holds.

        Raise `ConfigError` if `devices` is not a multiple of tp x pp.
        """
        each = max(self.tp * self.pp, 1)  # values below 1 are reported when the plan is made
        if devices % each:
            raise ConfigError(
                f"--cluster has {devices} devices: it must be a multiple of tp x pp = {self.tp} x {self.pp}, "
                "the devices of an instance"
            )
        known = {field.name for field in fields(EngineConfig)}
        values = {RENAMED.get(name, name): value for name, value in given_options(self).items()}
        values = {name: tuple(value) if name == "variants" else value for name, value in values.items()}
        chosen = {name: value for name, value in values.items() if name in known}
        return EngineConfig(**chosen | {"dp": devices // each, "prefix_caching": prefix_caching})


@dataclass(frozen=True)
class FigureOptions:
    """Options of the figures in the result."""

    goodput: Annotated[
        list[str] | None,
        Option("Metrics", "Objectives in ms, such as ttft:500 tpot:50 e2el:5000.", default="--slo-ttft", first=True),
    ] = None
    percentile_metrics: Annotated[str, LOAD["percentile_metrics"]] = LoadOptions.percentile_metrics
    metric_percentiles: Annotated[str, LOAD["metric_percentiles"]] = LoadOptions.metric_percentiles
    metrics_interval: Annotated[
        float, Option("Metrics", "Virtual seconds between two samples of queue, KV pages and layers; 0: none.")
    ] = LoadOptions.metrics_interval
    detail: Annotated[
        bool | None, Option("Result", "Keep the time of every token.", default="up to 50,000 requests")
    ] = None

    def load(self) -> LoadOptions:
        """Return the options with which `bench` publishes results. Raise `ConfigError` if a value is out of range."""
        if not self.metrics_interval >= 0:
            raise ConfigError(f"--metrics-interval is {self.metrics_interval:g} s: it must be at least 0 (none)")
        return LoadOptions(
            goodput=self.goodput,
            percentile_metrics=self.percentile_metrics,
            metric_percentiles=self.metric_percentiles,
            metrics_interval=self.metrics_interval,
        )
