"""The options of `jaxserve sim`, in groups; those that `jaxserve serve` has too mean the same."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from jaxserve.bench.options import LoadOptions
from jaxserve.bundled import bundled_model_path
from jaxserve.cli.options import given, option
from jaxserve.core.config import EngineConfig, KVCacheDType
from jaxserve.core.errors import ConfigError

RENAMED = {"variant": "variants"}


@dataclass(frozen=True)
class ClusterOptions:
    """Which model runs on what, and how."""

    model: Annotated[
        str | None,
        option("Model", "A config.json, a folder with one, or a name in configs/models; default: the bundled model."),
    ] = None
    precision: Annotated[
        str | None, option("Model", "Weights of the layers: int8, int4, int3; default: the model's.")
    ] = None
    layer_precision: Annotated[str | None, option("Model", "Where it differs, as in 0-3:bf16,4-:int4.")] = None
    head_precision: Annotated[
        str | None, option("Model", "Of the output head (and a tied embedding); default: int8 with --precision.")
    ] = None
    hardware: Annotated[str | None, option("Cluster", "A YAML file, or a name in configs/hardware.")] = None
    cluster: Annotated[
        str | None,
        option("Cluster", "Devices, as in 8, or HOSTSxDEVICES, as in 2x8; default: those of one instance."),
    ] = None
    tp: Annotated[int, option("Cluster", "Tensor parallelism: devices that share every layer; default 1.")] = 1
    pp: Annotated[int, option("Cluster", "Pipeline parallelism: stages of layers; default 1.")] = 1
    memory_gb: Annotated[
        float | None, option("Memory", "Budget of a device in GB; default: a share of the hardware's.")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType | None, option("Memory", "KV cache: auto or int8, which takes half the memory; default: auto.")
    ] = None
    max_model_len: Annotated[
        int | None, option("Memory", "Tokens of prompt and answer together; default: the model's.")
    ] = None
    page_size: Annotated[int | None, option("Memory", "Tokens of a KV page; default 16.")] = None
    kv_pages: Annotated[int | None, option("Memory", "KV pages; default: what the budget holds.")] = None
    max_kv_pages: Annotated[
        int | None, option("Memory", "KV pages to have room for; default: what layers can give with a policy.")
    ] = None
    elastic_kv: Annotated[
        bool | None,
        option(
            "Memory",
            "KV pools grow page by page and not in segments; default: as jaxserve's, which do so on CPU alone.",
        ),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        option("Memory", "Keep the KV pages of prompts for later ones; default: where prompts share something."),
    ] = None
    variant: Annotated[
        list[str] | None,
        option(
            "Adaptation", "Precision that layers may change to while serving, besides the policy's; may be repeated."
        ),
    ] = None
    policy: Annotated[
        str | None,
        option(
            "Adaptation",
            "What changes the plan: static, morph, morph-int8, morph-performance, a YAML file or FILE.py:NAME.",
        ),
    ] = None
    slo_ttft: Annotated[
        float | None, option("Adaptation", "Seconds to the first token that the policy keeps; default: its own.")
    ] = None
    warmup: Annotated[
        bool | None, option("Adaptation", "Variants are compiled before they are needed; default: yes.")
    ] = None
    max_num_seqs: Annotated[int | None, option("Scheduling", "Sequences that run at once.")] = None
    max_num_batched_tokens: Annotated[int | None, option("Scheduling", "Tokens of one step.")] = None
    max_queued_requests: Annotated[
        int | None, option("Scheduling", "Waiting requests of an instance; beyond, they fail; default 1024.")
    ] = None
    max_queued_tokens: Annotated[
        int | None, option("Scheduling", "Waiting prompt tokens of an instance; beyond, they fail; default 1,000,000.")
    ] = None

    @property
    def model_path(self) -> str:
        """As `ModelShape.load` takes it."""
        return str(bundled_model_path()) if self.model is None else self.model

    @property
    def model_folder(self) -> Path | None:
        """Where a profile of the model would lie; None for a model that is a file of configs/models."""
        path = Path(self.model_path)
        if path.is_dir():
            return path
        return path.parent if path.name == "config.json" else None

    def config(self, devices: int, *, prefix_caching: bool) -> EngineConfig:
        """For as many instances as the devices hold. Raises `ConfigError` where they do not come out even."""
        each = max(self.tp * self.pp, 1)  # what makes no sense is told when plans are made
        if devices % each:
            raise ConfigError(
                f"an instance has tp x pp = {self.tp} x {self.pp} devices, and {devices} of --cluster are no multiple"
            )
        known = {field.name for field in fields(EngineConfig)}
        values = {RENAMED.get(name, name): value for name, value in given(self).items()}
        values = {name: tuple(value) if name == "variants" else value for name, value in values.items()}
        chosen = {name: value for name, value in values.items() if name in known}
        return EngineConfig(**chosen | {"dp": devices // each, "prefix_caching": prefix_caching})


@dataclass(frozen=True)
class FigureOptions:
    """What is made of the answers."""

    goodput: Annotated[
        list[str] | None,
        option("Metrics", "Objectives in ms, such as ttft:500 tpot:50 e2el:5000; default: --slo-ttft."),
    ] = None
    percentile_metrics: Annotated[str, option("Metrics", "Which metrics the table shows; default: all.")] = (
        LoadOptions.percentile_metrics
    )
    metric_percentiles: Annotated[str, option("Metrics", "Which percentiles; default 90,95,99.")] = (
        LoadOptions.metric_percentiles
    )
    metrics_interval: Annotated[
        float, option("Metrics", "Virtual seconds between two looks at queue, KV pages and layers; 0: none; default 1.")
    ] = LoadOptions.metrics_interval
    detail: Annotated[
        bool | None, option("Result", "Keep the time of every token; default: up to 50,000 requests.")
    ] = None

    def load(self) -> LoadOptions:
        """As results of `bench` are published. Raises `ConfigError`."""
        if not self.metrics_interval >= 0:
            raise ConfigError(f"--metrics-interval is {self.metrics_interval:g} s, but must be 0 (none) or more")
        return LoadOptions(
            goodput=self.goodput,
            percentile_metrics=self.percentile_metrics,
            metric_percentiles=self.metric_percentiles,
            metrics_interval=self.metrics_interval,
        )
