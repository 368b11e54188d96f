"""Policies by name and from files, and the errors for invalid files."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.control.policies import (
    ACCURACY,
    INT8,
    PERFORMANCE,
    POLICY_NAMES,
    ManualPolicy,
    MorphPolicy,
    StaticPolicy,
    load_policy,
)
from jaxserve.core.errors import ConfigError
from tests.support.control import home_plan, machine

ORDER = tuple(range(16))
HOME, MACHINE = home_plan(), machine()
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "policies"


def test_policies_are_loaded_by_name() -> None:
    policies = [load_policy(name, MACHINE, ORDER, target=HOME) for name in POLICY_NAMES]
    assert [policy.name for policy in policies] == list(POLICY_NAMES)
    assert policies[:2] == [StaticPolicy(), ManualPolicy(HOME)]
    modes = [policy.settings for policy in policies[2:] if isinstance(policy, MorphPolicy)]
    assert modes == [ACCURACY, INT8, PERFORMANCE]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policy_file_equals_the_built_in_policy(name: str) -> None:
    by_name, by_file = (load_policy(source, MACHINE, ORDER) for source in (name, CONFIGS / f"{name}.yaml"))
    assert by_file.name == by_name.name
    if isinstance(by_name, MorphPolicy):
        assert isinstance(by_file, MorphPolicy)
        assert by_file.settings == by_name.settings


def test_morph_policy_file_names_every_setting() -> None:
    text = (CONFIGS / "morph.yaml").read_text()
    assert [name for name in vars(ACCURACY) if f"\n  {name}:" not in text] == []
    assert len(list(CONFIGS.iterdir())) == len(POLICY_NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: morf", "the key policy, which is one of static, manual, morph, morph-int8, morph-performance"),
        ("policy: morph\nsettins: {}", "it must have the key policy"),
        ("policy: static\nsettings: {slo_ttft: 1}", "static has no settings"),
        ("policy: morph\nsettings: {kv_useage: 0.8}", "unknown setting 'kv_useage': choose from precision, slo_ttft"),
        ("policy: morph\nsettings: {kv_usage: high}", "settings.kv_usage is 'high': it must be of type float"),
        ("policy: morph\nsettings: {entry_layers: 1.5}", "settings.entry_layers is 1.5: it must be of type int"),
        ("policy: morph\nsettings: {entry_layers: true}", "settings.entry_layers is True: it must be of type int"),
        ("policy: morph\nsettings: {few: 1}", "settings.few is 1: it must be of type bool"),
        ("policy: morph\nsettings: [1]", "it must be a mapping of names to values"),
        ("policy: morph\nsettings: {rest: null}", "settings.rest is None: it must be of type str"),
        ("policy: morph\nsettings: {slo_ttft: null}", "slo_ttft is inf: it must be finite"),
        ("policy: morph\nsettings: {kv_usage: 2}", "kv_usage is 2: it must be a share"),
        ("policy: morph\nsettings: {precision: bfloat16}", "precision is bfloat16: it must be one of int8, int4, int3"),
        ("policy: morph\nsettings: {rest: float32}", "rest is 'float32': it must be empty, or one of int8, int4, int3"),
        ("- 1", "it must have the key policy"),
        ("policy: [", "policy.yaml is not valid YAML"),
    ],
)
def test_error_for_an_invalid_policy_file_names_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_policy(path, MACHINE, ORDER)


def test_slo_given_with_a_policy_overrides_its_setting(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("policy: morph-performance\nsettings: {most_layers: 0.25, few: false}")
    policy = load_policy(tmp_path / "own.yaml", MACHINE, ORDER, slo_ttft=5.0)
    assert isinstance(policy, MorphPolicy)
    assert policy.settings == replace(PERFORMANCE, most_layers=0.25, few=False, slo_ttft=5.0)
    assert policy.slo_ttft == 5.0
    with pytest.raises(ConfigError, match="slo_ttft is inf: it must be finite"):
        load_policy("morph", MACHINE, ORDER, slo_ttft=float("inf"))


def test_unknown_policy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    for source in ("morf", tmp_path / "no.yaml", f"{tmp_path}/no.py:Own", f"{tmp_path}/own.py:Own"):
        with pytest.raises(ConfigError):
            load_policy(source, MACHINE, ORDER)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def Own(", "own.py:1 raised SyntaxError: '(' was never closed"),
        ("import nothing_like_this", "own.py:1 raised ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("class Own: pass", "Own(resources, swap_order) raised TypeError: Own() takes no arguments"),
        ("def Own(resources, order): return 1 / 0", "Own(resources, swap_order) raised ZeroDivisionError: division"),
        ("def Own(resources, order): return None", "what Own returns has no `name` that is a string"),
        ("class Own:\n def __init__(self, *given): self.name = 'own'", "what Own returns has no method init"),
        (
            "class Own:\n name = 'own'\n def __init__(self, *given): pass\n def init(self, plan): pass",
            "what Own returns has no method update",
        ),
        (
            "class Own:\n name = 'own'\n def __init__(self, *given): pass\n def init(self, plan): pass\n"
            " def update(self, plan): pass",
            "has a method update that cannot be called with (snapshot, plan, state): too many positional arguments",
        ),
    ],
)
def test_unusable_policy_class_gives_a_one_line_error(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(ConfigError) as error:
        load_policy(f"{tmp_path}/own.py:Own", MACHINE, ORDER)
    assert message in str(error.value)
    assert str(error.value).startswith(f"policy {tmp_path}/own.py")
