"""Options: YAML and command line resolve to the two configurations, and errors name the option."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from jaxserve import __version__
from jaxserve.cli.main import app
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.server.options import ENGINE_KEYS, RENAMED, SERVER_KEYS, read_config, resolve
from jaxserve.server.settings import ServerSettings
from tests.support.thorough import some

EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "serve").glob("*.yaml"))


def yaml_file(tmp_path, text: str) -> Path:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return file


def test_no_options_give_the_defaults():
    assert resolve({}, {"model": None, "port": None}) == (EngineConfig(), ServerSettings())


def test_command_line_overrides_the_file(tmp_path):
    file = yaml_file(tmp_path, "max-model-len: 100\nmax_num_seqs: 3\nport: 9\napi-key: [a, b]\nprefix-caching: false\n")
    engine, server = resolve(read_config(file), {"max_model_len": 200, "port": None, "served_model_name": ["x"]})
    assert (engine.max_model_len, engine.max_num_seqs, engine.prefix_caching) == (200, 3, False)
    assert (server.port, server.api_keys, server.served_model_names) == (9, ("a", "b"), ("x",))


def test_kv_cache_dtype_is_read_from_file_and_command_line(tmp_path):
    file = yaml_file(tmp_path, "kv-cache-dtype: int8\n")
    assert resolve(read_config(file), {})[0].kv_cache_dtype == "int8"
    assert resolve(read_config(file), {"kv_cache_dtype": "auto"})[0].kv_cache_dtype == "auto"


def test_names_of_vllm_mean_the_same_in_a_file(tmp_path):
    file = yaml_file(tmp_path, "tensor-parallel-size: 2\nblock_size: 32\n")
    engine, _ = resolve(read_config(file), {})
    assert (engine.tp, engine.page_size) == (2, 32)


def test_names_of_vllm_on_the_command_line_are_explained(tmp_path):
    for option, advice in (("--lora-modules", "merge them"), ("--quantization", "use --precision")):
        result = CliRunner().invoke(app, ["serve", option, "2"])
        assert (result.exit_code, advice in result.output) == (2, True)


def test_layer_precisions_are_resolved(tmp_path):
    file = yaml_file(tmp_path, "layer-precision: 0-3:bf16,4-:int4\nvariant: int8\nprecision: int3\n")
    engine, _ = resolve(read_config(file), {"precision": "int8"})
    assert (engine.precision, engine.layer_precision, engine.variants) == ("int8", "0-3:bf16,4-:int4", ("int8",))
    assert resolve(read_config(file), {"variant": ["int8", "int4"]})[0].variants == ("int8", "int4")


@pytest.mark.parametrize(
    ("options", "message"),
    some(
        [
            (("--precision", "int5"), "precision is 'int5': choose from auto, bfloat16, int8, int4, int3"),
            (("--layer-precision", "0-99:int4"), "layers are 0-7"),
            (("--layer-precision", "0-3:int4,2-5:int8"), "names layer 2 twice"),
            (("--variant", "int4", "--variant", "half"), "variants is 'half'"),
        ],
        2,
    ),
)
def test_invalid_precisions_are_reported_in_one_line(options, message):
    """Run the command in a separate interpreter, since it loads a model."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_single_api_key_needs_no_list(tmp_path):
    assert resolve(read_config(yaml_file(tmp_path, "api-key: secret")), {})[1].api_keys == ("secret",)


def test_unknown_option_is_named_with_the_most_similar(tmp_path):
    with pytest.raises(ConfigError, match=r"'max-modellen' in .*serve\.yaml: did you mean 'max-model-len'"):
        read_config(yaml_file(tmp_path, "max-modellen: 5"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "mapping"),
        ("a: [", "YAML"),
        ("5: 6", "mapping"),
        ("!!python/object/apply:os.getcwd []", "YAML"),
        ("extra: {}", "unknown option 'extra'"),
        ("quantization: awq", "use `precision`"),
        ("tp: 2\ntensor-parallel-size: 2", "'tp' is given twice"),
    ],
)
def test_file_that_is_not_a_mapping_of_options_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_config(yaml_file(tmp_path, text))


def test_missing_config_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        read_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "tp: two",
        "dtype: float64",
        "kv-cache-dtype: int9",
        "max-model-len: 1.5",
        "prefix-caching: maybe",
        "port: 70000",
        "api-key: ''",
    ],
)
def test_option_of_wrong_type_is_named(tmp_path, text):
    with pytest.raises(ConfigError, match=text.split(":")[0].replace("api-key", "API key")):
        resolve(read_config(yaml_file(tmp_path, text)), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory-gb: 4gb", "option 'memory-gb' is '4gb': it must be a number"),
        ("max-model-len: [1]", r"option 'max-model-len' is \[1\]: it must be a whole number"),
        ("prefix-caching: nein", "option 'prefix-caching' is 'nein': it must be true or false"),
        ("log-format: JSON", "option 'log-format' is 'JSON': it must be 'text' or 'json'"),
        ("host: 8", "option 'host' is 8: it must be a text: put it between quotes"),
        ("cors-origin: {a: b}", "option 'cors-origin' is {'a': 'b'}: it must be a text, or a list of texts"),
        ("api-key: 12345", "option 'api-key' must be a text: put it between quotes"),
        ("api-key: [a, 12345]", "option 'api-key' must be a text: put it between quotes"),
        ("admin-key: 12345", "option 'admin-key' must be a text: put it between quotes"),
        ("port: 1\nport: 2", "serve.yaml has 'port' twice, the second time in line 2"),
    ],
)
def test_values_of_other_types_are_explained_and_keys_not_shown(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"{message}$") as caught:
        resolve(read_config(yaml_file(tmp_path, text)), {})
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_example_configuration_resolves(file):
    resolve(read_config(file), {})


def test_example_configurations_exist():
    assert EXAMPLES


def test_every_serve_option_has_a_configuration_field():
    command = get_command(app).commands["serve"]
    options = {parameter.name for parameter in command.params} - {"config"}
    assert {RENAMED.get(option, option) for option in options} <= ENGINE_KEYS | SERVER_KEYS


def test_engine_and_server_configurations_share_no_name():
    assert not {field.name for field in fields(EngineConfig)} & SERVER_KEYS


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(app, arguments, env=environment)


def test_version_option_prints_the_version():
    assert run("--version").stdout == f"jaxserve {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_help_groups_the_options(command):
    result = run(command, "--help", COLUMNS="120", NO_COLOR="1")
    assert result.exit_code == 0
    assert all(group in result.stdout for group in ("Model", "Memory", "Parallelism"))


def test_unknown_command_line_option_is_refused():
    assert run("serve", "--max-modellen", "5").exit_code == 2


def test_mistake_in_the_file_is_reported_in_one_line(tmp_path):
    result = run("serve", "--config", str(yaml_file(tmp_path, "tpp: 2")))
    assert result.exit_code == 1
    assert "did you mean" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--api-key", ""], {}),
        ([], {"JAXSERVE_API_KEY": ""}),
        (["--admin-key", ""], {}),
        ([], {"JAXSERVE_ADMIN_KEY": ""}),
    ],
)
def test_empty_key_is_refused_at_start(arguments, environment):
    result = run("serve", "no-model", "--port", "0", *arguments, **environment)
    assert result.exit_code == 1
    assert "empty" in result.stderr
