"""Contradictions between a checkpoint's configuration and its tensors: settled, with one warning each."""

import logging
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from jaxserve.checkpoint.imported import WEIGHT, ImportedStore
from jaxserve.checkpoint.safetensors import EMBEDDING, HEAD, SafetensorsStore
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError

log = logging.getLogger(__name__)

COMPARED_ROWS = 64  # rows of the head and the embedding
NOT_PARAMETERS = ("inv_freq", "masked_bias", "cos_cached", "sin_cached")


def reconcile_head(
    config: ModelConfig, store: SafetensorsStore | ImportedStore, *, headless: bool = False
) -> ModelConfig:
    """Return the configuration with `tie_embeddings` corrected for the head that the checkpoint has.

    As in Transformers, a head that differs from the embedding is used even if config.json ties them, and a tied
    embedding may be stored under the head's name, which is then shared in `store`. `headless`: the architecture has no
    head, so that the model only serves embeddings. Raise `CheckpointError` if the head is missing.
    """
    files = store.files if isinstance(store, ImportedStore) else store
    if config.tie_embeddings and EMBEDDING not in files and HEAD in files:
        files.share(EMBEDDING, HEAD)
    store.stored(EMBEDDING, (config.vocab_size, config.hidden_size))  # a fault of the embedding is reported first
    rows = files.rows(EMBEDDING)
    if rows > config.vocab_size:
        log.warning(
            "%s has %d rows, vocab_size in config.json is %d: the remaining rows are not used",
            files.where(EMBEDDING),
            rows,
            config.vocab_size,
        )
    if HEAD in store:
        if config.tie_embeddings and not _is_embedding(config, store):
            log.warning(
                "%s: %s differs from the embedding, although config.json says tie_word_embeddings: they are not tied",
                files.source,
                HEAD,
            )
            return replace(config, tie_embeddings=False)
        return config
    if headless and not config.tie_embeddings:
        log.warning("%s: the model has no output head: it can only serve embeddings", files.source)
        return replace(config, tie_embeddings=True)
    if not config.tie_embeddings:
        raise CheckpointError(
            f"{files.source}: tensor {HEAD} is missing; if the head is the embedding, config.json must say"
            ' "tie_word_embeddings": true'
        )
    return config


def warn_of_unused(config: ModelConfig, store: SafetensorsStore | ImportedStore, used: Collection[str]) -> None:
    """Log the tensors that the model does not use, such as unexpected biases and layers after the last one."""
    files = store.files if isinstance(store, ImportedStore) else store
    quantized = (
        {name.removesuffix(WEIGHT) for name in used if store.is_quantized(name)}
        if isinstance(store, ImportedStore)
        else set()
    )
    names: list[str] = []
    for name in sorted(files.files.keys() - set(used)):
        owner, _, kind = name.rpartition(".")
        if kind in NOT_PARAMETERS or (owner in quantized and kind != "bias"):
            continue
        if (config.tie_embeddings and name == HEAD) or (kind == "bias" and files.is_zero(name)):
            continue
        names.append(name)
    if not names:
        return
    kinds = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    log.warning(
        "%s: %d tensors are not part of %s as config.json describes it, and are ignored: %s%s",
        files.source,
        len(names),
        config.architecture,
        ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.most_common(8)),
        ", ..." if len(kinds) > 8 else "",
    )


def _is_embedding(config: ModelConfig, store: SafetensorsStore | ImportedStore) -> bool:
    """Return whether the head equals the embedding in `COMPARED_ROWS` evenly spaced rows."""
    if isinstance(store, ImportedStore) and store.is_quantized(HEAD):
        return False
    shape = (config.vocab_size, config.hidden_size)
    rows = np.linspace(0, shape[0] - 1, min(shape[0], COMPARED_ROWS)).astype(int)
    files = store.files if isinstance(store, ImportedStore) else store
    head, embedding = (files.find(name, shape).rows(rows.tolist()).astype(np.float32) for name in (HEAD, EMBEDDING))
    return np.array_equal(head, embedding, equal_nan=True)
