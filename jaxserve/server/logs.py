"""The server's log: as text or JSON, or as a file configures it, and with the id of the request in progress."""

import json
import logging
import logging.config
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_yaml, read_text
from jaxserve.server.http.auth import PROBES
from jaxserve.server.settings import ServerSettings

ACCESS = "uvicorn.access"
ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")  # the arguments of its records
UNLOGGED = PROBES | {"/load"}

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the current task answers, as its client sees it."""


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object on one line, for programs that collect logs.

    It has `time`, `level`, `logger` and `message`, and where there are any `request_id`, `exception`, and in the access
    log `client`, `method`, `path` and `status`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if id := request_id.get():
            line["request_id"] = id
        if record.name == ACCESS and isinstance(record.args, tuple) and len(record.args) == len(ACCESS_FIELDS):
            line |= dict(zip(ACCESS_FIELDS, record.args, strict=True))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(settings: ServerSettings) -> None:
    """Let loggers write as the options say. Raise ConfigError if the file for them cannot be used."""
    if settings.log_config_file is not None:
        _load(Path(settings.log_config_file))
    elif settings.log_format == "json":
        logging.captureWarnings(True)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    access = logging.getLogger(ACCESS)
    if settings.log_config_file is None or access.level == logging.NOTSET:
        access.setLevel(logging.INFO if settings.access_log else logging.WARNING)
    if settings.log_level != "debug":
        access.addFilter(is_no_probe)


def is_no_probe(record: logging.LogRecord) -> bool:
    """Return whether a record of the access log is about anything but a probe or a scrape, which come all the time."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) == len(ACCESS_FIELDS) else ""
    return str(path).partition("?")[0].rstrip("/") not in UNLOGGED


def _load(file: Path) -> None:
    """Configure all loggers by a file in YAML or JSON, in the form of `logging.config.dictConfig`."""
    config = parse_yaml(read_text(file), file)
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must be a mapping as of Python's logging.config.dictConfig (--log-config-file)")
    try:
        # Loggers exist already, and would be silent otherwise.
        logging.config.dictConfig({"disable_existing_loggers": False, **config})
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigError(f"{file}: {reason} (--log-config-file)") from error
