"""The keyword arguments of `LLM` and `AsyncLLM`, so that editors complete them.

Made by scripts/generate-options from `EngineConfig`, which describes them.
"""

from pathlib import Path
from typing import Literal, TypedDict

from jaxserve.core.config import KernelBackend, KVCacheDType, LoadFormat


class EngineOptions(TypedDict, total=False):
    """The options of an engine; see docs/options.md for what they mean."""

    tokenizer: str | Path | None
    skip_tokenizer_init: bool
    chat_template: str | Path | None
    served_model_name: str | None
    load_format: LoadFormat
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    seed: int
    precision: str
    layer_precision: str | None
    head_precision: str
    variants: tuple[str, ...]
    policy: str
    slo_ttft: float | None
    memory_gb: float | None
    max_model_len: int | None
    page_size: int
    kv_pages: int | None
    max_kv_pages: int | None
    kv_cache_dtype: KVCacheDType
    prefix_caching: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_queued_requests: int
    max_queued_tokens: int
    overlap: bool
    tp: int
    pp: int
    dp: int
    kernel_backend: KernelBackend
    compile_cache: str | Path | None
    warmup: bool
    fuse: bool | None
    step_log: str | Path | None
    max_logprobs: int
    max_n: int
    max_stop_strings: int
