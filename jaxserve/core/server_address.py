"""The address of a running server as its clients are given it: a URL, or `unix:PATH` for a Unix socket."""

import ssl
from dataclasses import dataclass

from jaxserve.core.errors import ConfigError

UNIX = "unix:"
TLS_HINTS = {  # a part of an error's message: what helps
    "CERTIFICATE_VERIFY_FAILED": ": name the file of its authority in the variable SSL_CERT_FILE",
    "WRONG_VERSION_NUMBER": ": it seems to have no TLS, and an address with http://",
    "disconnected without sending a response": ": if it has TLS, its address begins with https://",
}


@dataclass(frozen=True)
class ServerAddress:
    """An address for requests: the beginning of their URLs, and the Unix socket to connect to, if it is one."""

    base_url: str  # without a slash at its end
    socket: str | None = None

    @classmethod
    def parse(cls, text: str) -> "ServerAddress":
        """Return the address that a text stands for. Raise ConfigError for a Unix socket without a path."""
        if not text.startswith(UNIX):
            return cls(text.rstrip("/"))
        path = text.removeprefix(UNIX)
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path:
            raise ConfigError(f"the address {text!r} has no path: give one such as unix:/run/jaxserve.sock")
        return cls("http://localhost", path)


def trusted_authorities() -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, or those in the file that SSL_CERT_FILE names."""
    return ssl.create_default_context()


def tls_hint(error: Exception) -> str:
    """Return what to add to the message of an error of connecting: what helps if TLS was the reason, or nothing."""
    return next((hint for part, hint in TLS_HINTS.items() if part in str(error)), "")
