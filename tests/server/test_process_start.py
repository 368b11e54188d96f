"""The start of the process: standard streams that are closed, full or broken, texts that are none, early signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.model_name import model_name
from jaxserve.core.options import check_ranges
from jaxserve.server.settings import ServerSettings
from tests.server.fake_serve import PROGRAM
from tests.server.process import ROOT, server_process
from tests.support.thorough import some

# `jaxserve serve` with a fake engine, whose address goes to a file as well.
SERVE = (
    PROGRAM
    + """
import time
print_ready = main._print_ready
def ready(urls, client, settings):
    print_ready(urls, client, settings)
    with open({file!r}, "w") as file:
        file.write(urls[0])
main._print_ready = ready
sys.argv = ["jaxserve", "serve", "--port", "0"]
main.main()
"""
)
STREAMS = {
    "full": ">/dev/full 2>/dev/full",
    "closed": "<&- >&- 2>&-",
    "output closed": ">&-",
    "errors closed": "2>&-",
    "broken pipe": "2>&1 | true",
}


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize("streams", some(STREAMS.values(), 3), ids=some(STREAMS, 3))
def test_server_needs_no_standard_streams(tmp_path, streams):
    address, status = tmp_path / "address", tmp_path / "status"
    script = tmp_path / "serve.py"
    script.write_text(SERVE.format(file=str(address)))
    pid = tmp_path / "pid"
    # The shell writes down the server's id and its exit status, whatever becomes of its streams.
    command = (
        f"( {sys.executable} {script} & echo $! > {pid}; wait $!; echo $? > {status} ) "
        if "|" in streams
        else f"{sys.executable} {script} "
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = f"{command} {streams}" if "|" in streams else f"{command} {streams} & echo $! > {pid}; wait $!"
    shell = subprocess.Popen(["bash", "-c", line], env=environment, cwd=ROOT)
    try:
        wait_for(lambda: address.exists() and address.read_text(), shell if "|" not in streams else _Never())
        server = int(pid.read_text())
        url = address.read_text()
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        assert httpx.get(f"{url}/none").status_code == 404
        os.kill(server, signal.SIGTERM)
        if "|" in streams:
            wait_for(lambda: status.exists() and status.read_text(), _Never())
            assert status.read_text() == "0\n"
        else:
            assert shell.wait(60) == 0
    finally:
        shell.kill()
        shell.wait()


class _Never:
    """A process that is not watched."""

    returncode = None

    def poll(self) -> None:
        return None


LOST_OUTPUT = {
    "full": (1, "jaxserve: standard output: No space left on device\n"),
    "closed": (1, "jaxserve: standard output: Bad file descriptor\n"),
    "broken pipe": (128 + signal.SIGPIPE, ""),
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize("lost", LOST_OUTPUT)
@pytest.mark.parametrize("arguments", some(["sim --help", "--version", "--help", "", "bench --help"], 1))
def test_command_whose_output_is_lost_fails_like_other_commands(arguments, lost):
    command = [sys.executable, "-m", "jaxserve", *arguments.split()]
    if lost == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as broken:
        output = {"full": full, "closed": None, "broken pipe": broken}[lost]
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == LOST_OUTPUT[lost]


def test_command_that_needs_closed_input_says_so():
    command = [sys.executable, "-m", "jaxserve", "run-batch", "-i", "-", "-o", "-", "--max-model-len", "64"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "jaxserve: cannot read standard input: Bad file descriptor\n"


def run(*arguments: bytes, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable.encode(), b"-m", b"jaxserve.cli.main", *arguments]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    return subprocess.run(command, cwd=ROOT, env=plain | environment, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    some(
        [
            (b"--served-model-name", b"\xff"),
            (b"--root-path", b"/\xe9"),
            (b"--api-key", b"\xe9"),
            (b"--chat-template", b"a\xff.jinja"),
            (b"\xff",),
        ],
        1,
    ),
    ids=str,
)
def test_argument_that_is_no_text_is_refused_in_one_line(arguments):
    done = run(b"serve", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(b"jaxserve: argument ")
    assert done.stderr.endswith(b": it must be UTF-8\n")
    assert done.stderr.count(b"\n") == 1


def test_key_that_is_no_text_is_refused():
    environment = os.environ | {"JAXSERVE_API_KEY": os.fsdecode(b"\xff")}
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the variable JAXSERVE_API_KEY is" in done.stderr


def test_arguments_are_read_as_utf8_whatever_the_locale():
    """A locale of ASCII alone, without Python's own ways around it: the process starts again in UTF-8 mode."""
    done = run("--dtype=größe".encode(), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 2
    done = run(b"serve", "--dtype=größe".encode(), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 2
    assert "größe" in done.stderr.decode()


@pytest.mark.parametrize(
    "config",
    [
        lambda text: ServerSettings(served_model_names=("a", text)),
        lambda text: ServerSettings(root_path=f"/{text}"),
        lambda text: ServerSettings(api_keys=(text,)),
        lambda text: ServerSettings(admin_key=text),
        lambda text: ServerSettings(cors_origins=(text,)),
        lambda text: EngineConfig(model=text),
        lambda text: EngineConfig(model=Path(text)),
        lambda text: EngineConfig(chat_template=text),
    ],
)
def test_options_are_unicode(config):
    check_ranges(config("ü😀"))
    with pytest.raises(ConfigError, match=r"it must be Unicode.*\(--"):
        check_ranges(config("\udcff"))


def test_folder_whose_name_is_no_text_gives_a_name_that_json_can_write(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/model-\xff"))
    folder.mkdir()
    assert json.dumps(model_name(folder), ensure_ascii=False).encode() == '"model-�"'.encode()


FIRST_PROCESS = """
import os, signal, sys
os.getpid = lambda: 1
import jaxserve.cli
for number in (signal.SIGTERM,):
    assert callable(signal.getsignal(number))
os.kill({pid}, signal.SIGTERM)
import time
time.sleep(60)
"""


def test_first_process_ends_by_a_signal_that_comes_while_it_starts():
    program = FIRST_PROCESS.format(pid="__import__('posix').getpid()")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM


def test_first_process_of_a_namespace_ends_by_a_signal_while_modules_are_imported():
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    program = (
        "import os, sys, threading, signal, time, jaxserve.cli\n"
        "assert os.getpid() == 1\n"
        "os.kill(1, signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed")
    done = subprocess.run([*unshare, sys.executable, "-c", program], cwd=ROOT, timeout=120, capture_output=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


def test_signals_are_left_alone_elsewhere():
    program = "import signal, jaxserve.cli; assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_ready_line_names_both_loopback_addresses(tmp_path):
    script = SERVE.format(file=str(tmp_path / "address")).replace('"0"]', '"0", "--host", "localhost"]')
    with server_process("-c", script) as server:
        assert f"at {server.url}" in server.output.read_text()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_interrupt_while_modules_are_imported_ends_in_one_line():
    script = (
        "import os, signal, sys\n"
        "from jaxserve.cli.start import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'jaxserve.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "jaxserve: interrupted\n")
