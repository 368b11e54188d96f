"""The log: JSON lines, request ids, configuration files, and which requests the access log leaves out."""

import io
import json
import logging

import httpx
import pytest

from jaxserve.cli.main import _print_ready
from jaxserve.core.errors import ConfigError
from jaxserve.server import logs
from jaxserve.server.logs import JsonFormatter, configure_logs, is_no_probe, request_id
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import serving

KEY = "a-secret-key"


@pytest.fixture
def lines(monkeypatch):
    """Return a function that returns the lines that were logged as JSON since its last call."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    root.removeHandler(handler)


@pytest.fixture
def restored():
    """Restore the loggers that a test configures."""
    root, names = logging.getLogger(), ("uvicorn.access", "jaxserve", "mine")
    handlers, levels = list(root.handlers), {name: logging.getLogger(name).level for name in names}
    formatters = [handler.formatter for handler in handlers]
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    for handler, formatter in zip(handlers, formatters, strict=True):
        handler.setFormatter(formatter)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).filters.clear()
        logging.getLogger(name).handlers.clear()


@pytest.fixture
def access_log(restored):
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").propagate = True  # as in a process whose servers all have an access log


def test_line_is_one_json_object_whatever_the_message_holds():
    message, arguments = 'two\nlines, "quotes", %s and %s', ("ünicode", "\ud800")
    record = logging.LogRecord("jaxserve.x", logging.WARNING, "", 0, message, arguments, None)
    text = JsonFormatter().format(record)
    assert text.isascii()
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == 'two\nlines, "quotes", ünicode and \ud800'
    assert (line["level"], line["logger"]) == ("WARNING", "jaxserve.x")
    assert line["time"].endswith("+00:00")
    assert line.keys() == {"time", "level", "logger", "message"}


def test_exception_is_a_field(lines):
    try:
        raise ValueError("a bug")
    except ValueError:
        logging.getLogger("jaxserve.x").exception("it failed")
    (line,) = lines()
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: a bug")


def test_line_of_the_access_log_has_its_parts_and_the_id_that_the_client_sees(lines, access_log):
    with serving(FakeClient(), ServerSettings(access_log=True, api_keys=(KEY,))) as address:
        headers = {"authorization": f"Bearer {KEY}"}
        answers = [
            httpx.post(f"{address.url}/v1/completions", json={"prompt": "a"}, headers=headers),
            httpx.get(f"{address.url}/v1/models", headers=headers | {"x-request-id": "my-id"}),
            httpx.get(f"{address.url}/nothing", headers=headers),
            httpx.get(f"{address.url}/v1/models", headers={"authorization": "Bearer wrong-key"}),
        ]
    found = [line for line in lines() if line["logger"] == "uvicorn.access"]
    assert [(line["method"], line["path"], line["status"]) for line in found] == [
        ("POST", "/v1/completions", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models", 401),
    ]
    assert [line["request_id"] for line in found] == [answer.headers["x-request-id"] for answer in answers]
    assert answers[1].headers["x-request-id"] == "my-id"
    assert len({line["request_id"] for line in found}) == 4
    assert KEY not in json.dumps(found)
    assert "wrong-key" not in json.dumps(found)


def test_exception_in_a_request_has_its_id(lines):
    with serving(FakeClient(fail_after=0, failure=ValueError("a bug"))) as address:
        answer = httpx.post(f"{address.url}/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "my-id"})
    assert answer.status_code == 500
    assert any(line.get("request_id") == "my-id" and "a bug" in line.get("exception", "") for line in lines())


def test_id_of_one_request_is_not_that_of_the_next_on_its_connection(lines, access_log):
    with serving(FakeClient(), ServerSettings(access_log=True)) as address, httpx.Client(base_url=address.url) as http:
        http.get("/version", headers={"x-request-id": "first"})
        http.get("/version")
    first, second = [line["request_id"] for line in lines() if line["logger"] == "uvicorn.access"]
    assert first == "first"
    assert second.startswith("req_")
    assert request_id.get() == ""


PROBES = ("/health", "/ready", "/live", "/ping", "/metrics", "/load", "/health/", "/metrics?a=b")


@pytest.mark.parametrize("level", ["info", "debug"])
def test_probes_are_in_the_access_log_only_for_debugging(restored, caplog, level):
    configure_logs(ServerSettings(access_log=True, log_level=level))
    logging.getLogger("uvicorn.access").propagate = True
    caplog.set_level(logging.INFO, "uvicorn.access")
    with serving(FakeClient(), ServerSettings(access_log=True)) as address, httpx.Client(base_url=address.url) as http:
        for path in PROBES:
            assert http.get(path).status_code == 200
        http.get("/version")
    logged = [record.args[2] for record in caplog.records if record.name == "uvicorn.access"]
    assert logged == [*(PROBES if level == "debug" else ()), "/version"]


def test_other_records_of_the_access_log_are_kept():
    assert is_no_probe(logging.LogRecord("uvicorn.access", 20, "", 0, "about /health", None, None))


@pytest.mark.parametrize("access", [False, True])
def test_file_configures_all_loggers(tmp_path, restored, access):
    file = tmp_path / "logs.yaml"
    file.write_text(
        f"""
version: 1
formatters: {{json: {{"()": jaxserve.server.logs.JsonFormatter}}}}
handlers: {{file: {{class: logging.FileHandler, filename: {tmp_path / "log"}, formatter: json}}}}
loggers: {{mine: {{handlers: [file], level: INFO}}}}
"""
    )
    before = logging.getLogger("jaxserve.server.errors").disabled
    configure_logs(ServerSettings(log_config_file=file, access_log=access))
    logging.getLogger("mine").info("hello")
    assert json.loads((tmp_path / "log").read_text())["message"] == "hello"
    assert logging.getLogger("jaxserve.server.errors").disabled == before  # as dictConfig would by itself
    assert logging.getLogger("uvicorn.access").isEnabledFor(logging.INFO) == access


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must be a mapping"),
        ("{}", "version"),
        ("{", "not valid YAML"),
        ('{"version": 1, "handlers": {"x": {"class": "no.such.Handler"}}}', "Unable to configure handler 'x'"),
        ('{"version": 1, "root": {"level": "LOUD"}}', "Unknown level"),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path, restored, text, words):
    file = tmp_path / "logs.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        configure_logs(ServerSettings(log_config_file=file))
    assert str(file) in str(error.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        configure_logs(ServerSettings(log_config_file=tmp_path / "missing.yaml"))


def test_server_in_json_writes_nothing_else(capsys, lines, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxserve"), "level", logging.INFO)
    _print_ready(["http://127.0.0.1:1"], FakeClient(), ServerSettings(log_format="json"))
    assert capsys.readouterr().out == ""
    assert lines()[0]["message"].startswith("jaxserve is ready: fake at http://127.0.0.1:1 (")
    assert logs.ACCESS == "uvicorn.access"
