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
    """Options of the measured server and of every request sent to it."""

    base_url: Annotated[
        str | None,
        Option(
            "Server",
            "Where the server listens; unix:PATH for a Unix socket.",
            default="http://127.0.0.1:8000",
            first=True,
        ),
    ] = None
    host: Annotated[str | None, Option("Server", "Host of --base-url, as for vLLM.")] = None
    port: Annotated[int | None, Option("Server", "Port of --base-url, as for vLLM.", minimum=1, maximum=65535)] = None
    spawn: Annotated[
        bool, Option("Server", "Start a jaxserve server for this run, and stop it at the end.", first=True)
    ] = False
    serve_args: Annotated[
        str, Option("Server", 'With --spawn: arguments of `jaxserve serve`, as in "MODEL --tp 2".', first=True)
    ] = ""
    spawn_timeout: Annotated[
        float, Option("Server", "With --spawn: seconds within which the server must be ready.")
    ] = 600.0
    endpoint: Annotated[
        Literal["completions", "chat", "/v1/completions", "/v1/chat/completions"] | None,
        Option("Server", "Send prompts to complete, or chat messages.", default="completions", first=True),
    ] = None
    backend: Annotated[
        Literal["openai", "vllm", "openai-chat"] | None, Option("Server", "The endpoint, as vLLM names it.")
    ] = None
    model: Annotated[str | None, Option("Server", "Served model to ask for.", default="the first one", first=True)] = (
        None
    )
    tokenizer: Annotated[
        str | None,
        Option("Server", "Folder, tokenizer.json or name on the hub.", default="the one of the server's model"),
    ] = None
    prompt_format: Annotated[
        Literal["tokens", "text"] | None,
        Option(
            "Server",
            "Send prompts as token ids, which have exact lengths, or as text.",
            default="tokens for completions, text for chat",
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None, Option("Server", "Generate every answer to its full length.", default="for traces only")
    ] = None
    temperature: Annotated[float | None, Option("Server", "Sampling temperature.", default="the server's")] = None
    extra_body: Annotated[str, Option("Server", "JSON object merged into every request.")] = "{}"
    api_key: Annotated[str | None, Option("Server", "Bearer token.", env="JAXSERVE_API_KEY")] = None
    timeout: Annotated[float, Option("Server", "Seconds after which a request counts as failed.")] = 3600.0

    @property
    def url(self) -> str:
        """The URL of a server that is not spawned."""
        return self.base_url or f"http://{self.host or '127.0.0.1'}:{self.port or 8000}"

    @property
    def is_chat(self) -> bool:
        """True if prompts are sent as chat messages."""
        return "chat" in self.endpoint if self.endpoint else self.backend == "openai-chat"


@dataclass(frozen=True)
class LoadOptions:
    """Options of the load, and of the figures that are computed from it."""

    max_concurrency: Annotated[
        int | None, Option("Load", "Most requests in flight.", default="no limit", minimum=1, first=True)
    ] = None
    num_warmups: Annotated[int, Option("Load", "Unmeasured requests sent before the load.", minimum=0)] = 1
    goodput: Annotated[
        list[str] | None,
        Option(
            "Metrics", "Objectives in ms, such as ttft:500 tpot:50 e2el:5000; a good request meets all.", first=True
        ),
    ] = None
    percentile_metrics: Annotated[str, Option("Metrics", "Metrics that the table shows.")] = ",".join(METRICS)
    metric_percentiles: Annotated[str, Option("Metrics", "Percentiles to compute.")] = "90,95,99"
    metrics_interval: Annotated[
        float, Option("Metrics", "Seconds between samples of the server's /metrics; 0: no samples.")
    ] = 1.0
    save_detailed: Annotated[bool, Option("Result", "Save the generated texts too.")] = False

    def objectives(self) -> dict[str, float]:
        """Return the objectives of --goodput: milliseconds by metric.

        Raise ConfigError if one is not of the form METRIC:MS.
        """
        limits: dict[str, float] = {}
        for text in re.split(r"[\s,]+", " ".join(self.goodput or ()).strip()):
            name, _, value = text.partition(":")
            try:
                limits |= {name: float(value)} if text else {}
            except ValueError:
                limits[name] = -1
            if text and (name not in OBJECTIVES or not limits[name] > 0):
                raise ConfigError(f"--goodput has {text!r}: give objectives as ttft:MS, tpot:MS or e2el:MS")
        return limits

    def percentiles(self) -> tuple[float, ...]:
        """Return the percentiles to compute. Raise ConfigError if one is not a number from 0 to 100."""
        try:
            found = tuple(float(text) for text in self.metric_percentiles.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 <= percentile <= 100 for percentile in found):
            raise ConfigError(
                f"--metric-percentiles is {self.metric_percentiles!r}: give numbers from 0 to 100, such as 50,90,99"
            )
        return found

    def metrics(self) -> tuple[str, ...]:
        """Return the metrics to show. Raise ConfigError if one is unknown."""
        found = tuple(text.strip() for text in self.percentile_metrics.split(","))
        if wrong := [name for name in found if name not in METRICS]:
            raise ConfigError(f"--percentile-metrics has {wrong[0]!r}: choose from {', '.join(METRICS)}")
        return found


@dataclass(frozen=True)
class ResultOptions:
    """Options of the saved result."""

    save_result: Annotated[
        Path | None,
        Option(
            "Result",
            "JSON file, or a folder in which the file is named by label and date.",
            flags=("--save-result", "--output-json"),
            first=True,
        ),
    ] = None
    result_dir: Annotated[Path | None, Option("Result", "Folder, as for vLLM.")] = None
    result_filename: Annotated[str | None, Option("Result", "File name in --result-dir, ending in .json.")] = None
    label: Annotated[str | None, Option("Result", "Name of this configuration in tables and plots.", first=True)] = None
    quiet: Annotated[bool, Option("Result", "No progress bar.", flags=("--quiet/--no-quiet", "--disable-tqdm"))] = False

    def destination(self) -> Path | None:
        """Return the file or folder to save to, or None. Raise ConfigError if options contradict each other."""
        if self.result_dir is None and self.result_filename is None:
            return self.save_result
        if self.save_result not in (None, Path()):
            raise ConfigError("give --save-result, or --result-dir with --result-filename, not both")
        if self.result_filename is not None and not self.result_filename.endswith(".json"):
            raise ConfigError(f"--result-filename is {self.result_filename!r}: it must end in .json")
        return (self.result_dir or Path()) / (self.result_filename or "")


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `latency` for measuring a hardware file of this machine."""

    calibrate: Annotated[
        Path | None,
        Option(
            "Calibration",
            "Measure a server under load and write this hardware file for the simulator instead.",
            first=True,
        ),
    ] = None
    precisions: Annotated[
        str, Option("Calibration", "Precisions of the layers, such as bf16,int4; auto: the checkpoint's.")
    ] = "auto"
    calibration_seconds: Annotated[float, Option("Calibration", "Seconds of load for each precision.", minimum=1)] = (
        75.0
    )


@dataclass(frozen=True)
class DatasetOptions:
    """Options of the prompts and the lengths of answers."""

    dataset: Annotated[
        Literal["random", "sharegpt", "prefix-repetition", "trace"],
        Option(
            "Dataset",
            "sharegpt takes --dataset-path, trace takes --trace or --synthetic.",
            flags=("--dataset", "--dataset-name"),
            first=True,
        ),
    ] = "random"
    dataset_path: Annotated[Path | None, Option("Dataset", "JSON or JSONL file of conversations.", first=True)] = None
    num_prompts: Annotated[int, Option("Dataset", "Number of requests.", first=True)] = 100
    input_len: Annotated[
        str | None,
        Option(
            "Dataset",
            "Prompt tokens: 512, uniform:100,900, normal:512,100 or lognormal:512,300.",
            default="512",
            flags=("--input-len", "--random-input-len", "--prefix-repetition-suffix-len"),
            first=True,
        ),
    ] = None
    output_len: Annotated[
        str | None,
        Option(
            "Dataset",
            "Answer tokens, in the forms of --input-len.",
            default="128; for sharegpt, as in the file",
            flags=("--output-len", "--random-output-len", "--sharegpt-output-len", "--prefix-repetition-output-len"),
            first=True,
        ),
    ] = None
    range_ratio: Annotated[
        float,
        Option(
            "Dataset", "Draw lengths uniformly within ± this share.", flags=("--range-ratio", "--random-range-ratio")
        ),
    ] = 0.0
    prefix_len: Annotated[
        int | None,
        Option(
            "Dataset",
            "Tokens that prompts have in common.",
            flags=("--prefix-len", "--random-prefix-len", "--prefix-repetition-prefix-len"),
            minimum=0,
        ),
    ] = None
    num_prefixes: Annotated[
        int,
        Option(
            "Dataset",
            "Number of different prefixes (prefix-repetition).",
            flags=("--num-prefixes", "--prefix-repetition-num-prefixes"),
        ),
    ] = 10
    seed: Annotated[int, Option("Dataset", "Seed of contents, lengths and arrivals.", minimum=0)] = 0


@dataclass(frozen=True)
class ArrivalOptions:
    """Options of arrival times, which do not apply to a trace."""

    request_rate: Annotated[float, Option("Arrivals", "Requests per second; inf: all at once.", first=True)] = float(
        "inf"
    )
    burstiness: Annotated[
        float, Option("Arrivals", "Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.")
    ] = 1.0
    ramp_up: Annotated[
        str | None,
        Option("Arrivals", "Rising rate in place of --request-rate, such as linear:1:10 or exponential:1:10."),
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, Option("Arrivals", "Form of the ramp-up, as for vLLM.")
    ] = None
    ramp_up_start_rps: Annotated[float | None, Option("Arrivals", "First rate of the ramp-up.")] = None
    ramp_up_end_rps: Annotated[float | None, Option("Arrivals", "Last rate of the ramp-up.")] = None

    def ramp(self) -> str | None:
        """Return the ramp-up in the form of --ramp-up, also if it was given in parts.

        Raise ConfigError if a part is missing.
        """
        parts = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if parts == (None, None, None):
            return self.ramp_up
        if None in parts or self.ramp_up is not None:
            names = "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            raise ConfigError(f"{names} must be given together and without --ramp-up")
        return f"{parts[0]}:{parts[1]:g}:{parts[2]:g}"


@dataclass(frozen=True)
class TraceOptions:
    """Options of a replayed trace. Scalings are applied in the order of the fields."""

    trace: Annotated[
        Path | None,
        Option(
            "Trace",
            "CSV(.gz) with arrival_s,input_tokens,output_tokens; Azure, BurstGPT or Mooncake files.",
            first=True,
        ),
    ] = None
    synthetic: Annotated[
        str | None,
        Option("Trace", "Profile of a generated trace: azure-conv, azure-code, azure-burst or burstgpt.", first=True),
    ] = None
    duration: Annotated[float, Option("Trace", "With --synthetic: seconds of traffic.", first=True)] = 60.0
    rate: Annotated[
        float | None,
        Option(
            "Trace",
            "Mean requests per second, of --synthetic; in `sim plan` also of random requests.",
            default="the profile's",
            first=True,
        ),
    ] = None
    window: Annotated[str | None, Option("Trace scaling", "Cut from the trace: start:length in seconds.")] = None
    thin: Annotated[float | None, Option("Trace scaling", "Share of the requests to keep, chosen at random.")] = None
    replicate: Annotated[int | None, Option("Trace scaling", "Copies of every request.")] = None
    stretch: Annotated[float | None, Option("Trace scaling", "Factor on time: 2 halves the rate.")] = None
    fixed_lengths: Annotated[str | None, Option("Trace scaling", "in/out: tokens of every prompt and answer.")] = None
    scale_lengths: Annotated[float | None, Option("Trace scaling", "Factor on prompt and answer tokens.")] = None
    clip_lengths: Annotated[str | None, Option("Trace scaling", "in/out: most tokens of a prompt and an answer.")] = (
        None
    )
