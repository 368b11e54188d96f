"""Configurations, frozen and JAX-free: `ModelConfig` is read from a checkpoint, `EngineConfig` is what a user asks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DType = Literal["bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "int8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
KernelBackend = Literal["auto", "native", "pallas", "xla"]
"""What runs an operation: native kernels (on CPU), Pallas kernels (on GPU), XLA alone, or the best of what is there.
Whatever is chosen, XLA does what a kernel does not take."""
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
    """Mixture of experts: which layers have one and how tokens are routed."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    layers: tuple[bool, ...]  # per decoder layer: sparse (True) or dense


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a decoder-only transformer that its modules need; one per checkpoint."""

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
    windows: tuple[int | None, ...] = ()  # per layer: sliding window in tokens, None = full attention
    moe: MoEConfig | None = None
    dtype: DType = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    shards: int = 1  # devices that every block is split over
    vocab_padding: int = 0  # zero rows after the vocabulary, so that it splits evenly over devices
    kernel_backend: KernelBackend = "auto"  # what may run its operations

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return self.vocab_size + self.vocab_padding

    @property
    def block_ids(self) -> tuple[str, ...]:
        """The chain of blocks in the order in which they run."""
        return ("embed", *(f"layers.{layer}" for layer in range(self.num_layers)), "head")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, or None for full attention."""
        return self.windows[layer] if self.windows else None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's feed-forward half is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set for one engine. None means: resolved from the model and the machine by `factory`."""

    model: str | Path | None = None  # None: the bundled model
    tokenizer: str | Path | None = None
    skip_tokenizer_init: bool = False  # serve without a tokenizer: prompts are token ids
    chat_template: str | None = None  # a file, a built-in name or one of the model's; None: the model's default
    served_model_name: str | None = None  # for clients and metrics; None: the folder's
    load_format: LoadFormat = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    seed: int = 0
    # precision of the decoder layers' weights
    precision: str = "auto"  # "auto": the checkpoint's; or "int8", "int4", "int3"
    layer_precision: str | None = None  # where it differs: "0-3:bf16,4-:int4"
    head_precision: str = "auto"  # of the output head, and of the embedding if they are tied
    variants: tuple[str, ...] = ()  # precisions that layers may change to while serving
    # adaptation
    policy: str = "static"  # a name, or a YAML file: what changes the plan while serving
    slo_ttft: float | None = None  # seconds to the first token that the policy is to keep; None: the policy's
    # memory and lengths
    memory_gb: float | None = None
    max_model_len: int | None = None
    page_size: int = 16  # tokens
    kv_pages: int | None = None
    max_kv_pages: int | None = None  # that they may grow to while serving; None: they do not grow
    kv_cache_dtype: KVCacheDType = "auto"  # "auto": the activations'
    # scheduling
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None  # tokens of one step: decodes plus prefill chunks
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    prefix_caching: bool = True
    overlap: bool = True  # begin step n+1 before the tokens of step n are fetched
    # parallelism
    tp: int = 1
    pp: int = 1
    dp: int = 1
    # compilation
    kernel_backend: KernelBackend = "auto"
    compile_cache: str | Path | None = None  # None: jaxserve/xla in the user's cache directory
    warmup: bool = True
    fuse: bool | None = None  # all layers of a step as one program; None: in the background, on CPU at warm-up
    # records
    step_log: str | Path | None = None  # a file for what each step was and took; None: none is written
    # limits on a single request
    max_logprobs: int = 20
    max_n: int = 64
    max_stop_strings: int = 16
