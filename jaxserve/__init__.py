"""jaxserve: LLM serving on JAX/XLA.

Names are imported on first use, so that `import jaxserve` is fast and loads neither JAX nor a web framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxserve._version import __version__

if TYPE_CHECKING:
    from jaxserve.async_llm import AsyncLLM
    from jaxserve.core.config import EngineConfig
    from jaxserve.core.errors import (
        CheckpointError,
        ConfigError,
        EngineFailed,
        EngineStopped,
        GrammarTooComplex,
        JaxserveError,
        MemoryBudgetError,
        NonFiniteOutput,
        PromptTooLong,
        QueueFull,
        RequestError,
        UnknownKeyword,
    )
    from jaxserve.core.reasoning import ReasoningSection
    from jaxserve.core.request import CompletionOutput, RequestOutput
    from jaxserve.core.sampling import SamplingParams
    from jaxserve.core.structured import StructuredOutput
    from jaxserve.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineFailed",
    "EngineStopped",
    "GrammarTooComplex",
    "JaxserveError",
    "MemoryBudgetError",
    "NonFiniteOutput",
    "PromptTooLong",
    "QueueFull",
    "ReasoningSection",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "UnknownKeyword",
    "__version__",
]

_HOMES = {
    "LLM": "jaxserve.llm",
    "AsyncLLM": "jaxserve.async_llm",
    "EngineConfig": "jaxserve.core.config",
    "SamplingParams": "jaxserve.core.sampling",
    "StructuredOutput": "jaxserve.core.structured",
    "ReasoningSection": "jaxserve.core.reasoning",
    "CompletionOutput": "jaxserve.core.request",
    "RequestOutput": "jaxserve.core.request",
}

if not TYPE_CHECKING:  # type checkers would let every name pass

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
        value = getattr(import_module(_HOMES.get(name, "jaxserve.core.errors")), name)
        globals()[name] = value  # later uses do not call this function
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
