"""Configurations: `ModelConfig` describes a checkpoint's model, `EngineConfig` holds the options of an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxserve.core.block_names import layer_name
from jaxserve.core.options import Option

DType = Literal["bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "int8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
KernelBackend = Literal["auto", "native", "pallas", "xla"]
"""Kernels that run operations: native on CPU, Pallas on GPU, XLA alone, or the fastest available.

XLA also runs every operation that the chosen kernels do not support."""
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its long-context variants (names as in Hugging Face `rope_scaling`)."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: its experts, how tokens are routed to them, and which layers are sparse."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    layers: tuple[bool, ...]  # per decoder layer: sparse (True) or dense (False)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer: all that its modules need to know."""

    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: sliding window in tokens, None: full attention
    moe: MoEConfig | None = None
    dtype: DType = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    shards: int = 1  # devices that every block is split over
    vocab_padding: int = 0  # zero rows after the vocabulary, so that it splits evenly over devices
    kernel_backend: KernelBackend = "auto"

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding and of the head, padding included."""
        return self.vocab_size + self.vocab_padding

    @property
    def block_ids(self) -> tuple[str, ...]:
        """Names of all blocks in the order in which they run."""
        return ("embed", *(layer_name(layer) for layer in range(self.num_layers)), "head")

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None for full attention."""
        return self.windows[layer] if self.windows else None

    def is_sparse(self, layer: int) -> bool:
        """Return whether the feed-forward part of a layer is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. None means: chosen from the model and the machine when the engine is built."""

    # -- model
    model: Annotated[
        str | Path | None, Option("Model", "Folder in Hugging Face layout.", default="the bundled model")
    ] = None
    tokenizer: Annotated[
        str | Path | None,
        Option("Model", "Folder or tokenizer.json.", default="the model's", in_terminal=True),
    ] = None
    skip_tokenizer_init: Annotated[
        bool, Option("Model", "Serve a model without a tokenizer: prompts are token ids.")
    ] = False
    chat_template: Annotated[
        str | Path | None,
        Option(
            "Model",
            "Chat template: a file, plain, vicuna, chatml, or a name that the model gives to one of its own.",
            default="the model's",
            in_terminal=True,
        ),
    ] = None
    served_model_name: str | None = None  # name for clients and metrics; None: the folder's name
    load_format: Annotated[
        LoadFormat,
        Option("Model", "Where weights come from; dummy: random weights from config.json alone.", in_terminal=True),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Option(
            "Model",
            "Precision of weights, activations and KV cache; auto: the checkpoint's, bfloat16 where float16 is slow.",
            in_terminal=True,
        ),
    ] = "auto"
    seed: Annotated[int, Option("Model", "Seed for requests without one.")] = 0
    precision: Annotated[
        str,
        Option("Model", "Weights of the layers: int8, int4 or int3; auto: the checkpoint's.", in_terminal=True),
    ] = "auto"
    layer_precision: Annotated[
        str | None,
        Option("Model", "Layers whose precision differs, as 0-3:bf16,4-:int4.", default="none", in_terminal=True),
    ] = None
    head_precision: Annotated[
        str,
        Option(
            "Model",
            "Precision of the output head, and of the embedding if they are tied; auto: int8 with --precision.",
            in_terminal=True,
        ),
    ] = "auto"
    # -- adaptation
    variants: Annotated[
        tuple[str, ...],
        Option(
            "Adaptation",
            "Precision that layers may change to while serving, in addition to the policy's; may be repeated.",
            flags=("--variant",),
        ),
    ] = ()
    policy: Annotated[
        str,
        Option(
            "Adaptation",
            "Policy that changes the plan: static, manual, morph, morph-int8, morph-performance, or a YAML file.",
        ),
    ] = "static"
    slo_ttft: Annotated[
        float | None,
        Option(
            "Adaptation",
            "Objective of the policy for the time to the first token, in seconds.",
            default="the policy's",
            above=0,
        ),
    ] = None
    # -- memory and lengths
    memory_gb: Annotated[
        float | None,
        Option(
            "Memory",
            "Budget in GB, never exceeded.",
            default="half of the free host memory on CPU, 90 % of the device's memory elsewhere",
            above=0,
            in_terminal=True,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option("Memory", "Tokens of prompt and answer together.", default="the model's", in_terminal=True),
    ] = None
    page_size: Annotated[int, Option("Memory", "Tokens of a KV page.", minimum=1)] = 16
    kv_pages: Annotated[int | None, Option("Memory", "KV pages.", default="what the budget holds", minimum=1)] = None
    max_kv_pages: Annotated[
        int | None,
        Option(
            "Memory",
            "KV pages that pools may grow to while serving.",
            default="with a policy, what smaller layers make room for",
            minimum=1,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Option("Memory", "KV cache: int8 takes half the memory; auto: as dtype.", in_terminal=True),
    ] = "auto"
    prefix_caching: Annotated[bool, Option("Memory", "Reuse the KV pages of earlier prompts that begin alike.")] = True
    # -- scheduling
    max_num_seqs: Annotated[
        int | None, Option("Scheduling", "Sequences that run at once.", default="32 on CPU, else 256", minimum=1)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "Scheduling",
            "Tokens of one step: decodes and prefill chunks.",
            default="max-num-seqs and 512 on CPU, 2048 elsewhere",
        ),
    ] = None
    max_queued_requests: Annotated[int, Option("Scheduling", "Waiting requests; beyond: 503.", minimum=1)] = 1024
    max_queued_tokens: Annotated[int, Option("Scheduling", "Waiting prompt tokens; beyond: 503.", minimum=1)] = (
        1_000_000
    )
    overlap: Annotated[bool, Option("Scheduling", "Prepare a step while the device computes the one before.")] = True
    # -- parallelism
    tp: Annotated[
        int, Option("Parallelism", "Tensor parallelism: devices that share every layer.", in_terminal=True)
    ] = 1
    pp: Annotated[int, Option("Parallelism", "Pipeline parallelism: stages of layers.", in_terminal=True)] = 1
    dp: Annotated[int, Option("Parallelism", "Data parallelism: copies of the model.")] = 1
    # -- compilation
    kernel_backend: Annotated[
        KernelBackend,
        Option(
            "Compilation", "Kernels: native on CPU, pallas on GPU, or xla alone; auto: the fastest.", in_terminal=True
        ),
    ] = "auto"
    compile_cache: Annotated[
        str | Path | None,
        Option(
            "Compilation",
            "Folder of compiled programs.",
            default="JAX_COMPILATION_CACHE_DIR, else jaxserve/xla in the user's cache",
        ),
    ] = None
    warmup: Annotated[bool, Option("Compilation", "Compile everything before serving.")] = True
    fuse: Annotated[
        bool | None,
        Option(
            "Compilation",
            "Run all layers of a step as one program.",
            default="compiled in the background, on CPU at warm-up",
        ),
    ] = None
    # -- records
    step_log: Annotated[
        str | Path | None,
        Option("Records", "File to which the work and the duration of every step are written.", default="none"),
    ] = None
    # -- limits on a single request
    max_logprobs: Annotated[int, Option("Limits", "Alternatives per token.")] = 20
    max_n: Annotated[int, Option("Limits", "Answers per prompt.")] = 64
    max_stop_strings: Annotated[int, Option("Limits", "Stop strings per request.")] = 16
