"""Policies of a user's own: what they declare, and the errors for those that cannot work."""

import re
from pathlib import Path

import pytest

from jaxserve.control import PlanInForce
from jaxserve.control.controller import Controller
from jaxserve.control.policies import ACCURACY, MorphPolicy, QualityLoss, load_policy, precisions_of
from jaxserve.core.errors import ConfigError
from tests.sim.worlds import world
from tests.support.control import VirtualActuator, home_plan, machine

ORDER = tuple(range(16))
HOME, MACHINE = home_plan(), machine()
OWN = """
class Own:
    name = "own"
    precisions = ("int8",)

    def __init__(self, resources, order):
        self.order = order

    def init(self, plan):
        return None

    def update(self, snapshot, plan, state):
        raise NotImplementedError
"""


def own(folder: Path, code: str = OWN, name: str = "Own") -> str:
    (folder / "own.py").write_text(code)
    return f"{folder}/own.py:{name}"


def test_declared_precisions_are_prepared_without_an_option(tmp_path: Path) -> None:
    assert precisions_of(own(tmp_path)) == ("int8",)
    assert world(0).cluster(own(tmp_path)).memory.variants == ("int8", "bfloat16")


def test_policy_that_declares_nothing_gets_int4_or_what_the_options_name(tmp_path: Path) -> None:
    source = own(tmp_path, OWN.replace('precisions = ("int8",)', "pass"))
    assert precisions_of(source) is None
    assert world(0).cluster(source).memory.variants == ("int4", "bfloat16")
    assert world(0).cluster(source, variants=("int3",)).memory.variants == ("int3", "bfloat16")


def test_function_that_returns_a_policy_can_declare_precisions(tmp_path: Path) -> None:
    source = own(
        tmp_path,
        f"{OWN}\ndef made(resources, order): return Own(resources, order)\nmade.precisions = ('int4',)",
        "made",
    )
    assert precisions_of(source) == ("int4",)


def test_subclass_of_morph_needs_what_accuracy_mode_needs(tmp_path: Path) -> None:
    code = "from jaxserve.control.policies import MorphPolicy\nclass Own(MorphPolicy): pass"
    assert precisions_of(own(tmp_path, code)) == ACCURACY.precisions
    policy = load_policy(own(tmp_path, code), MACHINE, ORDER)
    assert isinstance(policy, MorphPolicy)
    assert policy.settings == ACCURACY


def test_subclass_of_morph_with_other_settings_declares_its_precisions(tmp_path: Path) -> None:
    code = """
from jaxserve.control.policies import INT8, MorphPolicy

class Own(MorphPolicy):
    precisions = INT8.precisions

    def __init__(self, resources, order):
        super().__init__(resources, order, INT8, name="mine")
"""
    assert precisions_of(own(tmp_path, code)) == ("int8",)
    assert load_policy(own(tmp_path, code), MACHINE, ORDER).name == "mine"


def test_file_runs_once_however_often_its_policy_is_made(tmp_path: Path) -> None:
    source = own(tmp_path, f"open({str(tmp_path / 'runs')!r}, 'a').write('.')\n{OWN}")
    precisions_of(source)
    for _ in range(3):
        load_policy(source, MACHINE, ORDER)
    assert (tmp_path / "runs").read_text() == "."


def test_changed_file_runs_again(tmp_path: Path) -> None:
    assert precisions_of(own(tmp_path)) == ("int8",)
    assert precisions_of(own(tmp_path, OWN.replace("int8", "int4"))) == ("int4",)


@pytest.mark.parametrize("declared", ['"int8"', '("bfloat16",)', "(8,)", "3"])
def test_declared_precisions_that_are_none_are_refused(tmp_path: Path, declared: str) -> None:
    source = own(tmp_path, OWN.replace('("int8",)', declared))
    with pytest.raises(ConfigError, match=r"precisions is .*: it must be a tuple of int8, int4, int3"):
        precisions_of(source)


def test_policies_that_change_no_layer_need_no_precision() -> None:
    assert precisions_of("static") == precisions_of("tp_transform") == ()
    assert precisions_of("manual") is None, "an operator may ask for any precision"
    assert precisions_of("tp_transform+morph") == precisions_of("morph")


def test_policy_for_all_instances_at_once_is_told_what_changed(tmp_path: Path) -> None:
    source = own(tmp_path, OWN.replace("snapshot,", "snapshots,"))
    with pytest.raises(
        ConfigError, match="`snapshots`, those of all instances, but a policy decides for one instance now"
    ):
        load_policy(source, MACHINE, ORDER)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise SystemExit(3)", "own.py:1 raised SystemExit: 3"),
        ("\nx = = 2", "own.py:2 raised SyntaxError: invalid syntax"),
        ("def Own(resources, order):\n    return order.nothing", "own.py:2: Own(resources, swap_order) raised Attr"),
    ],
)
def test_error_in_a_file_names_the_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_policy(own(tmp_path, text), MACHINE, ORDER)


def test_precision_that_was_not_prepared_is_named_with_the_option(tmp_path: Path) -> None:
    source = own(tmp_path, OWN.replace("int8", "int3"))
    message = f"changes layers to int3, but the engine was started without int3: start it with --policy {source}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_policy(source, MACHINE, ORDER)


def test_policy_that_cannot_begin_is_refused_at_the_start(tmp_path: Path) -> None:
    policy = load_policy(own(tmp_path, OWN.replace("return None", "return plan.nothing")), MACHINE, ORDER)
    in_force = PlanInForce(HOME)
    with pytest.raises(ConfigError, match=r"policy own: init raised AttributeError: .*nothing"):
        Controller(in_force, policy, MACHINE, {"0": VirtualActuator(in_force)})


def test_floor_of_quality_is_refused_for_a_policy_that_cannot_hold_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_quality_loss has no effect on .*own\.py:Own: choose one of morph"):
        load_policy(own(tmp_path), MACHINE, ORDER, max_quality_loss=0.1, loss=QualityLoss({}))
