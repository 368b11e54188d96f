"""The options of the HTTP server."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxserve.core.errors import ConfigError
from jaxserve.core.options import JsonObject, Option, check_ranges, json_object
from jaxserve.core.template_variables import is_reserved
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.plugins import reasoning_formats, tool_formats
from jaxserve.parsing.reasoning import ReasoningFormat
from jaxserve.parsing.registry import AUTO, reasoning_format, tool_format

MEBIBYTE = 1024 * 1024
CHAT_TEMPLATE_KWARGS = "--default-chat-template-kwargs"


@dataclass(frozen=True)
class ServerSettings:
    """The options of the HTTP server. Keys are left out of the representation, so that no log shows them."""

    host: Annotated[str, Option("HTTP server", "Address to listen on.", first=True)] = "127.0.0.1"
    port: Annotated[
        int, Option("HTTP server", "Port to listen on; 0: any free port.", minimum=0, maximum=65535, first=True)
    ] = 8000
    uds: Annotated[
        str | Path | None,
        Option("HTTP server", "Unix socket to listen on, instead of the host and port.", default="none"),
    ] = None
    uds_mode: Annotated[
        str, Option("HTTP server", "Permissions of the Unix socket, such as 660 to let its group connect.")
    ] = "600"
    ssl_certfile: Annotated[
        str | Path | None,
        Option("TLS", "Certificate of the server in PEM format, with its chain. It turns on TLS.", default="none"),
    ] = None
    ssl_keyfile: Annotated[
        str | Path | None, Option("TLS", "Private key of the certificate in PEM format.", default="in --ssl-certfile")
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        Option("TLS", "Password of an encrypted key.", default="none", env="JAXSERVE_SSL_KEYFILE_PASSWORD"),
    ] = None
    ssl_ca_certs: Annotated[
        str | Path | None,
        Option("TLS", "Authorities in PEM format whose certificates clients may show.", default="none"),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Option(
            "TLS", "Certificates of clients: 0: not asked for; 1: checked if shown; 2: required.", minimum=0, maximum=2
        ),
    ] = 0
    served_model_names: Annotated[
        tuple[str, ...],
        Option(
            "Model",
            "Model name for clients (repeatable; the first is shown).",
            default="the name on the hub, or the folder's",
            flags=("--served-model-name",),
            first=True,
        ),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            "HTTP server",
            "Key that clients must send (repeatable).",
            default="none, open to everyone",
            flags=("--api-key",),
            env="JAXSERVE_API_KEY",
            first=True,
        ),
    ] = ()
    admin_key: Annotated[
        str | None,
        Option(
            "HTTP server",
            "Key that operators must send to see or change the plan.",
            default="none; operators can only connect from this machine",
            env="JAXSERVE_ADMIN_KEY",
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "HTTP server",
            "Web origin whose pages may call the server (repeatable).",
            default="none",
            flags=("--cors-origin",),
        ),
    ] = ()
    root_path: Annotated[
        str,
        Option("HTTP server", "Prefix of all paths, such as /llm, for a proxy that does not strip it.", default="none"),
    ] = ""
    keep_alive_timeout: Annotated[
        float, Option("HTTP server", "Seconds that an idle connection stays open.", above=0)
    ] = 120.0
    sse_ping_interval: Annotated[
        float,
        Option(
            "HTTP server",
            "Seconds without output after which a stream sends a comment to keep the connection alive.",
            above=0,
        ),
    ] = 15.0
    max_body_mb: Annotated[
        float, Option("Limits", "Maximum size of a request's body in MiB, before and after decompression.", above=0)
    ] = 32.0
    header_timeout: Annotated[
        float, Option("Limits", "Seconds within which the head of a request must arrive.", above=0)
    ] = 30.0
    body_timeout: Annotated[float, Option("Limits", "Seconds within which a request's body must arrive.", above=0)] = (
        60.0
    )
    max_prompts: Annotated[
        int, Option("Limits", "Maximum number of prompts or embedding inputs in one call.", minimum=1)
    ] = 2048
    max_stored_responses: Annotated[
        int,
        Option(
            "Limits",
            "Maximum number of responses of /v1/responses that are kept, of which the least recently used are dropped; "
            "0: keep none.",
            minimum=0,
        ),
    ] = 1000
    stored_responses_mb: Annotated[
        float, Option("Limits", "Memory in MiB for the responses that are kept, and their input.", above=0)
    ] = 128.0
    clamp_max_tokens: Annotated[
        bool, Option("Limits", "Lower max_tokens if it does not fit after the prompt, instead of refusing the request.")
    ] = False
    tool_parser: Annotated[
        str,
        Option(
            "Model",
            "Format of tool calls; auto: as the chat template shows; none: refuse tools.",
            flags=("--tool-parser", "--tool-call-parser"),
        ),
    ] = AUTO
    reasoning_parser: Annotated[
        str, Option("Model", "Format of reasoning; auto: as the chat template shows; none: leave it in the text.")
    ] = AUTO
    tool_parser_plugin: Annotated[
        str | Path | None,
        Option(
            "Model",
            "Python file with a format of tool calls of your own, as FILE.py or FILE.py:NAME; it is executed.",
            default="none",
        ),
    ] = None
    reasoning_parser_plugin: Annotated[
        str | Path | None,
        Option(
            "Model",
            "Python file with a format of reasoning of your own, as FILE.py or FILE.py:NAME; it is executed.",
            default="none",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        JsonObject | None,
        Option(
            "Model",
            'Variables of the chat template for requests that do not set them, such as {"enable_thinking": false}.',
            default="none",
        ),
    ] = None
    ignore_unknown_fields: Annotated[
        bool,
        Option(
            "HTTP server",
            "Ignore fields of requests that the server does not know, and tools that it would have to run, instead of "
            "refusing the request.",
        ),
    ] = False
    replace_unsupported: Annotated[
        bool,
        Option(
            "HTTP server",
            "Put a text such as [image left out] in the place of what the model cannot read in a conversation, instead "
            "of refusing the request.",
        ),
    ] = False
    shutdown_delay: Annotated[
        float,
        Option(
            "HTTP server",
            "Seconds after SIGTERM in which new requests are still served while /health answers 503, so that balancers "
            "can turn away first.",
            minimum=0,
        ),
    ] = 0.0
    shutdown_timeout: Annotated[
        float,
        Option(
            "HTTP server",
            "Seconds that running requests get to finish after SIGTERM and the shutdown delay.",
            minimum=0,
        ),
    ] = 30.0
    access_log: Annotated[
        bool, Option("Log", "Log the path and status of every request; of probes only with --log-level debug.")
    ] = False
    log_interval: Annotated[
        float,
        Option(
            "Log",
            "Seconds between two lines in the log about the load, which appear while there is any; 0: none.",
            minimum=0,
        ),
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option("Log", "Log messages of this severity and above.", first=True),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Option("Log", "Write lines as text, or each as a JSON object.")] = (
        "text"
    )
    log_config_file: Annotated[
        str | Path | None,
        Option("Log", "YAML or JSON file with the configuration of Python's logging, for all loggers.", default="none"),
    ] = None

    def __post_init__(self) -> None:
        """Raise ConfigError, naming the option, if a value is not allowed."""
        check_ranges(self)
        self.tool_format("")
        self.reasoning_format("")
        for name in self.template_defaults:
            if is_reserved(name):
                raise ConfigError(f"default_chat_template_kwargs may not set {name[:40]!r} ({CHAT_TEMPLATE_KWARGS})")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"root_path is {self.root_path!r}: it must begin and not end with a slash, like '/prefix' (--root-path)"
            )
        if not re.fullmatch("0?[0-7]{3}", self.uds_mode):
            raise ConfigError(f"uds_mode is {self.uds_mode!r}: it must be three octal digits such as 660 (--uds-mode)")
        self._check_tls()
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty: it must have visible characters (--api-key or JAXSERVE_API_KEY)")
        if self.admin_key is not None and not self.admin_key.strip():
            raise ConfigError(
                "the admin key is empty: it must have visible characters (--admin-key or JAXSERVE_ADMIN_KEY)"
            )
        if self.admin_key in self.api_keys:
            raise ConfigError(
                "the admin key must differ from the API keys: otherwise every client is an operator (--admin-key)"
            )

    def _check_tls(self) -> None:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
                if getattr(self, name):
                    raise ConfigError(f"{name} needs a certificate of the server, too (--ssl-certfile)")
        elif self.uds is not None:
            raise ConfigError("a Unix socket has no TLS: give either --uds or --ssl-certfile")
        if bool(self.ssl_ca_certs) != bool(self.ssl_cert_reqs):
            raise ConfigError(
                "certificates of clients are checked with both --ssl-ca-certs FILE and --ssl-cert-reqs 1 or 2: got one "
                "without the other"
            )

    def __repr__(self) -> str:
        admin = "set" if self.admin_key else "none"
        return f"ServerSettings(host={self.host!r}, port={self.port}, api_keys={len(self.api_keys)}, admin_key={admin})"

    def tool_format(self, template: str) -> ToolFormat | None:
        """Return the format of tool calls of a model with this chat template, None if there is none.

        Raise ConfigError if the parser or the plugin is not valid.
        """
        own = {} if self.tool_parser_plugin is None else tool_formats(self.tool_parser_plugin)
        return tool_format(self.tool_parser, template, own)

    def reasoning_format(self, template: str) -> ReasoningFormat | None:
        """Return the format of reasoning of a model with this chat template, None if there is none.

        Raise ConfigError if the parser or the plugin is not valid.
        """
        own = {} if self.reasoning_parser_plugin is None else reasoning_formats(self.reasoning_parser_plugin)
        return reasoning_format(self.reasoning_parser, template, own)

    @cached_property
    def template_defaults(self) -> Mapping[str, Any]:
        """The variables of the chat template for requests that do not set them.

        Raise ConfigError if the option is not a JSON object.
        """
        given = self.default_chat_template_kwargs
        return {} if given is None else json_object(given, CHAT_TEMPLATE_KWARGS)

    @property
    def local(self) -> bool:
        """True if only this machine can connect: by a loopback address, or by a Unix socket of the server's own user.

        A Unix socket that others may use is meant for a proxy, whose clients can be anywhere.
        """
        return is_loopback(self.host) if self.uds is None else self.socket_mode & 0o077 == 0

    @property
    def socket_mode(self) -> int:
        """The permissions of the Unix socket."""
        return int(self.uds_mode, 8)

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request's body in bytes."""
        return int(self.max_body_mb * MEBIBYTE)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
