"""ServerSettings: what an operator may set for the HTTP server."""

from dataclasses import dataclass

from jaxserve.core.errors import ConfigError

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ServerSettings:
    """Frozen. `api_keys` never appears in logs: it is left out of the representation."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    served_model_names: tuple[str, ...] = ()  # the first is shown; empty: the engine's own name
    api_keys: tuple[str, ...] = ()  # empty: open to everyone
    cors_origins: tuple[str, ...] = ()
    max_body_mb: float = 32.0
    body_timeout: float = 60.0  # seconds to receive a request's body
    max_prompts: int = 1024  # prompts of one call
    shutdown_timeout: float = 30.0  # seconds for requests in flight after SIGTERM
    access_log: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Raises ConfigError naming the option."""
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty (--api-key or JAXSERVE_API_KEY)")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"the port is {self.port}, it must be from 0 to 65535 (--port)")
        for name in ("max_body_mb", "body_timeout", "max_prompts"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be above 0")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout}, it must be at least 0")

    def __repr__(self) -> str:
        return f"ServerSettings(host={self.host!r}, port={self.port}, api_keys={len(self.api_keys)})"

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * MEBIBYTE)
