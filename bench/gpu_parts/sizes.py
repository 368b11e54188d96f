"""The sizes of all cases: for a GPU of the H100's class, and tiny ones to check on a CPU that everything works."""

from dataclasses import dataclass

from bench.peers.checkpoints import Shape

GiB = 2**30
LARGEST = "gate_up"  # the largest weight of a layer


@dataclass(frozen=True)
class Model:
    """A Llama with random weights, and the sizes at which it is measured."""

    name: str
    shape: Shape
    written: bool  # whether a checkpoint is on disk; otherwise weights are made while the model is loaded
    kernel_rows: tuple[int, ...]  # of the products in bfloat16
    quantised_rows: tuple[int, ...]  # of the largest product, in bfloat16 and quantised
    layer_rows: tuple[int, ...]  # of all products of a layer in 4 bits
    decodes: tuple[tuple[int, int], ...]  # (rows, context) of the attention kernel
    batches: tuple[int, ...]
    requests: int  # of the throughput run
    repeats: int
    precisions: tuple[str, ...] = ()  # of the layers, besides bfloat16


@dataclass(frozen=True)
class Changing:
    """A server whose plan changes while streams decode."""

    num_layers: int  # of the model, fewer than it has elsewhere: each is rounded on the host to all precisions
    layers: tuple[int, ...]  # that change at once, the most of them last
    rounds: int  # to and fro
    streams: int
    prefill: int  # prompt tokens of a step, in addition to the decode rows
    max_len: int
    kv_pages: int
    max_kv_pages: int
    fuse: bool | None = False  # None: as a server does by default


@dataclass(frozen=True)
class Stepping:
    """The steps that `steps.py` measures."""

    num_layers: int
    seqs: int
    prompt: int  # tokens of the sequences that decode, and the most of a prompt that begins
    most_chunk: int  # prompt tokens of a step
    max_len: int
    kv_pages: int
    cases: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]  # by tier: (sequences that decode, prompt tokens)
    precisions: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """The logits that `samplers.py` draws tokens from."""

    vocab: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Multiplying:
    """Rows of the products of `products.py`."""

    rows: tuple[int, ...]  # of a layer's largest weight
    other_rows: tuple[int, ...]


@dataclass(frozen=True)
class Bursting:
    """The burst that `bursts.py` serves."""

    phases: tuple[tuple[float, float], ...]  # (seconds, requests per second)
    lengths: tuple[tuple[float, float, int], ...]  # (mean, sigma, most) of prompts and of answers
    kv_pages: tuple[int, ...]
    seqs: int
    prefill: int
    max_len: int


@dataclass(frozen=True)
class Threading:
    """The instances that `threads.py` steps."""

    shape: Shape
    counts: tuple[int, ...]  # of threads, the most last
    seqs: int
    max_len: int
    seconds: float  # of each measurement


@dataclass(frozen=True)
class Sizes:
    """All other sizes that differ between a real run and a tiny one."""

    models: tuple[Model, ...]
    copy_bytes: int  # size of the copied array
    matmul: int  # rows and columns of the square matrices
    rotate_bytes: int  # total size of the inputs that a kernel's calls use in turn, more than a cache holds
    min_round_s: float  # seconds of one round of a timing
    prefill_tokens: int  # of one sequence, for the attention kernel
    tile: int
    write_tokens: tuple[int, ...]
    experts: tuple[int, int, int]  # (number, intermediate size, hidden size)
    expert_rows: tuple[int, ...]
    step_tokens: int  # prompt tokens in one step
    decode_prompt: int  # tokens
    steps: int
    prefills: tuple[tuple[int, int], ...]  # (prompts, tokens of each)
    request_lens: tuple[int, int]  # range of the prompt tokens in the throughput run
    answer: int  # tokens of each answer in the throughput run
    max_len: int
    changing: Changing
    stepping: Stepping
    drawing: Drawing
    multiplying: Multiplying
    bursting: Bursting
    threading: Threading


REAL = Sizes(
    models=(
        Model(
            "1b",
            Shape(hidden=2048, layers=22, heads=32, kv_heads=4, intermediate=5632),
            written=True,
            kernel_rows=(32,),
            quantised_rows=(32,),
            layer_rows=(),
            decodes=((32, 1024),),
            batches=(1, 8, 32, 128),
            requests=256,
            repeats=3,
        ),
        Model(
            "8b",
            Shape(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocab=128256),
            written=False,
            kernel_rows=(1, 32, 128, 2048),
            quantised_rows=(1, 2, 4, 8, 16, 32, 128, 512, 2048),
            layer_rows=(1, 16),
            decodes=((64, 4096), (1, 1024), (32, 1024), (128, 512), (8, 8192)),
            batches=(1, 32, 128),
            requests=128,
            repeats=2,
            precisions=("int8", "int4"),
        ),
    ),
    copy_bytes=2 * GiB,
    matmul=8192,
    rotate_bytes=GiB // 4,
    min_round_s=0.05,
    prefill_tokens=2048,
    tile=64,
    write_tokens=(32, 2048),
    experts=(128, 768, 2048),
    expert_rows=(256, 16384),
    step_tokens=2048,
    decode_prompt=256,
    steps=64,
    prefills=((1, 512), (4, 512), (16, 512)),
    request_lens=(64, 512),
    answer=128,
    max_len=1024,
    changing=Changing(16, (1, 4, 16), 2, 16, 256, 1024, kv_pages=1100, max_kv_pages=3600),
    stepping=Stepping(
        num_layers=32,
        seqs=256,
        prompt=640,
        most_chunk=2048,
        max_len=1280,
        kv_pages=256 * 56,
        cases=(
            ("block", ((0, 2048), (256, 0), (64, 0), (64, 2048), (1, 0))),
            ("fused", ((256, 0), (64, 0))),
        ),
        precisions=("int4", "int8"),
    ),
    drawing=Drawing(128256, rows=(8, 64, 256)),
    multiplying=Multiplying(rows=(8, 16, 32, 64, 128, 256, 512), other_rows=(8, 64, 128)),
    # 3,340 pages are half of the layers of the 8B.
    bursting=Bursting(
        phases=((10, 8), (14, 24), (21, 8)),
        lengths=((642, 0.6, 3000), (262, 0.5, 1000)),
        kv_pages=(2500, 5840),
        seqs=256,
        prefill=2048,
        max_len=4096,
    ),
    threading=Threading(
        Shape(hidden=1024, layers=8, heads=16, kv_heads=8, intermediate=2816),
        counts=(1, 2, 4, 8),
        seqs=16,
        max_len=4096,
        seconds=2.0,
    ),
)

_TINY_SHAPE = {"heads": 4, "kv_heads": 2, "intermediate": 96}
_TINY_WORK = {"decodes": ((2, 64),), "requests": 4, "repeats": 1}
TINY = Sizes(
    models=(
        Model(
            "1b",
            Shape(64, layers=2, **_TINY_SHAPE),
            written=True,
            kernel_rows=(1, 8),
            quantised_rows=(1, 8),
            layer_rows=(),
            batches=(1, 2),
            **_TINY_WORK,
        ),
        Model(
            "8b",
            Shape(64, layers=3, **_TINY_SHAPE),
            written=False,
            kernel_rows=(8,),
            quantised_rows=(1, 8),
            layer_rows=(1,),
            batches=(2,),
            precisions=("int8", "int4"),
            **_TINY_WORK,
        ),
    ),
    copy_bytes=2**20,
    matmul=128,
    rotate_bytes=2**18,
    min_round_s=0.002,
    prefill_tokens=64,
    tile=32,
    write_tokens=(4,),
    experts=(4, 32, 64),
    expert_rows=(8,),
    step_tokens=64,
    decode_prompt=16,
    steps=8,
    prefills=((2, 32),),
    request_lens=(8, 24),
    answer=8,
    max_len=128,
    changing=Changing(3, (1, 2), 1, 2, 64, 512, kv_pages=80, max_kv_pages=100),
    stepping=Stepping(
        num_layers=2,
        seqs=4,
        prompt=16,
        most_chunk=64,
        max_len=128,
        kv_pages=40,
        cases=(("block", ((2, 0), (1, 24), (0, 32))), ("fused", ((2, 0),))),
        precisions=("int4",),
    ),
    drawing=Drawing(4096, rows=(8,)),
    multiplying=Multiplying(rows=(8,), other_rows=(4,)),
    bursting=Bursting(
        phases=((0.2, 10), (0.3, 30)),
        lengths=((24, 0.3, 48), (8, 0.3, 16)),
        kv_pages=(12, 40),
        seqs=4,
        prefill=64,
        max_len=128,
    ),
    threading=Threading(Shape(64, layers=2, **_TINY_SHAPE), counts=(1, 2), seqs=2, max_len=1024, seconds=0.1),
)
