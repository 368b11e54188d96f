"""jaxserve on one model: through its library as a user calls it, and through the executor alone.

The executor alone repeats one step and waits once at the end. This gives the device's own time, or the time of the
dispatch where that is longer. The executor is measured without the fused tier first and then with it, as time allows,
because fusing a step's shape can take a minute. Cases with targets (`targets.py`) therefore run before all others, in
both tiers. The library is measured in the tier that serves.

For lower precisions the layers are replaced by random ones, made on the device: rounding 8B weights on the host would
take longer than everything else.

The library has no public access to the executor, and no public way to replace layers by random ones. This module
therefore uses private attributes: `LLM._engine` and `BlockExecutor._builder`.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from bench.gpu_parts import Row, costs, measure
from bench.gpu_parts.sizes import Model, Sizes
from bench.peers.workload import VOCAB, Prompts
from jaxserve import LLM, SamplingParams
from jaxserve.checkpoint.loader import DUMMY_STDDEV
from jaxserve.compilation.cache import CompileCounter
from jaxserve.core.request import Request
from jaxserve.core.step_shapes import StepShape
from jaxserve.core.work import Work
from jaxserve.engine.loop import StepLoop
from jaxserve.executor.block_store import Reference
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.fused import FusedTier, StageKey
from jaxserve.models import abstract_block
from jaxserve.quantization import QArray

REPEATS = 50  # of a step
TIERS = ("block", "fused")
SERVING_TIER = "block"  # by default on GPU
PAGE = 16  # tokens


class Jaxserve:
    """A loaded model whose fused tier can be switched on."""

    def __init__(
        self,
        path: Path,
        model: Model,
        sizes: Sizes,
        *,
        seqs: int | None = None,
        step_tokens: int | None = None,
        max_len: int | None = None,
        kv_pages: int | None = None,
    ):
        """Load a model for `seqs` sequences of `max_len` tokens, and `step_tokens` prompt tokens of a step.

        By default these are the model's and the sizes' own, and `kv_pages` hold all sequences at their longest.
        """
        seqs = seqs or max(model.batches)
        max_len = max_len or sizes.max_len
        self.llm = LLM(
            path,
            load_format="auto" if model.written else "dummy",
            dtype="bfloat16",
            max_model_len=max_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + (step_tokens or sizes.step_tokens),
            page_size=PAGE,
            # Fewer pages than memory allows, which leaves room for the layers in lower precisions.
            kv_pages=kv_pages or seqs * -(-max_len // PAGE),
            warmup=False,  # compile only the shapes that are measured
            fuse=False,
        )
        self.rng = np.random.default_rng(1)  # all prompts are fresh, so that the prefix cache cannot help
        self.compilations = CompileCounter()
        (self.loop,) = self.llm._engine.loops.values()
        assert isinstance(self.loop.executor, BlockExecutor)
        self.executor = self.loop.executor
        self.fused = FusedTier(self.compilations)

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def use(self, tier: str) -> None:
        """Switch to a tier. In "fused", the steps for which `fuse` was called are fused."""
        self.executor.fuse(self.fused if tier == "fused" else None)

    def fuse(self, work: Work) -> None:
        """Compile this step for the tier in use, with the present layers."""
        executor = self.executor
        if not executor.fuses:
            return
        shape = executor.buckets.of(work)
        for key, stage in zip(self.stage_keys(shape), executor._stages, strict=True):
            program, arguments = executor._outline(stage, shape)
            self.fused.compile(key, program, *arguments)
        self.fused.wait()

    def stage_keys(self, shape: StepShape) -> list[StageKey]:
        """Return the keys of a step's fused executables with the present layers."""
        stages, segments = self.executor._stages, self.executor.pools.segments
        return [StageKey(index, shape, stage.executables, segments) for index, stage in enumerate(stages)]

    @contextlib.contextmanager
    def layers_in(self, precision: str) -> Iterator[None]:
        """Replace all layers by random ones in a precision inside, and restore them at the end."""
        layers = [loaded for loaded in self.executor.blocks if loaded.block.startswith("layers.")]
        made = [self.parameters_in(precision, layer, jax.random.key(index)) for index, layer in enumerate(layers)]
        build = self.executor._builder.build
        self.executor.replace(
            [
                build(layer.block, precision, layer.placement, Reference(parameters))
                for layer, parameters in zip(layers, made, strict=True)
            ]
        )
        try:
            yield
        finally:
            self.executor.replace(layers)

    def parameters_in(self, precision: str, layer: LoadedBlock, key: jax.Array) -> dict[str, jax.Array | QArray]:
        """Return a layer's parameters with random quantised weights, on the device; the others are shared with it."""
        config = self.executor._builder.config
        _, whole = abstract_block(config, layer.block, layer.precision)
        parameters: dict[str, jax.Array | QArray] = dict(zip(whole, layer.leaves, strict=True))
        for name, variable in abstract_block(config, layer.block, precision)[1].items():
            template = variable.get_value()
            if isinstance(template, QArray):
                key, one = jax.random.split(key)
                weight = random_weight(one, template)
                parameters[name] = jax.device_put(weight, layer.placement.sharding(variable.axes))
        return parameters

    @property
    def layer_bytes(self) -> int:
        """The size of all layers' current weights."""
        return sum(loaded.nbytes for loaded in self.executor.blocks if loaded.block.startswith("layers."))


@jax.jit
def random_weight(key: jax.Array, template: QArray) -> QArray:
    """Return a weight with equally likely codes, and scales that make it about as large as a dummy's weight."""
    codes = jax.random.bits(key, template.codes.shape, template.codes.dtype)
    scales = jax.numpy.full(template.scales.shape, DUMMY_STDDEV / 2 ** (template.bits - 1), template.scales.dtype)
    return QArray(codes, scales, None, template.bits, template.size)


def rows(path: Path, model: Model, sizes: Sizes) -> Iterator[Row]:
    """Yield the loading time, then every case in both tiers, those with targets first."""
    start = time.perf_counter()
    engine = Jaxserve(path, model, sizes)
    yield {"case": "load", "model": model.name, "seconds": time.perf_counter() - start}
    first, *others = model.batches
    for tier in TIERS:
        engine.use(tier)
        labels = {"model": model.name, "through": "executor", "tier": tier}
        yield from decode_rows(engine, model, sizes, labels, [first])
        for precision in model.precisions:
            with engine.layers_in(precision):
                yield from decode_rows(engine, model, sizes, {**labels, "precision": precision}, [first])
        yield prefill_row(engine, model, sizes, labels)
    for tier in TIERS:
        engine.use(tier)
        labels = {"model": model.name, "tier": tier}
        if tier == SERVING_TIER:
            yield from measure.rows(engine, model, sizes, engine.rng, {**labels, "through": "LLM"})
        yield from decode_rows(engine, model, sizes, {**labels, "through": "executor"}, others)
    for tier, count in engine.compilations.counts.items():
        yield {"case": f"executables compiled, {tier} tier", "model": model.name, "count": count}
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak:
        yield {"case": "peak memory", "model": model.name, "gigabytes": peak / 1e9}


def decode_rows(
    engine: Jaxserve, model: Model, sizes: Sizes, labels: dict[str, str], batches: Sequence[int]
) -> Iterator[Row]:
    """Yield a decode step for each batch size."""
    context = sizes.decode_prompt + 1
    for batch in batches:
        seconds, _ = repeated_step(engine, batch, sizes.decode_prompt, sizes.max_len, decode=True)
        cost = costs.decode(model, batch, context, engine.layer_bytes).fields
        case = ", ".join([f"decode, batch {batch}", *([f"layers in {p}"] if (p := labels.get("precision")) else [])])
        yield {"case": case, **labels, "seconds": seconds, "tok_s": batch / seconds, **cost}


def prefill_row(engine: Jaxserve, model: Model, sizes: Sizes, labels: dict[str, str]) -> Row:
    """Return the largest prefill step."""
    count, length = max(sizes.prefills)
    seconds, tokens = repeated_step(engine, count, length, sizes.max_len, decode=False)
    whole = tokens // length  # sequences whose whole prompt is in the step
    cost = costs.prefill(model, max(whole, 1), min(tokens, length)).fields
    return {"case": f"prefill step, {tokens} tokens", **labels, "seconds": seconds, "tok_s": tokens / seconds, **cost}


def repeated_step(engine: Jaxserve, batch: int, length: int, max_len: int, *, decode: bool) -> tuple[float, int]:
    """Return seconds and tokens of the first step that only prefills, or that decodes the whole batch."""
    loop = engine.loop
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_len - length, detokenize=False)
    ids = [f"step-{number}" for number in range(batch)]
    for request_id in ids:
        prompt = tuple(engine.rng.integers(2, VOCAB, length).tolist())
        loop.core.add(Request(request_id, prompt, params, arrival=loop.clock.now()))
    try:
        work = loop.core.schedule(loop.clock.now())
        while decode and (work.chunks or len(work.decodes) < batch):
            finish(loop, work)
            work = loop.core.schedule(loop.clock.now())
        seconds = repeated(engine, work)
        finish(loop, work)
    finally:
        for request_id in ids:
            loop.core.abort(request_id, now=loop.clock.now())
    return seconds, work.num_tokens


def repeated(engine: Jaxserve, work: Work) -> float:
    """Return the seconds per execution of a step that is repeated, writing equal values to equal places."""
    engine.fuse(work)
    engine.executor.execute(work).fetch()
    start = time.perf_counter()
    for _ in range(REPEATS):
        pending = engine.executor.execute(work)
    pending.fetch()
    return (time.perf_counter() - start) / REPEATS


def finish(loop: StepLoop, work: Work) -> None:
    """Execute a step and take in its tokens."""
    loop.core.update(work, loop.executor.execute(work).fetch(), loop.clock.now())
