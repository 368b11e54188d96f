"""`jaxserve plan show|set|watch` against a running server."""

import json
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from jaxserve.cli.main import app
from jaxserve.cli.plan_view import LiveView, overview, seconds_text, size_text
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.fake_control import FIRST, NOTE, FakeControl, control_in_burst
from tests.server.process import ROOT
from tests.server.serving import serving

KEY = "schlüssel"


@pytest.fixture
def control():
    return FakeControl(lambda: float(FIRST + 20))


@pytest.fixture
def run(control):
    """Return a function that runs `jaxserve plan ...` with a server's address and key in the environment."""
    with serving(FakeClient(control=control), ServerSettings(admin_key=KEY)) as address:
        environment = {"JAXSERVE_URL": address.url, "JAXSERVE_ADMIN_KEY": KEY, "COLUMNS": "160", "NO_COLOR": "1"}
        yield lambda *arguments, **more: CliRunner().invoke(app, ["plan", *arguments], env=environment, **more)


def test_plan_show_prints_plan_ledger_and_decisions(run):
    shown = run("show", "--decisions", "2").stdout
    assert "policy morph" in shown
    assert "layers.5-14" in shown
    assert "workspace" in shown
    assert NOTE in " ".join(shown.split())
    assert shown.count("✓ done") == 2


def test_plan_show_output_is_accepted_by_plan_set(run, control, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(run("show", "--format", "yaml").stdout.replace("layers.5-14: int4", "layers.5-14: int8"))
    done = run("set", str(file))
    assert done.exit_code == 0, done.stderr
    assert "manual" in done.stdout
    assert control.plan.instances[0].layer_precisions[5:15] == ("int8",) * 10
    piped = run("set", "-", input=run("show", "--format", "json").stdout)
    assert piped.exit_code == 0, piped.stderr
    assert yaml.safe_load(control.asked[-1])["instances"][0]["stages"][0]["blocks"]["layers.5-14"] == "int8"


def test_plan_show_json_prints_json(run, control):
    assert json.loads(run("show", "--format", "json").stdout) == control.plan_dict()


def test_plan_set_changes_the_policy(run, control):
    assert run("set", "--policy", "static").exit_code == 0
    assert control.policy == "static"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set"], "either a FILE"),
        (["set", "x.yaml", "--policy", "static"], "either a FILE"),
        (["set", "absent.yaml"], "cannot read absent.yaml: No such file"),
        (["set", "--policy", "nothing"], "unknown policy 'nothing': choose from static"),
        (["show", "--url", "ftp://x"], "invalid address"),
        (["merge", "0", "1"], "merge 0 1 is impossible here"),
        (["split", "4", "--into", "3"], "split 4 is impossible here (3, None)"),
        (["remove", "2", "3"], "remove 2 3 is impossible here"),
        (["add", "--devices", "2,3"], "add  is impossible here (None, [2, 3])"),
        (["add", "--devices", "2-3"], "invalid devices '2-3': give numbers with commas in between"),
        (["show", "--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1"),
        (["show", "--admin-key", "wrong"], "(--admin-key or JAXSERVE_ADMIN_KEY)"),
        (["watch", "--admin-key", "wrong"], "(--admin-key or JAXSERVE_ADMIN_KEY)"),
    ],
)
def test_plan_command_reports_mistakes_in_one_line(run, control, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert control.policy == "morph"


def test_plan_drain_waits_and_prints_the_outcome(run, control):
    done = run("drain", "0")
    assert done.exit_code == 0, done.stderr
    assert "the policy manual decides" in done.stdout
    assert "instance 0 on 0, draining" in done.stdout
    assert control.plan.instances[0].draining


def test_plan_change_that_fails_is_reported_with_the_reason(run, control):
    status, decision = control.status(), control.decisions(1)[0]
    failed = {"policy": "manual", "outcome": "failed: no memory", "time": status["time"] + 1}
    control.plan_dict = lambda: {"version": 1, "instances": []}  # it stays as it is
    control.decisions = lambda limit: [decision | failed]
    done = run("drain", "0")
    assert done.exit_code == 1
    assert "failed: no memory. The server tries again" in done.stderr


def test_plan_change_ends_when_another_policy_decides(run, control):
    control.plan_dict = lambda: {"version": 1, "instances": []}
    status = control.status
    control.status = lambda: status() | {"policy": "static"}
    done = run("drain", "0")
    assert done.exit_code == 1
    assert "not done: the policy static decides now" in done.stderr


def test_plan_change_ends_when_another_operator_has_asked_for_another_plan(run, control):
    control.plan_dict = lambda: {"version": 1, "instances": []}
    decision, reasons = control.decisions(1)[0], ["drain 0, policy morph -> manual", "drain 1, policy manual -> manual"]
    control.decisions = lambda limit: [decision | {"reason": f"by the operator: {reason}"} for reason in reasons]
    done = run("drain", "0")
    assert done.exit_code == 1
    assert "not done: another operator has decided otherwise (by the operator: drain 1" in done.stderr


def test_plan_change_need_not_be_waited_for(run, control):
    control.plan_dict = lambda: {"version": 1, "instances": []}
    assert run("drain", "0", "--no-wait").exit_code == 0


def test_plan_watch_says_where_instances_run(control):
    status = control_in_burst(2).status()
    state = {"draining": False, "tp": 2, "running": 1, "waiting": 0, "kv_usage": 0.5}
    status["instance_states"] = [
        state | {"name": "4", "devices": [0, 1]},
        state | {"name": "5", "devices": [2], "draining": True},
    ]
    status["waiting_room"] = {"requests": 3}
    from rich.console import Console

    console = Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(LiveView().update({"status": status, "samples": [], "decisions": []}).render())
    text = console.export_text()
    assert "instance 4 on 0, 1\n" in text
    assert "instance 5 on 2, draining" in text
    assert "3 requests wait that no instance can hold" in text


@pytest.mark.parametrize("text", ["a: [", "", "instances: []", "x"])
def test_plan_set_with_invalid_plan_reports_one_line(run, control, text):
    done = run("set", "-", input=text)
    assert done.exit_code == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert control.plan is None


def test_plan_watch_writes_a_line_a_second_into_a_pipe(run):
    lines = run("watch", "--count", "2").stdout.splitlines()
    assert len(lines) == 2
    for part in ("plan 11", "morph", "bfloat16 6, int4 10", "running 32", "(SLO 2 s)"):
        assert part in lines[0], lines[0]


def test_plan_watch_shows_text_of_the_server_without_markup(control):
    from rich.console import Console

    hostile = "[link=http://x]y[/link] [/nothing]"
    decisions = [control.decisions(1)[0] | {"reason": hostile}]
    status = control.status() | {"policy": hostile}
    console = Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(overview(status, control.plan_yaml(), decisions))
    event = {"status": status, "samples": control.history()[-1:], "decisions": decisions}
    console.print(LiveView().update(event).render())
    assert console.export_text().count(hostile) == 4


def test_watch_of_an_engine_without_samples(control):
    view = LiveView().update({"status": control.status(), "samples": [], "decisions": []})
    assert "steady" in view.line()
    view.render()


def test_watch_of_a_thousand_instances_shows_some_and_counts_all():
    from rich.console import Console

    status = control_in_burst(16, 16, num_instances=1000, precisions={"bfloat16": 15990, "int4": 10}).status()
    view = LiveView().update({"status": status, "samples": [], "decisions": []})
    assert "bfloat16 15990, int4 10" in view.line()
    console = Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(view.render())
    text = console.export_text()
    assert text.count("\nlayers ") == 8
    assert "and 992 more instances; layers of all: bfloat16 15990, int4 10" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (2_471_493_632, "2.47 GB"), (999_600_000, "1000 MB"), (34_210_816, "34.2 MB")],
)
def test_sizes_are_formatted_with_units(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.0142, "14.2 ms"), (1.5, "1.50 s"), (0.0, "0.00 ms")])
def test_seconds_are_formatted_with_units(seconds, text):
    assert seconds_text(seconds) == text


def test_plan_help_loads_neither_jax_nor_a_web_framework():
    code = (
        "import sys; from typer.testing import CliRunner; from jaxserve.cli.main import app\n"
        "assert CliRunner().invoke(app, ['plan', '--help']).exit_code == 0\n"
        "assert not {'jax', 'fastapi', 'httpx2', 'yaml'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
