"""A server that may write nothing and open few files starts, answers, and warns with the options that help."""

import os
import resource

import httpx

from tests.server.process import server_process

UNWRITABLE = "/proc"  # for the superuser too
FILES = 64


def test_server_without_home_temporary_folder_and_files_serves_and_names_what_helps(random_model):
    given = {
        name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR")
    }
    command = ("-m", "jaxserve", "serve", str(random_model), "--load-format=dummy", "--port=0", "--max-num-seqs=2")
    with server_process(
        *(*command, "--no-warmup", "--max-model-len=64"),
        env=given | {"HOME": UNWRITABLE, "TMPDIR": UNWRITABLE},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
    ) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=120)
        assert answer.status_code == 200, answer.text
        errors = server.errors.read_text()
    assert "--compile-cache or XDG_CACHE_HOME" in errors
    assert "raise it with ulimit -n" in errors
    assert "Traceback" not in errors
