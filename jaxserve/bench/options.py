"""The options of `jaxserve bench`, in groups that several commands share."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxserve.core.errors import ConfigError
from jaxserve.core.options import Option

OBJECTIVES = ("ttft", "tpot", "e2el")
METRICS = ("ttft", "tpot", "itl", "e2el", "queue")


@dataclass(frozen=True)
class ServerOptions:
    """Which server is measured, and what every request to it says."""

    base_url: Annotated[str | None, Option("Server", "Where the server listens.", default="http://127.0.0.1:8000")] = (
        None
    )
    host: Annotated[str | None, Option("Server", "Host of --base-url, as for vLLM.")] = None
    port: Annotated[int | None, Option("Server", "Port of --base-url, as for vLLM.", minimum=1, maximum=65535)] = None
    spawn: Annotated[bool, Option("Server", "Start a jaxserve server for this run, and stop it.")] = False
    serve_args: Annotated[
        str, Option("Server", 'With --spawn: arguments of `jaxserve serve`, as in "MODEL --tp 2".')
    ] = ""
    spawn_timeout: Annotated[float, Option("Server", "With --spawn: seconds until it must be ready.")] = 600.0
    endpoint: Annotated[
        Literal["completions", "chat", "/v1/completions", "/v1/chat/completions"] | None,
        Option("Server", "Prompts to complete, or messages.", default="completions"),
    ] = None
    backend: Annotated[
        Literal["openai", "vllm", "openai-chat"] | None, Option("Server", "vLLM's way to choose the endpoint.")
    ] = None
    model: Annotated[str | None, Option("Server", "Name to ask for.", default="the first that is served")] = None
    tokenizer: Annotated[
        str | None,
        Option("Server", "Folder, tokenizer.json or name.", default="what the server says its model is"),
    ] = None
    prompt_format: Annotated[
        Literal["tokens", "text"] | None,
        Option(
            "Server",
            "Prompts as token ids, which have exact lengths, or as text.",
            default="tokens for completions, text for chat",
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None, Option("Server", "Ask for answers of the full length.", default="for traces alone")
    ] = None
    temperature: Annotated[float | None, Option("Server", "Temperature of sampling.", default="the server's")] = None
    extra_body: Annotated[str, Option("Server", "JSON object merged into every request.")] = "{}"
    api_key: Annotated[str | None, Option("Server", "Bearer token.", env="JAXSERVE_API_KEY")] = None
    timeout: Annotated[float, Option("Server", "Seconds after which a request counts as failed.")] = 3600.0

    @property
    def url(self) -> str:
        """Where the server listens, unless it is spawned."""
        return self.base_url or f"http://{self.host or '127.0.0.1'}:{self.port or 8000}"

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages."""
        return "chat" in self.endpoint if self.endpoint else self.backend == "openai-chat"


@dataclass(frozen=True)
class LoadOptions:
    """How load is given and what is made of it."""

    max_concurrency: Annotated[
        int | None, Option("Load", "Requests in flight at most.", default="no limit", minimum=1)
    ] = None
    num_warmups: Annotated[int, Option("Load", "Requests sent before, and not measured.", minimum=0)] = 1
    goodput: Annotated[
        list[str] | None,
        Option("Metrics", "Objectives in ms, such as ttft:500 tpot:50 e2el:5000; a good request meets all."),
    ] = None
    percentile_metrics: Annotated[str, Option("Metrics", "Which metrics the table shows.")] = ",".join(METRICS)
    metric_percentiles: Annotated[str, Option("Metrics", "Which percentiles.")] = "90,95,99"
    metrics_interval: Annotated[
        float, Option("Metrics", "Seconds between two looks at the server's /metrics; 0: none.")
    ] = 1.0
    save_detailed: Annotated[bool, Option("Result", "Keep the generated texts too.")] = False

    def objectives(self) -> dict[str, float]:
        """Milliseconds by metric. Raises `ConfigError` for what is no objective."""
        limits: dict[str, float] = {}
        for text in re.split(r"[\s,]+", " ".join(self.goodput or ()).strip()):
            name, _, value = text.partition(":")
            try:
                limits |= {name: float(value)} if text else {}
            except ValueError:
                limits[name] = -1
            if text and (name not in OBJECTIVES or not limits[name] > 0):
                raise ConfigError(f"--goodput {text!r}: an objective is ttft:MS, tpot:MS or e2el:MS")
        return limits

    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to report. Raises `ConfigError`."""
        try:
            found = tuple(float(text) for text in self.metric_percentiles.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 <= percentile <= 100 for percentile in found):
            raise ConfigError(f"--metric-percentiles {self.metric_percentiles!r}: give numbers up to 100, as 50,90,99")
        return found

    def metrics(self) -> tuple[str, ...]:
        """The metrics to show. Raises `ConfigError`."""
        found = tuple(text.strip() for text in self.percentile_metrics.split(","))
        if wrong := [name for name in found if name not in METRICS]:
            raise ConfigError(f"--percentile-metrics {wrong[0]!r}: the metrics are {', '.join(METRICS)}")
        return found


@dataclass(frozen=True)
class ResultOptions:
    """What is left behind."""

    save_result: Annotated[
        Path | None,
        Option(
            "Result",
            "JSON file, or a folder for one named by label and date.",
            flags=("--save-result", "--output-json"),
        ),
    ] = None
    result_dir: Annotated[Path | None, Option("Result", "Folder, as for vLLM.")] = None
    result_filename: Annotated[str | None, Option("Result", "Name in that folder, which ends in .json.")] = None
    label: Annotated[str | None, Option("Result", "Name of this configuration in tables and plots.")] = None
    quiet: Annotated[bool, Option("Result", "No progress bar.", flags=("--quiet/--no-quiet", "--disable-tqdm"))] = False

    def destination(self) -> Path | None:
        """The file, or the folder for one; None to save nothing. Raises `ConfigError`."""
        if self.result_dir is None and self.result_filename is None:
            return self.save_result
        if self.save_result not in (None, Path()):
            raise ConfigError("a result goes to --save-result, or into --result-dir as --result-filename, not both")
        if self.result_filename is not None and not self.result_filename.endswith(".json"):
            raise ConfigError(f"--result-filename {self.result_filename!r} must end in .json")
        return (self.result_dir or Path()) / (self.result_filename or "")


@dataclass(frozen=True)
class CalibrateOptions:
    """Whether `latency` makes a hardware file of this machine, and how."""

    calibrate: Annotated[
        Path | None,
        Option("Calibration", "Write this hardware file for the simulator instead, from a server's steps under load."),
    ] = None
    precisions: Annotated[
        str, Option("Calibration", "Precisions of the layers, such as bf16,int4; auto: the checkpoint's.")
    ] = "auto"
    calibration_seconds: Annotated[float, Option("Calibration", "Seconds of load for each precision.", minimum=1)] = (
        75.0
    )


@dataclass(frozen=True)
class DatasetOptions:
    """What is asked."""

    dataset: Annotated[
        Literal["random", "sharegpt", "prefix-repetition", "trace"],
        Option(
            "Dataset",
            "sharegpt takes --dataset-path, trace takes --trace or --synthetic.",
            flags=("--dataset", "--dataset-name"),
        ),
    ] = "random"
    dataset_path: Annotated[Path | None, Option("Dataset", "JSON or JSONL file of conversations.")] = None
    num_prompts: Annotated[int, Option("Dataset", "How many requests.")] = 100
    input_len: Annotated[
        str | None,
        Option(
            "Dataset",
            "Prompt tokens: 512, uniform:100,900, normal:512,100 or lognormal:512,300.",
            default="512",
            flags=("--input-len", "--random-input-len", "--prefix-repetition-suffix-len"),
        ),
    ] = None
    output_len: Annotated[
        str | None,
        Option(
            "Dataset",
            "Answer tokens, in the same forms.",
            default="128, for sharegpt the answer's",
            flags=("--output-len", "--random-output-len", "--sharegpt-output-len", "--prefix-repetition-output-len"),
        ),
    ] = None
    range_ratio: Annotated[
        float,
        Option("Dataset", "Lengths uniform within ± this share.", flags=("--range-ratio", "--random-range-ratio")),
    ] = 0.0
    prefix_len: Annotated[
        int | None,
        Option(
            "Dataset",
            "Tokens that prompts share.",
            flags=("--prefix-len", "--random-prefix-len", "--prefix-repetition-prefix-len"),
            minimum=0,
        ),
    ] = None
    num_prefixes: Annotated[
        int,
        Option(
            "Dataset",
            "Different prefixes of prefix-repetition.",
            flags=("--num-prefixes", "--prefix-repetition-num-prefixes"),
        ),
    ] = 10
    seed: Annotated[int, Option("Dataset", "Seed of contents, lengths and arrivals.", minimum=0)] = 0


@dataclass(frozen=True)
class ArrivalOptions:
    """When requests arrive, unless a trace says so."""

    request_rate: Annotated[float, Option("Arrivals", "Requests per second; inf: all at once.")] = float("inf")
    burstiness: Annotated[
        float, Option("Arrivals", "Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.")
    ] = 1.0
    ramp_up: Annotated[
        str | None, Option("Arrivals", "Rate that grows, such as linear:1:10 or exponential:1:10, instead.")
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, Option("Arrivals", "The same in three parts, as for vLLM.")
    ] = None
    ramp_up_start_rps: Annotated[float | None, Option("Arrivals", "Its first rate.")] = None
    ramp_up_end_rps: Annotated[float | None, Option("Arrivals", "Its last rate.")] = None

    def ramp(self) -> str | None:
        """As --ramp-up takes it, also if it was given in parts. Raises `ConfigError` if a part is missing."""
        parts = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if parts == (None, None, None):
            return self.ramp_up
        if None in parts or self.ramp_up is not None:
            names = "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            raise ConfigError(f"{names} go together, and without --ramp-up")
        return f"{parts[0]}:{parts[1]:g}:{parts[2]:g}"


@dataclass(frozen=True)
class TraceOptions:
    """Which trace is replayed, and how it is scaled; scaling is applied in the order of these options."""

    trace: Annotated[
        Path | None,
        Option("Trace", "CSV(.gz) with arrival_s,input_tokens,output_tokens; Azure, BurstGPT or Mooncake files."),
    ] = None
    synthetic: Annotated[
        str | None, Option("Trace", "Profile of a generated trace: azure-conv, azure-code, azure-burst or burstgpt.")
    ] = None
    duration: Annotated[float, Option("Trace", "With --synthetic: seconds.")] = 60.0
    rate: Annotated[
        float | None, Option("Trace", "With --synthetic: mean requests per second.", default="the profile's")
    ] = None
    window: Annotated[str | None, Option("Trace scaling", "start:length in seconds.")] = None
    thin: Annotated[float | None, Option("Trace scaling", "Share of the requests to keep, drawn at random.")] = None
    replicate: Annotated[int | None, Option("Trace scaling", "Copies of every request.")] = None
    stretch: Annotated[float | None, Option("Trace scaling", "Factor on time; 2 halves the rate.")] = None
    fixed_lengths: Annotated[str | None, Option("Trace scaling", "in/out: the same tokens for all.")] = None
    scale_lengths: Annotated[float | None, Option("Trace scaling", "Factor on prompt and answer tokens.")] = None
    clip_lengths: Annotated[
        str | None, Option("Trace scaling", "in/out: most tokens of a prompt and of an answer.")
    ] = None
