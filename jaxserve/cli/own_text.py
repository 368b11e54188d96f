"""The engine in which a model writes its own calibration text for a command."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.console.progress import Begin

if TYPE_CHECKING:
    from jaxserve.calibration.own_text import Sampler, Start

MAX_SEQUENCES = 64  # that are written at once


def sampler(model: Path, begin: Begin) -> "Sampler":
    """Return a function that opens an engine, lets the model continue each beginning, and closes the engine."""
    from jaxserve.build import build_engine
    from jaxserve.core.config import EngineConfig
    from jaxserve.engine.client import TokensPrompt

    def sample(starts: Sequence["Start"]) -> list[list[int]]:
        done = begin("writing calibration text", sum(start.params.max_tokens or 0 for start in starts))
        length = max(len(start.tokens) + (start.params.max_tokens or 0) for start in starts)
        sequences = min(len(starts), MAX_SEQUENCES)
        config = EngineConfig(
            model=model, max_num_seqs=sequences, max_model_len=length, prefix_caching=False, warmup=False
        )
        engine = build_engine(config)
        try:
            written: dict[str, list[int]] = {
                engine.add(TokensPrompt(start.tokens), start.params): [] for start in starts
            }
            while not engine.idle:
                for output in engine.step():
                    tokens = output.outputs[0].token_ids
                    written[output.request_id].extend(tokens)
                    done(len(tokens))
        finally:
            engine.close()
        return list(written.values())

    return sample
