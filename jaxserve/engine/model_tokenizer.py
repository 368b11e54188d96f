"""The tokenizer of a model: which files it comes from, and what is checked and reported about it at the start."""

import logging
from pathlib import Path

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.engine.tokenizer_files import has_vocabulary, missing_vocabulary

log = logging.getLogger(__name__)


def check_serves_text(config: EngineConfig) -> None:
    """Raise `CheckpointError` if the model has no tokenizer and `skip_tokenizer_init` is not set.

    Models with random weights (`load_format` "dummy") need no tokenizer.
    """
    if config.model is None or config.tokenizer is not None or config.skip_tokenizer_init:
        return
    folder = Path(config.model)
    if config.load_format != "dummy" and (folder / "config.json").is_file() and not has_vocabulary(folder):
        raise CheckpointError(
            f"{missing_vocabulary(folder)}. Give another folder or file with --tokenizer, or serve only prompts of"
            " token ids with --skip-tokenizer-init"
        )


def load_tokenizer(config: EngineConfig, folder: Path, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of the model in `folder`, or None if it has none, so that prompts must be token ids.

    `vocab_size` is the model's: a larger tokenizer is reported with a warning.
    """
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None and not has_vocabulary(folder):
        log.warning("%s: prompts must be token ids", missing_vocabulary(folder))
        return None
    source = folder if config.tokenizer is None else config.tokenizer
    tokenizer = Tokenizer.load(source, config.chat_template)
    if tokenizer.builtin_template is not None and config.chat_template is None:
        log.warning(
            "%s has no chat template: conversations are written in the built-in format %r (--chat-template)",
            source,
            tokenizer.builtin_template,
        )
    if tokenizer.vocab_size > vocab_size:
        log.warning(
            "the tokenizer in %s has %d tokens and the model %d: a prompt with a token beyond the model's is refused",
            source,
            tokenizer.vocab_size,
            vocab_size,
        )
    return tokenizer
