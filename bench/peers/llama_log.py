"""llama.cpp tells a great deal; only errors matter here."""

import sys
from typing import Any

LOG_LEVEL_ERROR = 4  # ggml_log_level


def errors_only() -> Any:
    """Sends errors to standard error and drops the rest. Keep what is returned: C holds only a pointer to it."""
    import llama_cpp

    callback = llama_cpp.llama_log_callback(_tell)
    llama_cpp.llama_log_set(callback, None)
    return callback


def _tell(level: int, text: bytes, _: object) -> None:
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))
