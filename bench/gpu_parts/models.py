"""The models on disk: a whole checkpoint, or its configuration alone."""

import json
from pathlib import Path

from bench.gpu_parts.sizes import Model
from bench.peers.checkpoints import ensure_checkpoint, hf_config, write_tokenizer


def ensure_model(model: Model, cache: Path) -> Path:
    """The folder of a model under `cache`; written if it is not there yet, or was for other sizes."""
    name = f"{model.name}-{model.shape.hidden}x{model.shape.layers}"
    if model.written:
        return ensure_checkpoint(name, cache, model.shape)
    path = cache / f"llama-{name}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(model.shape)))
    write_tokenizer(path, model.shape.vocab)
    return path
