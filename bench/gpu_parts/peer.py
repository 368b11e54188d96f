"""Transformers' continuous batching on the same models, with its scheduler always running, as in a server."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu_parts import Row, measure
from bench.gpu_parts.sizes import Model, Sizes
from bench.peers.workload import Prompts

# Names that releases have for attention without further packages. The first that works is measured. Plain "sdpa" comes
# after "paged|sdpa", because some releases take it as a request for faster kernels, which they would have to download.
ATTENTION = ("paged|sdpa", "sdpa", "paged|eager")
STOP_TIMEOUT_S = 5.0


class ContinuousBatching:
    """A model in bfloat16 and the manager of its requests. It is a context manager."""

    def __init__(self, path: Path, model: Model, sizes: Sizes, device: str):
        """Raise RuntimeError, naming every attention that was tried, if none works."""
        self._model = load(path, model, device)
        self._manager: Any = None
        failures = []
        for attention in ATTENTION:
            try:
                self._start(attention, model, sizes)
                measure.timed(self, [[2] * 8, [3] * 8], 4)
            except Exception as error:
                failures.append(f"{attention}: {type(error).__name__}: {error}"[:300])
                self.close()
            else:
                self.attention = attention
                return
        raise RuntimeError("; ".join(failures))

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        ids = self._manager.add_requests(prompts, max_new_tokens=max_tokens)
        finished: dict[str, list[int]] = {}
        while len(finished) < len(ids):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the generation thread has ended")
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                finished[result.request_id] = list(result.generated_tokens)
        return [finished[request_id] for request_id in ids]

    def close(self) -> None:
        """End the generation thread."""
        if self._manager is not None and self._manager.is_running():
            self._manager.stop(block=True, timeout=STOP_TIMEOUT_S)

    def __enter__(self) -> "ContinuousBatching":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, attention: str, model: Model, sizes: Sizes) -> None:
        import torch
        from transformers import GenerationConfig

        self._manager = None
        self._model.set_attn_implementation(attention)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        with torch.no_grad():
            self._manager = self._model.init_continuous_batching(
                generation_config=generation, continuous_batching_config=batching(model, sizes)
            )
            self._manager.warmup()
        self._manager.start()


def load(path: Path, model: Model, device: str) -> Any:
    """Return the checkpoint, or random weights made on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.written:
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    else:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return loaded.to(device=device, dtype=torch.bfloat16).eval()


def batching(model: Model, sizes: Sizes) -> Any:
    """Return a configuration for as many simultaneous requests as jaxserve runs, with KV cache for all of them.

    It does not search for other kernels.
    """
    from transformers import ContinuousBatchingConfig

    fields = {field.name: field.default for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = fields.get("page_size") or fields.get("block_size") or 256
    at_once = max(model.batches)
    chosen = {
        "num_blocks": at_once * (-(-sizes.max_len // page) + 1),
        "max_requests_per_batch": at_once,
        "max_batch_tokens": sizes.step_tokens + at_once,
        "allow_block_sharing": False,  # no prompt is repeated
        "auto_switch_to_flash": False,
    }
    return ContinuousBatchingConfig(**{name: value for name, value in chosen.items() if name in fields})


def rows(path: Path, model: Model, sizes: Sizes, device: str) -> Iterator[Row]:
    """Yield loading with its warm-up, then every case."""
    import torch
    import transformers

    start = time.perf_counter()
    with ContinuousBatching(path, model, sizes, device) as engine:
        yield {
            "case": "load",
            "model": model.name,
            "seconds": time.perf_counter() - start,
            "attention": engine.attention,
            "packages": f"transformers {transformers.__version__}, torch {torch.__version__}",
        }
        labels = {"model": model.name, "through": "transformers"}
        yield from measure.rows(engine, model, sizes, np.random.default_rng(1), labels)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 1e9
        yield {"case": "peak memory", "model": model.name, "gigabytes": peak}
