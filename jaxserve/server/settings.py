"""ServerSettings: what an operator may set for the HTTP server."""

import ipaddress
import math
from dataclasses import dataclass

from jaxserve.core.errors import ConfigError

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ServerSettings:
    """Frozen. No key ever appears in logs: they are left out of the representation."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    served_model_names: tuple[str, ...] = ()  # the first is shown; empty: the engine's own name
    api_keys: tuple[str, ...] = ()  # empty: open to everyone
    admin_key: str | None = None  # None: operators need none on this machine, and are not let in from elsewhere
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""  # prefix of every path, for a proxy that keeps it
    max_body_mb: float = 32.0
    header_timeout: float = 30.0  # seconds to receive a request's head, on a new connection from its beginning
    body_timeout: float = 60.0  # seconds to receive a request's body
    keep_alive_timeout: float = 120.0  # seconds for which a connection may wait for its next request
    sse_ping_interval: float = 15.0  # seconds without news after which a stream sends a comment
    max_prompts: int = 2048  # prompts or embedding inputs of one call
    clamp_max_tokens: bool = False  # a max_tokens above what the prompt leaves is lowered, not refused
    shutdown_timeout: float = 30.0  # seconds for requests in flight after SIGTERM
    access_log: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Raises ConfigError naming the option."""
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty (--api-key or JAXSERVE_API_KEY)")
        if self.admin_key is not None and not self.admin_key.strip():
            raise ConfigError("the admin key is empty (--admin-key or JAXSERVE_ADMIN_KEY)")
        if self.admin_key in self.api_keys:
            raise ConfigError("the admin key is an API key too: every client would be an operator (--admin-key)")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"the port is {self.port}, it must be from 0 to 65535 (--port)")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}, it must be like '/prefix' (--root-path)")
        timeouts = ("header_timeout", "body_timeout", "keep_alive_timeout", "sse_ping_interval")
        for name in ("max_body_mb", "max_prompts", *timeouts):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be a number above 0")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout}, it must be a number of at least 0")

    def __repr__(self) -> str:
        admin = "set" if self.admin_key else "none"
        return f"ServerSettings(host={self.host!r}, port={self.port}, api_keys={len(self.api_keys)}, admin_key={admin})"

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * MEBIBYTE)


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine as only itself sees it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
