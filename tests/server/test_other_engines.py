"""Command lines and files in the spelling of vLLM, SGLang and llama.cpp are taken, or explained in one line."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from jaxserve import EngineConfig
from jaxserve.cli.main import app
from jaxserve.core.errors import ConfigError
from jaxserve.core.vllm_options import COMMAND_LINE, SHORT, takes_value
from jaxserve.server.options import KNOWN, read_config, resolve

# The options of `vllm serve` in its versions 0.6 to 0.33, besides those of jaxserve.
VLLM = """
model runner convert tokenizer tokenizer-mode trust-remote-code dtype seed hf-config-path allowed-local-media-path
allowed-media-domains revision code-revision tokenizer-revision max-model-len quantization enforce-eager max-logprobs
logprobs-mode disable-sliding-window disable-cascade-attn skip-tokenizer-init enable-prompt-embeds served-model-name
config-format hf-token hf-overrides pooler-config logits-processor-pattern generation-config
override-generation-config enable-sleep-mode model-impl logits-processors io-processor-plugin load-format download-dir
safetensors-load-strategy model-loader-extra-config ignore-patterns use-tqdm-on-load pt-load-map-location
reasoning-parser reasoning-parser-plugin guided-decoding-backend guided-decoding-disable-fallback
guided-decoding-disable-any-whitespace structured-outputs-config distributed-executor-backend pipeline-parallel-size
master-addr master-port nnodes node-rank tensor-parallel-size decode-context-parallel-size
prefill-context-parallel-size data-parallel-size data-parallel-rank data-parallel-start-rank data-parallel-size-local
data-parallel-address data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb
enable-expert-parallel all2all-backend enable-dbo ubatch-size enable-eplb eplb-config expert-placement-strategy
max-parallel-loading-workers ray-workers-use-nsight disable-custom-all-reduce worker-cls worker-extension-cls
block-size gpu-memory-utilization kv-cache-memory-bytes swap-space kv-cache-dtype num-gpu-blocks-override
enable-prefix-caching prefix-caching-hash-algo cpu-offload-gb calculate-kv-scales kv-sharing-fast-prefill
mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size kv-offloading-size kv-offloading-backend limit-mm-per-prompt
enable-mm-embeds media-io-kwargs mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type mm-encoder-only
mm-encoder-tp-mode interleave-mm-strings skip-mm-profiling disable-mm-preprocessor-cache enable-lora max-loras
max-lora-rank lora-extra-vocab-size lora-dtype max-cpu-loras fully-sharded-loras default-mm-loras
show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces kv-cache-metrics max-num-batched-tokens
max-num-seqs max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold scheduling-policy
enable-chunked-prefill disable-chunked-mm-input scheduler-cls disable-hybrid-kv-cache-manager async-scheduling
stream-interval cudagraph-capture-sizes max-cudagraph-capture-size cuda-graph-sizes speculative-config
speculative-model num-speculative-tokens kv-transfer-config kv-events-config compilation-config attention-config
attention-backend optimization-level additional-config disable-log-stats enable-log-requests disable-log-requests
max-log-len headless api-server-count host port uvicorn-log-level disable-uvicorn-access-log
disable-access-log-for-endpoints allow-credentials allowed-origins allowed-methods allowed-headers api-key
lora-modules chat-template chat-template-content-format trust-request-chat-template response-role root-path middleware
return-tokens-as-token-ids disable-frontend-multiprocessing enable-request-id-headers enable-auto-tool-choice
exclude-tools-when-tool-choice-none tool-call-parser tool-server log-config-file disable-fastapi-docs
enable-prompt-tokens-details enable-server-load-tracking enable-force-include-usage enable-tokenizer-info-endpoint
enable-log-outputs enable-log-deltas h11-max-incomplete-event-size h11-max-header-count log-error-stack tokens-only
enable-per-request-metrics fingerprint-mode fingerprint-value enable-offline-docs task rope-scaling rope-theta
max-seq-len-to-capture use-v2-block-manager num-lookahead-slots preemption-mode num-scheduler-steps
multi-step-stream-outputs scheduler-delay-factor enable-prompt-adapter disable-async-output-proc
override-pooler-config tokenizer-pool-size uds default-chat-template-kwargs ssl-keyfile ssl-certfile ssl-ca-certs
enable-ssl-refresh ssl-cert-reqs ssl-ciphers tool-parser-plugin enable-reasoning fail-on-environ-validation
"""
SERVE = get_command(app).commands["serve"]
FLAGS = {name for option in SERVE.params for name in option.opts}
FOREIGN = sorted(name for name in COMMAND_LINE if f"--{name.replace('_', '-')}" not in FLAGS)


def parsed(*args: str) -> dict:
    """Return what a command line of `jaxserve serve` gives, by name."""
    given = SERVE.make_context("serve", list(args)).params
    return {name: value for name, value in given.items() if value not in (None, [], ())}


def refused(*args: str) -> str:
    done = CliRunner().invoke(app, ["serve", *args], prog_name="jaxserve")
    assert done.exit_code == 2, done.output
    assert done.output.count("\n") == 1
    return done.output


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("M --tensor-parallel-size 2 -pp 3 --data_parallel_size=4", {"model": "M", "tp": 2, "pp": 3, "dp": 4}),
        ("--model M -tp=2", {"model": "M", "tp": 2}),
        ("--model-path M --tp-size 2", {"model": "M", "tp": 2}),
        ("-m M", {"model": "M"}),
        ("--max-model-len 4k", {"max_model_len": 4000}),
        ("--max_model_len 1K --max-num-batched-tokens 25.6k", {"max_model_len": 1024, "max_num_batched_tokens": 25600}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype=float --uvicorn-log-level trace", {"dtype": "float32", "log_level": "debug"}),
        ("M --served-model-name a b --port 1", {"model": "M", "served_model_names": ["a", "b"], "port": 1}),
        ("--served-model-name a M", {"model": "M", "served_model_names": ["a"]}),
        ("--served-model-name a b --config f", {"served_model_names": ["a", "b"], "config": Path("f")}),
        ("M --api-key a b --api-key c", {"model": "M", "api_keys": ["a", "b", "c"]}),
        ("M --alias a --seed 3", {"model": "M", "served_model_names": ["a"], "seed": 3}),
        ("--enable-prefix-caching --no-async-scheduling", {"prefix_caching": True, "overlap": False}),
        ("--disable-radix-cache --disable-overlap-schedule", {"prefix_caching": False, "overlap": False}),
        ("--no-enable-prefix-caching", {"prefix_caching": False}),
        ("--enable_prefix_caching=False --warmup=true", {"prefix_caching": False, "warmup": True}),
        ("""--allowed-origins ["https://a","https://b"]""", {"cors_origins": ["https://a", "https://b"]}),
        ("--max-num-seqs 8 --block-size 32", {"max_num_seqs": 8, "page_size": 32}),
        ("--enable-auto-tool-choice --tool-call-parser hermes M", {"tool_parser": "hermes", "model": "M"}),
        ("--enable-chunked-prefill M", {"model": "M"}),
        ("--enable-chunked-prefill=true M", {"model": "M"}),
        ("M --task embed --runner pooling --convert embed", {"model": "M"}),
        ("--scheduling-policy priority --runner generate M", {"model": "M"}),
        ("--quantization None --speculative-config null M", {"model": "M"}),
        ("--hf-overrides {} --cpu-offload-gb 0 M", {"model": "M"}),
        ("--gpu-memory-utilization 0.8", {"gpu_memory_utilization": 0.8}),
        ("--disable-log-stats M", {"log_interval": 0.0, "model": "M"}),
        ("--disable-log-stats=false --no-disable-log-stats M", {"model": "M"}),
        ("--chat-template -- M", {"chat_template": "--", "model": "M"}),
        ("--api-key=--port M --api-key -x", {"api_keys": ["--port", "-x"], "model": "M"}),
    ],
)
def test_other_spellings_mean_the_same(line: str, expected: dict, capsys):
    found = parsed(*line.split())
    assert {name: str(found[name]) if name == "chat_template" else found[name] for name in found} == expected
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--trust-remote-code M", "--trust-remote-code has no effect: no code of a model's folder is ever run"),
        ("M --enforce-eager", "--enforce-eager has no effect: all programs are compiled (see --warmup)"),
        ("M -O3", "-O has no effect"),
        ("M -O.mode=3 --swap-space 4", "--swap-space has no effect: preempted sequences are computed again"),
        ("--disable-log-requests M", "requests are only logged with --access-log"),
        ("""M --compilation-config {"mode":3} --cudagraph-capture-sizes 8""", "--compilation-config has no effect"),
        ("M --compilation-config.mode 3", "--compilation-config.mode has no effect"),
        ("M -cc.mode=3", "-cc.mode has no effect"),
        ("M --no-enable-chunked-prefill", "prompts are always computed in chunks"),
        ("M --enable-chunked-prefill=False", "prompts are always computed in chunks"),
        ("M --enable-chunked-prefill false", "prompts are always computed in chunks"),
        ("--cuda-graph-sizes 1 2 4 --enable-chunked-prefill M", "--cuda-graph-sizes has no effect"),
        ("M --cudagraph-capture-sizes 1 2 4", "--cudagraph-capture-sizes has no effect"),
        ("--ignore-patterns a/** b* M", "--ignore-patterns has no effect"),
        ("M --disable-access-log-for-endpoints /health,/metrics", "--access-log leaves probes out"),
        ("M --enable-reasoning", "--enable-reasoning has no effect: --reasoning-parser alone decides"),
        ("M --enable-logging-iteration-details", "every --log-interval seconds"),
    ],
)
def test_options_without_effect_are_ignored_with_a_notice(line: str, reason: str, capsys):
    assert parsed(*line.split()) == {"model": "M"}
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("M --quantization awq", "use --precision"),
        ("M -q fp8", "use --precision"),
        ("M --kv-cache-dtype fp8", "use int8, which takes half the memory (--kv-cache-dtype)"),
        ("M --lora-modules a=b c=d", "merge them into the model's weights"),
        ("""M --speculative-config {"method":"ngram"}""", "there is no speculative decoding"),
        ("M --speculative-config.model x", "there is no speculative decoding"),
        ("M --cpu-offload-gb 4", "use --precision"),
        ("M --ngl 99", "no such option: --ngl"),
        ("M -ngl 99", "all layers are on the devices"),
        ("M -c 4096", "use --max-model-len"),
        ("M --ctx-size 4096", "use --max-model-len"),
        ("M --mem-fraction-static 0.8", "use --memory-gb, or --gpu-memory-utilization"),
        ("M --api-server-count 4", "one process serves"),
        ("M --task classify", "models generate, chat and embed alone"),
        ("M --logging-config log.json", "use --log-config-file"),
        ("M 1 2", "got unexpected extra argument"),
        ("M --api-key --port 8000", "--api-key needs a value, and --port follows (or give it as --api-key=--port)"),
        ("M --api-key --enable-auto-tool-choice", "--api-key needs a value, and --enable-auto-tool-choice follows"),
        ("M --served-model-name --no-enable-prefix-caching", "--served-model-name needs a value"),
        ("M --tensor-parallel-size --max_model_len=9", "--tensor-parallel-size needs a value"),
        ("M --prefix-caching=maybe", "--prefix-caching is 'maybe': it must be true or false"),
        ("M --temp 0.2", "--temp: requests say it: --override-generation-config sets what they leave out"),
        ("M --num-ctx 3", "did you mean '--n-ctx'? use --max-model-len; see"),
        ("M --reasoning-budget 0", "did you mean '--reasoning-parser'?;"),  # not what the library says of it
        ("M --tensor-paralel-size 2", "did you mean '--tensor-parallel-size', which is '--tp' here?"),
        ("M --max-modellen 2", "did you mean '--max-model-len'?"),
        ("M --max-model-len 1.2345k", "is 1234.5 tokens: give a whole number"),
    ],
)
def test_options_that_mean_nothing_here_are_explained_in_one_line(line: str, reason: str):
    message = refused(*line.split())
    assert reason in message
    assert message.startswith("jaxserve: ")
    assert message.endswith("; see jaxserve serve --help\n")


def test_value_that_is_a_command_line_may_begin_with_an_option():
    command = get_command(app).commands["sim"].commands["plan"]
    given = command.make_context("plan", ["--serve-args", "--memory-gb=2"]).params
    assert given["serve_args"] == "--memory-gb=2"


def test_texts_that_begin_like_json_stay_as_they_are():
    command = get_command(app).commands["generate"]
    given = command.make_context("generate", ["--stop", "[INST]", "--stop", '["a"]', "a prompt"]).params
    assert (given["stop"], given["prompt"]) == (["[INST]", '["a"]'], "a prompt")


def test_commands_in_the_terminal_take_options_of_requests_by_their_other_names():
    command = get_command(app).commands["chat"]
    given = command.make_context("chat", ["-m", "M", "-n", "5", "--temp", "0", "--repeat-penalty=1.1"]).params
    assert (given["model"], given["max_tokens"], given["temperature"]) == ("M", 5, 0.0)
    assert given["repetition_penalty"] == 1.1
    assert command.make_context("chat", ["M"]).params["model"] == "M"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("run mistral", "use jaxserve chat MODEL"),
        ("list", "use jaxserve models"),
        ("help serve", "use jaxserve --help"),
        ("models rm x", "use jaxserve models remove NAME"),
        ("models ls", "use jaxserve models;"),
    ],
)
def test_commands_of_other_engines_are_explained(line: str, advice: str):
    done = CliRunner().invoke(app, line.split(), prog_name="jaxserve")
    assert done.exit_code == 2
    assert f"no such command {line.removeprefix('models ').split()[0]!r}: {advice}" in done.stderr


def test_commands_without_an_engine_suggest_their_own_options_alone():
    for option, said in (("--decision", "did you mean '--decisions'?"), ("--foo", "no such option: --foo;")):
        done = CliRunner().invoke(app, ["plan", "show", option], prog_name="jaxserve")
        assert (done.exit_code, said in done.output) == (2, True)


def test_every_option_of_vllm_is_taken_or_explained():
    names = [name for name in VLLM.split() if f"--{name}" not in FLAGS]
    assert [name for name in names if name.replace("-", "_") not in COMMAND_LINE] == []


@pytest.mark.parametrize("name", FOREIGN)
def test_every_entry_of_the_table_does_what_it_says_on_the_command_line(name: str, capsys):
    other, flag = COMMAND_LINE[name], f"--{name.replace('_', '-')}"
    value = [{"uvicorn_log_level": "debug", "torch_dtype": "float32"}.get(name, "1")] if takes_value(name) else []
    if other.same:
        given = parsed(flag, *value)
        ours = parsed(*_in_our_words(other.same, *value)) if other.value is None else {other.same: other.value}
        assert given == ours
        assert given
    elif other.ignored and not other.accepts(True):
        assert parsed(flag, *(value or ["true"]), "M") == {"model": "M"}
        assert f"{flag} has no effect" in " ".join(capsys.readouterr().err.split())
    elif other.accepts(True):
        assert parsed(flag, "M") == {"model": "M"}
    else:
        assert flag in refused(flag, "x", "M") if takes_value(name) else refused(flag, "M")


def _in_our_words(field: str, *value: str) -> list[str]:
    option = next(each for each in SERVE.params if each.name == field)
    return [*([] if option.param_type_name == "argument" else option.opts[:1]), *value]


@pytest.mark.parametrize("short", sorted(SHORT))
def test_short_names_stand_for_entries_of_the_table(short: str):
    assert SHORT[short] in COMMAND_LINE


def test_reasons_name_options_that_exist():
    flags = {name.lstrip("-").replace("-", "_") for name in FLAGS}
    for name, other in COMMAND_LINE.items():
        assert set(re.findall(r"`(\w+)`", other.reason)) <= flags | KNOWN | {"model"}, name


def test_file_takes_and_explains_the_same_names(tmp_path, caplog):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "tensor-parallel-size: 2\nmax-model-len: 4k\ntrust-remote-code: true\nno-enable-prefix-caching: true\n"
        "uvicorn-log-level: critical\nallowed-origins: [https://a]\ndtype: half\nenable-auto-tool-choice: true\n"
    )
    engine, server = resolve(read_config(file), {})
    assert engine == EngineConfig(tp=2, max_model_len=4000, prefix_caching=False, dtype="float16")
    assert (server.log_level, server.cors_origins) == ("error", ("https://a",))
    assert [record.message for record in caplog.records if "has no effect" in record.message]
    file.write_text("disable-radix-cache: true\n")
    assert resolve(read_config(file), {})[0] == EngineConfig(prefix_caching=False)
    file.write_text("speculative-config: {method: ngram}\n")
    with pytest.raises(ConfigError, match=r"'speculative-config' in .*vllm\.yaml: there is no speculative decoding"):
        read_config(file)


def test_library_takes_the_same_values():
    assert EngineConfig(max_model_len="4k").max_model_len == 4000
    assert EngineConfig(max_model_len="1.001k").max_model_len == 1001  # exactly, although it has no binary fraction
    assert EngineConfig(max_model_len=-1) == EngineConfig(max_model_len="auto") == EngineConfig()
    with pytest.raises(ConfigError, match="use int8"):
        EngineConfig(kv_cache_dtype="fp8_e4m3")


def test_variables_of_other_servers_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    done = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "absent.yaml")])
    assert "VLLM_API_KEY: not read; see jaxserve serve --help, and JAXSERVE_API_KEY" in done.output
    assert "secret" not in done.output
