"""Configurations: `ModelConfig` describes a checkpoint's model, and `EngineConfig` holds the options of an engine."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from jaxserve.core.block_names import layer_name
from jaxserve.core.degrees import Degrees
from jaxserve.core.keywords import explains_keywords
from jaxserve.core.options import JsonObject as JsonObject, Option
from jaxserve.core.other_values import VALUES
from jaxserve.core.plain_values import make_plain
from jaxserve.core.sampling_defaults import overrides
from jaxserve.core.vllm_options import ENGINE

DType = Literal["bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "int8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
KernelBackend = Literal["auto", "native", "pallas", "xla"]
"""Kernels that run operations: native (on CPU), pallas (on GPU), xla, or the fastest that are available ("auto").
XLA runs every operation that the chosen kernels do not support."""
MetricsPrefix = Literal["jaxserve", "vllm", "both"]
"""Names of metrics: all under `jaxserve_`; under `vllm:` where vLLM has them, and else under `jaxserve_`; or both."""
Microbatches = Literal["lookahead", "tokens"]
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
    """Mixture of experts: the sizes of its experts, the routing of tokens, and the layers that have one."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    layers: tuple[bool, ...]  # per decoder layer: sparse (True) or dense


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer, and how its blocks are split over devices and computed."""

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
    shards: int = 1  # parts that every block can be split into: each device holds one or several of them
    vocab_padding: int = 0  # zero rows after the vocabulary, so that it splits evenly over devices
    kernel_backend: KernelBackend = "auto"  # kernels that may run its operations

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
        """Return whether the feed-forward half of a layer is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]


@explains_keywords(ENGINE, "the engine")
@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Those that are None are chosen from the model and the machine when it is built."""

    # -- model
    model: Annotated[
        str | Path | None,
        Option(
            "Model",
            "Folder of the model in Hugging Face layout, or its name on the hub: ORG/NAME or ORG/NAME@REVISION.",
            default="the bundled model",
            hub=True,
        ),
    ] = None
    revision: Annotated[
        str | None,
        Option("Model", "Branch, tag or commit of a model on the hub.", default="main", in_terminal=True),
    ] = None
    download_dir: Annotated[
        str | Path | None,
        Option(
            "Model",
            "Folder in which models from the hub are kept.",
            default="HF_HUB_CACHE, or else the folder hub in HF_HOME",
            in_terminal=True,
        ),
    ] = None
    hf_token: str | None = field(default=None, repr=False)  # of the hub; None: HF_TOKEN, or of `hf auth login`
    tokenizer: Annotated[
        str | Path | None,
        Option(
            "Model",
            "Folder of the tokenizer, a tokenizer.json, or a name on the hub.",
            default="the model's",
            in_terminal=True,
            hub=True,
        ),
    ] = None
    skip_tokenizer_init: Annotated[
        bool, Option("Model", "Serve without a tokenizer; prompts must then be token ids.")
    ] = False
    chat_template: Annotated[
        str | Path | None,
        Option(
            "Model",
            "Chat template: a Jinja file, plain, vicuna, chatml, or the name of one of the model's own templates.",
            default="the model's",
            in_terminal=True,
            first=True,
        ),
    ] = None
    served_model_name: str | None = None  # for clients and metrics; None: the name on the hub, or of the folder
    load_format: Annotated[
        LoadFormat,
        Option(
            "Model", "Source of the weights; dummy: random weights, for which config.json is enough.", in_terminal=True
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Option(
            "Model",
            "Precision of weights, activations and KV cache; auto: the checkpoint's, bfloat16 where float16 is slow.",
            in_terminal=True,
            first=True,
        ),
    ] = "auto"
    seed: Annotated[int, Option("Model", "Random seed for requests that give none.")] = 0
    generation_config: Annotated[
        str | Path,
        Option(
            "Model",
            "Sampling parameters of requests that give none; auto: those of the model's generation_config.json; vllm: "
            "the fixed defaults of the API; a folder: those of its generation_config.json.",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        JsonObject | None,
        Option(
            "Model",
            "Sampling parameters in place of those of --generation-config: temperature, top_p, top_k, min_p, "
            "repetition_penalty, and max_new_tokens, which limits every answer.",
            default="none",
        ),
    ] = None
    precision: Annotated[
        str,
        Option(
            "Model",
            "Precision of the layers' weights: int8, int4 or int3; auto: the checkpoint's.",
            in_terminal=True,
            first=True,
        ),
    ] = "auto"
    layer_precision: Annotated[
        str | None,
        Option(
            "Model",
            "Precision by layer, such as 0-3:bf16,4-:int4; layers that are not named follow --precision.",
            default="none",
            in_terminal=True,
        ),
    ] = None
    head_precision: Annotated[
        str,
        Option(
            "Model",
            "Precision of the output head, and of a tied embedding; auto: int8 if --precision is quantised.",
            in_terminal=True,
        ),
    ] = "auto"
    # -- adaptation
    variants: Annotated[
        tuple[str, ...],
        Option(
            "Adaptation",
            "Extra precision to keep ready for changes while serving, besides those of the policy (repeatable).",
            flags=("--variant",),
        ),
    ] = ()
    policy: Annotated[
        str,
        Option(
            "Adaptation",
            "Policy that changes the plan: static, manual, morph, morph-int8, morph-performance (presets of the "
            "objectives and thresholds of morph), tp_transform (instances merge and split, up to --max-tp), "
            "param_drop (instances drop layers that they have in common and restore them, up to --max-pp), a YAML "
            "file or FILE.py:NAME; several with + in between decide together, as in tp_transform+morph.",
            first=True,
        ),
    ] = "static"
    slo_ttft: Annotated[
        float | None,
        Option(
            "Adaptation",
            "Target for the time to the first token in seconds, for the policy.",
            default="the policy's",
            above=0,
            first=True,
        ),
    ] = None
    slo_tpot: Annotated[
        float | None,
        Option(
            "Adaptation",
            "Target for the time per output token in seconds, for the policy.",
            default="the policy's: none",
            above=0,
            first=True,
        ),
    ] = None
    max_quality_loss: Annotated[
        float | None,
        Option(
            "Adaptation",
            "Floor of quality: largest rise of the cross-entropy that may be expected of a plan of the policy, as a "
            "share of full precision's, such as 0.01; inf: no floor.",
            default="the policy's: 0.05",
            minimum=0,
            endless=True,
        ),
    ] = None
    prepare: Annotated[
        bool,
        Option(
            "Adaptation",
            "While a server is idle, prepare layers in fewer bits and measure what they lose, once for a model, in a "
            "process of its own.",
        ),
    ] = True
    # -- memory and lengths
    memory_gb: Annotated[
        float | None,
        Option(
            "Memory",
            "Memory budget in GB, never exceeded. At most what the machine, or the device, has.",
            default="half of the free host memory on CPU, 90 % of what JAX may take of a device's elsewhere",
            above=0,
            in_terminal=True,
            first=True,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            "Memory",
            "Share of a GPU's memory that JAX may take, as in vLLM; on CPU use --memory-gb.",
            default="JAX's: 0.75",
            above=0,
            maximum=1,
            in_terminal=True,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "Memory",
            "Maximum tokens of prompt and answer together, such as 4096, 4k (4,000) or auto.",
            default="the model's, or as many as the memory holds",
            in_terminal=True,
            first=True,
        ),
    ] = None
    page_size: Annotated[int, Option("Memory", "Tokens per KV page.", minimum=1)] = 16
    kv_pages: Annotated[
        int | None, Option("Memory", "Number of KV pages.", default="as many as the budget holds", minimum=1)
    ] = None
    max_kv_pages: Annotated[
        int | None,
        Option(
            "Memory",
            "Number of KV pages that pools may grow to while serving.",
            default="with a policy, as many as smaller layers make room for",
            minimum=1,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Option(
            "Memory",
            "Precision of the KV cache: int8 takes about half the memory; auto: as --dtype.",
            in_terminal=True,
            first=True,
        ),
    ] = "auto"
    prefix_caching: Annotated[
        bool, Option("Memory", "Keep the KV pages of prompts, and share them with later prompts that begin alike.")
    ] = True
    # -- scheduling
    max_num_seqs: Annotated[
        int | None,
        Option(
            "Scheduling",
            "Maximum number of sequences that run at once.",
            default="32 on CPU, else 256",
            minimum=1,
            first=True,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "Scheduling",
            "Maximum tokens of one step: decoded tokens and prefill chunks.",
            default="max-num-seqs + 512 on CPU, max-num-seqs + 2048 elsewhere",
        ),
    ] = None
    max_queued_requests: Annotated[
        int, Option("Scheduling", "Maximum number of waiting requests; more are refused (HTTP 503).", minimum=1)
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        Option(
            "Scheduling",
            "Maximum number of waiting prompt tokens; requests beyond it are refused (HTTP 503).",
            minimum=1,
        ),
    ] = 1_000_000
    overlap: Annotated[bool, Option("Scheduling", "Prepare a step while the device computes the previous one.")] = True
    microbatches: Annotated[
        Microbatches,
        Option(
            "Scheduling",
            "What the steps that the stages of --pp compute at once have equally much of: lookahead: predicted time; "
            "tokens: tokens.",
        ),
    ] = "lookahead"
    microbatch_cost: Annotated[
        str | None,
        Option(
            "Scheduling",
            "a,b,g of the time that lookahead predicts for a chunk of c tokens after p tokens, in seconds: "
            "a (p c + c^2 + c) + b c + g.",
            default="from the step times that are measured for the policy, else from the model's sizes",
        ),
    ] = None
    # -- parallelism
    tp: Annotated[
        int,
        Option(
            "Parallelism", "Tensor parallelism: number of devices that share every layer.", in_terminal=True, first=True
        ),
    ] = 1
    pp: Annotated[
        int,
        Option(
            "Parallelism",
            "Pipeline parallelism: number of stages that the layers are divided into.",
            in_terminal=True,
            first=True,
        ),
    ] = 1
    dp: Annotated[int, Option("Parallelism", "Data parallelism: number of copies of the model.", first=True)] = 1
    max_tp: Annotated[
        int | None,
        Option(
            "Parallelism",
            "Largest degree of tensor parallelism that instances may be merged to while serving.",
            default="tp",
            minimum=1,
        ),
    ] = None
    max_pp: Annotated[
        int | None,
        Option(
            "Parallelism",
            "Most pipeline stages of a group: instances that drop layers which they have in common, for more KV pages.",
            default="pp; with the policy param_drop pp x dp, up to 8 instances",
            minimum=1,
        ),
    ] = None
    inject_fault: Annotated[
        str | None,
        Option(
            "Parallelism",
            "DEVICE:STEP: let a device fail at its step of this number, to try how its requests go on elsewhere.",
        ),
    ] = None
    virtual_devices: Annotated[
        int | None,
        Option(
            "Parallelism",
            "Number of virtual CPU devices, to try parallelism on one machine.",
            default="on CPU, as many as tp x pp x dp needs",
            minimum=1,
            in_terminal=True,
        ),
    ] = None
    # -- compilation
    kernel_backend: Annotated[
        KernelBackend,
        Option(
            "Compilation",
            "Kernels to use: native on CPU, pallas on GPU, or xla only; auto: the fastest available.",
            in_terminal=True,
        ),
    ] = "auto"
    compile_cache: Annotated[
        str | Path | None,
        Option(
            "Compilation",
            "Folder that caches compiled programs.",
            default="JAX_COMPILATION_CACHE_DIR, or else jaxserve/xla in the user's cache folder",
            first=True,
        ),
    ] = None
    warmup: Annotated[bool, Option("Compilation", "Compile all programs before serving.")] = True
    fuse: Annotated[
        bool | None,
        Option(
            "Compilation",
            "Run all layers of a step that only decodes as one program, which is compiled at warm-up.",
            default="yes, if all programs are compiled before serving",
        ),
    ] = None
    # -- records
    step_log: Annotated[
        str | Path | None,
        Option("Records", "File to record every step in, with its contents and duration.", default="none"),
    ] = None
    metrics_prefix: Annotated[
        MetricsPrefix,
        Option(
            "Records",
            "Names of the metrics; vllm: vLLM's names (vllm:...) for those that vLLM has, for its dashboards and "
            "autoscalers; both: these in addition.",
        ),
    ] = "jaxserve"
    otlp_endpoint: Annotated[
        str | None,
        Option(
            "Records",
            "URL of an OpenTelemetry collector that takes traces of requests over HTTP, such as "
            "http://127.0.0.1:4318; needs the extra otlp.",
            default="none",
        ),
    ] = None
    # -- limits on a single request
    max_logprobs: Annotated[int, Option("Limits", "Maximum number of log-probabilities per token.")] = 20
    max_n: Annotated[int, Option("Limits", "Maximum number of answers per prompt.")] = 64
    max_stop_strings: Annotated[int, Option("Limits", "Maximum number of stop strings per request.")] = 16

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) is None:  # as if it were not given
                object.__setattr__(self, option.name, option.default)
        make_plain(self)
        for name, convert in VALUES.items():
            if hasattr(self, name):
                object.__setattr__(self, name, convert(getattr(self, name)))
        if self.override_generation_config is not None:
            changes = overrides(self.override_generation_config)
            object.__setattr__(self, "override_generation_config", changes or None)

    @property
    def degrees(self) -> Degrees:
        """The degrees of tensor parallelism that instances may have."""
        return Degrees(self.tp, self.tp if self.max_tp is None else self.max_tp)
