"""What to say about a path that is not served: which endpoint was probably meant, or serves the same purpose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MODELS = "/v1/models"
FIRST = (CHAT, COMPLETIONS, EMBEDDINGS)  # endpoints that lists begin with


@dataclass(frozen=True)
class Foreign:
    """A path of another server's API. `instead` is what serves the same purpose here; "" if nothing does."""

    api: str
    instead: str = ""


def _paths(api: str, instead: str, *paths: str) -> dict[str, Foreign]:
    return dict.fromkeys(paths, Foreign(api, instead))


# Each entry also stands for all paths below it.
FOREIGN: Mapping[str, Foreign] = {
    **_paths("Ollama's API", CHAT, "/api/chat"),
    **_paths("Ollama's API", COMPLETIONS, "/api/generate"),
    **_paths("Ollama's API", EMBEDDINGS, "/api/embed", "/api/embeddings"),
    **_paths("Ollama's API", MODELS, "/api/tags", "/api/ps", "/api/show"),
    **_paths("Ollama's API", "/version", "/api/version"),
    **_paths("the API of text-generation-inference and SGLang", COMPLETIONS, "/generate"),
    **_paths("the API of text-generation-inference", f"{COMPLETIONS} with stream true", "/generate_stream"),
    **_paths("the API of text-generation-inference", MODELS, "/info"),
    **_paths("the API of text-embeddings-inference", EMBEDDINGS, "/embed", "/embed_all"),
    **_paths("the API of text-embeddings-inference", "/v1/score", "/similarity"),
    **_paths("the API of text-embeddings-inference", "", "/predict", "/embed_sparse"),
    **_paths("llama.cpp's API", COMPLETIONS, "/completion"),
    **_paths("llama.cpp's API", f"{COMPLETIONS} with suffix", "/infill"),
    **_paths("llama.cpp's API", EMBEDDINGS, "/embedding"),
    **_paths("llama.cpp's API", "/v1/rerank", "/reranking", "/v1/reranking"),
    **_paths("llama.cpp's API", "/tokenize with messages", "/apply-template"),
    **_paths("llama.cpp's API", MODELS, "/props"),
    **_paths("llama.cpp's API", "/metrics", "/slots"),
    **_paths("SGLang's API", MODELS, "/get_model_info", "/model_info", "/get_server_info", "/server_info"),
    **_paths("SGLang's API", EMBEDDINGS, "/encode"),
    **_paths("SGLang's API", "/health", "/health_generate"),
    **_paths("vLLM's API", EMBEDDINGS, "/pooling"),
    **_paths("vLLM's API", "", "/classify", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    **_paths("vLLM's API", "/metrics", "/load"),
    **_paths("Cohere's API", CHAT, "/v1/chat", "/v2/chat"),
    **_paths("Cohere's API", COMPLETIONS, "/v1/generate"),
    **_paths("Cohere's API", EMBEDDINGS, "/v1/embed", "/v2/embed"),
    **_paths("Anthropic's API of text completions", COMPLETIONS, "/v1/complete"),
    **_paths("OpenAI's API of batches", "the command jaxserve run-batch, which takes the same files", "/v1/batches"),
    **_paths("OpenAI's API of edits", CHAT, "/v1/edits"),
    **_paths("OpenAI's API of engines", MODELS, "/v1/engines"),
    **{
        f"/v1/{name}": Foreign(f"OpenAI's API of {name.replace('_', ' ')}")
        for name in (
            *("audio", "images", "videos", "realtime", "files", "uploads", "moderations", "assistants", "threads"),
            *("conversations", "containers", "evals", "fine_tuning", "vector_stores", "organization"),
        )
    },
}
# The rest of these APIs, for paths that are not near an endpoint either.
FAMILIES: Mapping[str, Foreign] = {
    "/api": Foreign("Ollama's API"),
    "/v1beta": Foreign("Gemini's API", CHAT),
    "/v2/models": Foreign("KServe's API", COMPLETIONS),
}


def hint(path: str, endpoints: Sequence[str]) -> str:
    """Return the second half of the error about an unknown path, after its colon. `endpoints`: what is served."""
    served = [*FIRST, *(path for path in endpoints if path not in FIRST), MODELS]
    listed = f"endpoints are {', '.join(served)}"
    above = next((endpoint for endpoint in served if path.startswith(f"{endpoint}/")), None)
    foreign = _lookup(path, FOREIGN)
    if meant := above or (None if foreign else _with_ending(path, served)):
        return f"did you mean {meant}? {listed}; /docs describes all of them"
    if foreign := foreign or _lookup(path, FAMILIES):
        instead = f"use {foreign.instead}" if foreign.instead else "no endpoint here has its purpose"
        return f"{foreign.api} is not served, {instead}; {listed}"
    return f"{listed}; /docs describes all of them"


def _lookup(path: str, table: Mapping[str, Foreign]) -> Foreign | None:
    """Return the entry of a path, or of the nearest path above it."""
    while path and path not in table:
        path = path.rpartition("/")[0]
    return table.get(path)


def _with_ending(path: str, endpoints: Sequence[str]) -> str | None:
    """Return the longest endpoint that, without its version, is the end of a path."""
    return max((end for end in endpoints if path.endswith(end.removeprefix("/v1"))), key=len, default=None)
