"""Options of the command line that several commands have, in groups. None: not given."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jaxserve.core.config import KernelBackend, KVCacheDType


def option(group: str, text: str, **more: Any) -> Any:
    """An option in a group of --help, whose text tells the default."""
    return typer.Option(help=text, rich_help_panel=group, show_default=False, **more)


def _sampling(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Sampling")


def given(options: Any) -> dict[str, Any]:
    """The fields of a group of options that are not None."""
    return {field.name: value for field in fields(options) if (value := getattr(options, field.name)) is not None}


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded and run: fields of `EngineConfig`."""

    tokenizer: Annotated[Path | None, option("Model", "Folder or tokenizer.json; default: the model's.")] = None
    chat_template: Annotated[
        str | None,
        option("Model", "File, or one of plain, vicuna, chatml, or one that the model names; default: the model's."),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"] | None,
        option("Model", "Precision of weights, activations and KV cache; default: the checkpoint's."),
    ] = None
    precision: Annotated[
        str | None, option("Model", "Weights of the layers: int8, int4, int3; default: the checkpoint's.")
    ] = None
    layer_precision: Annotated[str | None, option("Model", "Where it differs, as in 0-3:bf16,4-:int4.")] = None
    head_precision: Annotated[
        str | None,
        option("Model", "Of the output head (and a tied embedding); default: int8 with --precision."),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"] | None,
        option("Model", "dummy: random weights from config.json alone."),
    ] = None
    memory_gb: Annotated[
        float | None, option("Memory", "Budget in GB, never exceeded; default: a share of the machine's.")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType | None,
        option("Memory", "KV cache: auto or int8, which takes half the memory; default: auto, as dtype."),
    ] = None
    max_model_len: Annotated[
        int | None, option("Memory", "Tokens of prompt and answer together; default: the model's.")
    ] = None
    tp: Annotated[int | None, option("Parallelism", "Tensor parallelism: devices that share every layer.")] = None
    pp: Annotated[int | None, option("Parallelism", "Pipeline parallelism: stages of layers.")] = None
    kernel_backend: Annotated[
        KernelBackend | None,
        option("Compilation", "Kernels: native on CPU, pallas on GPU, or xla alone; default: auto, the fastest there."),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer is sampled: fields of `SamplingParams`."""

    max_tokens: Annotated[int, _sampling("Most tokens to generate.")] = 128
    temperature: Annotated[float, _sampling("0 takes the likeliest token.")] = 0.7
    top_p: Annotated[float, _sampling("Share of the probability to sample from.")] = 0.95
    top_k: Annotated[int, _sampling("Likeliest tokens to sample from; 0: all.")] = 0
    repetition_penalty: Annotated[float, _sampling("Above 1: fewer repetitions.")] = 1.0
    seed: Annotated[int | None, _sampling("The same seed gives the same answer.")] = None
    stop: Annotated[list[str] | None, _sampling("Text that ends the answer; may be repeated.")] = None


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions):
    """The same for an answer in a conversation, which may be longer."""

    max_tokens: Annotated[int, _sampling("Most tokens of an answer.")] = 512
