"""ServerSettings: what an operator may set for the HTTP server."""

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxserve.core.errors import ConfigError
from jaxserve.core.options import Option, check_ranges

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ServerSettings:
    """Frozen. No key ever appears in logs: they are left out of the representation."""

    host: Annotated[str, Option("HTTP server", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option("HTTP server", "Port to listen on; 0: any free one.", minimum=0, maximum=65535)] = 8000
    served_model_names: Annotated[
        tuple[str, ...],
        Option(
            "Model",
            "Name for clients; may be repeated, and the first is shown.",
            default="the folder's name",
            flags=("--served-model-name",),
        ),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            "HTTP server",
            "Key that clients must send; may be repeated.",
            default="none, open to everyone",
            flags=("--api-key",),
            env="JAXSERVE_API_KEY",
        ),
    ] = ()
    admin_key: Annotated[
        str | None,
        Option(
            "HTTP server",
            "Key that operators must send to see or change the plan.",
            default="none, only from this machine",
            env="JAXSERVE_ADMIN_KEY",
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Option("HTTP server", "Web origin that may call; may be repeated.", default="none", flags=("--cors-origin",)),
    ] = ()
    root_path: Annotated[
        str, Option("HTTP server", "Prefix of all paths, such as /llm, for a proxy that keeps it.", default="none")
    ] = ""
    keep_alive_timeout: Annotated[
        float, Option("HTTP server", "Seconds that a connection may wait for its next request.", above=0)
    ] = 120.0
    sse_ping_interval: Annotated[
        float, Option("HTTP server", "Seconds without news after which a stream sends a comment.", above=0)
    ] = 15.0
    max_body_mb: Annotated[
        float, Option("Limits", "MiB of a request's body, also once it is decompressed.", above=0)
    ] = 32.0
    header_timeout: Annotated[float, Option("Limits", "Seconds to receive the head of a request.", above=0)] = 30.0
    body_timeout: Annotated[float, Option("Limits", "Seconds to receive a body.", above=0)] = 60.0
    max_prompts: Annotated[int, Option("Limits", "Prompts or embedding inputs of one call.", minimum=1)] = 2048
    clamp_max_tokens: Annotated[
        bool, Option("Limits", "Lower a max_tokens that does not fit after the prompt instead of refusing it.")
    ] = False
    shutdown_timeout: Annotated[
        float, Option("HTTP server", "Seconds for requests in flight after SIGTERM.", minimum=0)
    ] = 30.0
    access_log: Annotated[bool, Option("HTTP server", "Log paths and statuses.")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Option("HTTP server", "Least severe messages that are logged.")
    ] = "info"

    def __post_init__(self) -> None:
        """Raise `ConfigError` naming the option that is wrong."""
        check_ranges(self)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}, it must be like '/prefix' (--root-path)")
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty (--api-key or JAXSERVE_API_KEY)")
        if self.admin_key is not None and not self.admin_key.strip():
            raise ConfigError("the admin key is empty (--admin-key or JAXSERVE_ADMIN_KEY)")
        if self.admin_key in self.api_keys:
            raise ConfigError("the admin key is an API key too: every client would be an operator (--admin-key)")

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
