"""/admin: access, responses, and changes of plan and policy."""

import asyncio
import json
import re

import httpx
import pytest
import yaml
from hypothesis import given, settings as hypothesis_settings, strategies as st
from starlette.testclient import TestClient

from jaxserve.core.errors import ConfigError
from jaxserve.server.app import create_app
from jaxserve.server.routes.admin import MAX_PLAN_BYTES
from jaxserve.server.schemas.admin import Decisions, EditedPlan, Ledger, PlanDocument, Sample, Status
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.fake_control import POLICIES, FakeControl
from tests.server.serving import serving

SHOWN = ("/admin/plan", "/admin/policy", "/admin/status", "/admin/decisions", "/admin/ledger")
ADMIN = {"authorization": "Bearer admin-schlüssel".encode()}
YAML = {"content-type": "application/yaml"}


def client(settings: ServerSettings | None = None, *, host: str = "127.0.0.1:8000", **fake) -> TestClient:
    """Return a client of an app in this process, which has a fake control plane unless `fake` overrides it."""
    engine = FakeClient(**{"control": FakeControl(), **fake})
    return TestClient(create_app(engine, settings or ServerSettings()), base_url=f"http://{host}")


def control_of(http: TestClient) -> FakeControl:
    return http.app.state.server.loaded.control


# -- changes of the instances by hand


def test_edit_of_the_plan_answers_the_plan_that_the_engine_changes_to():
    with client() as http:
        answer = http.patch("/admin/plan", json={"action": "drain", "instances": ["0"]})
        assert answer.status_code == 202
        EditedPlan.model_validate(answer.json())
        assert answer.json()["wanted"]["instances"][0]["draining"] is True
        assert answer.json()["status"]["policy"] == "manual"
        assert http.get("/admin/status").json()["instance_states"][0]["draining"] is True


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"action": "merge", "instances": ["0", "1"]}, "merge 0 1 is impossible here"),
        ({"action": "shuffle"}, "action"),
        ({"instances": ["0"]}, "action"),
        ({"action": "split", "instances": ["0"], "into": 1}, "into"),
        ({"action": "merge", "instances": ["0", "1"], "into": 2}, "into has no effect on 'merge'"),
        ({"action": "drain", "instances": ["0"], "devices": [1]}, "devices has no effect on 'drain'"),
        ({"action": "add", "devices": [-1]}, "devices"),
        ({"action": "add", "device": 1}, "device"),
        ({"action": "drain", "instances": "0"}, "instances"),
    ],
)
def test_impossible_edit_of_the_plan_is_refused_with_the_reason(body, message):
    with client() as http:
        answer = http.patch("/admin/plan", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert control_of(http).plan is None


def test_edit_of_the_plan_takes_json_alone():
    with client() as http:
        answer = http.patch("/admin/plan", content=b"action: drain", headers=YAML)
        assert answer.status_code == 415


# -- access


@pytest.fixture(scope="module")
def guarded():
    settings = ServerSettings(api_keys=("api-key",), admin_key="admin-schlüssel", host="0.0.0.0")
    with serving(FakeClient(control=FakeControl()), settings) as address, httpx.Client(base_url=address.url) as http:
        yield http


@pytest.mark.parametrize("path", SHOWN)
def test_admin_key_opens_operator_paths(guarded, path):
    assert guarded.get(path, headers=ADMIN).status_code == 200


@pytest.mark.parametrize("authorization", [None, b"Bearer api-key", b"Bearer", b"Basic admin", b"Bearer admin-schl"])
@pytest.mark.parametrize("path", [*SHOWN, "/admin", "/admin/", "/admin/nothing", "/dashboard/events"])
def test_other_keys_do_not_open_operator_paths(guarded, path, authorization):
    answer = guarded.get(path, headers={} if authorization is None else {"authorization": authorization})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_admin_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "schl" not in answer.text


@pytest.mark.parametrize(
    "path", ["//admin/plan", "/v1/../admin/plan", "/admin%2fplan", "/ADMIN/plan", "/dashboard/events/"]
)
def test_other_spellings_of_operator_paths_stay_closed(guarded, path):
    assert guarded.get(path, follow_redirects=True).status_code in (401, 404)


def test_admin_key_does_not_open_api_paths(guarded):
    assert guarded.get("/v1/models", headers=ADMIN).status_code == 401


def test_change_without_key_is_refused_before_its_body_is_read(guarded):
    answer = guarded.put("/admin/plan", content=b"x" * 5_000_000, headers=YAML)
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "settings",
    [
        ServerSettings(host="0.0.0.0"),
        ServerSettings(host="::"),
        ServerSettings(host="example.org"),
        ServerSettings(api_keys=("api-key",)),
    ],
    ids=lambda settings: repr(settings),
)
@pytest.mark.parametrize("path", [*SHOWN, "/dashboard/events"])
def test_without_admin_key_only_a_local_server_without_api_keys_answers(settings, path):
    answer = client(settings).get(path, headers={"authorization": "Bearer api-key"})
    assert answer.status_code == 403
    assert "--admin-key" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
def test_loopback_host_needs_no_admin_key(host):
    assert client(ServerSettings(host=host)).get("/admin/status").status_code == 200


@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1.example.org:8000", "10.0.0.1", "localhost.example"])
def test_foreign_host_name_without_admin_key_is_refused(host):
    answer = client(host=host).get("/admin/status")
    assert answer.status_code == 403
    assert "host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["", "[", "[::1", "@", "ü"])
def test_malformed_host_header_is_refused(host):
    answer = client().get("/admin/status", headers={"host": host.encode()})
    assert answer.status_code in (400, 403)


@pytest.mark.parametrize("origin", ["https://app.example", "null", "", "http://[", "https://127.0.0.1.example"])
def test_foreign_origin_is_refused_even_if_cors_allows_it(origin):
    http = client(ServerSettings(cors_origins=("*",)))
    for answer in (
        http.get("/admin/status", headers={"origin": origin}),
        http.put("/admin/policy", json={"policy": "static"}, headers={"origin": origin}),
    ):
        assert answer.status_code == 403
    assert control_of(http).policy == "morph"
    local = {"origin": "http://localhost:8000"}
    assert http.put("/admin/policy", json={"policy": "static"}, headers=local).status_code == 202


def test_admin_key_does_not_appear_in_the_settings_representation():
    settings = ServerSettings(admin_key="very-secret")
    assert "very-secret" not in repr(settings)
    assert "very-secret" not in str(settings)


@pytest.mark.parametrize(("key", "keys"), [("", ()), ("  ", ()), ("same", ("other", "same"))])
def test_empty_or_shared_admin_key_is_refused(key, keys):
    with pytest.raises(ConfigError, match="admin"):
        ServerSettings(admin_key=key, api_keys=keys)


# -- responses


def test_responses_match_their_openapi_schemas():
    http = client()
    PlanDocument.model_validate(http.get("/admin/plan").json(), strict=True)
    Status.model_validate(http.get("/admin/status").json(), strict=True)
    Decisions.model_validate(http.get("/admin/decisions").json(), strict=True)
    ledger = Ledger.model_validate(http.get("/admin/ledger").json(), strict=True)
    assert ledger.used == sum(ledger.entries.values()) == ledger.budget - ledger.free
    Sample.model_validate(control_of(http).history()[-1])


@pytest.mark.parametrize(
    ("accept", "query", "form"),
    [
        (None, "", "json"),
        ("*/*", "", "json"),
        ("application/yaml", "", "yaml"),
        ("text/html, text/yaml;q=0.9", "", "yaml"),
        ("application/json, application/yaml", "", "json"),
        ("application/yaml", "?format=json", "json"),
        ("application/json", "?format=yaml", "yaml"),
    ],
)
def test_plan_is_returned_as_json_or_yaml_as_asked(accept, query, form):
    http = client()
    answer = http.get(f"/admin/plan{query}", headers={} if accept is None else {"accept": accept})
    assert answer.headers["content-type"].startswith(f"application/{form}")
    assert yaml.safe_load(answer.text) == control_of(http).plan_dict()


def test_decisions_with_limit_returns_the_latest():
    http = client()
    everything = http.get("/admin/decisions").json()["decisions"]
    assert len(everything) == 5
    assert http.get("/admin/decisions?limit=2").json()["decisions"] == everything[-2:]


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "1.5", "9" * 5000])
def test_invalid_decisions_limit_is_named(limit):
    error = client().get(f"/admin/decisions?limit={limit}").json()["error"]
    assert error["param"] == "limit"
    assert error["message"].startswith("limit is ")
    assert re.search("it must be (an integer|at least 1|at most 1000)$", error["message"])


def test_unknown_plan_format_is_named():
    answer = client().get("/admin/plan?format=xml")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "format"


@pytest.mark.parametrize("path", SHOWN)
def test_engine_without_control_plane_returns_409(path):
    answer = client(control=None).get(path)
    assert answer.status_code == 409
    assert "no control plane" in answer.json()["error"]["message"]


def test_admin_paths_while_loading_return_503():
    http = TestClient(create_app(None, ServerSettings()), base_url="http://localhost")
    assert http.get("/admin/plan").status_code == 503


def test_plan_while_draining_can_be_read_but_not_changed():
    http = client()
    http.app.state.server.start_draining()
    assert http.get("/admin/plan").status_code == 200
    assert http.put("/admin/policy", json={"policy": "static"}).status_code == 503


# -- changes


def test_plan_round_trips_as_json_and_yaml():
    http = client()
    text = http.get("/admin/plan?format=yaml").text.replace("int4", "int8")
    for body in ({"content": text, "headers": YAML}, {"json": yaml.safe_load(text)}):
        answer = http.put("/admin/plan", **body)
        assert answer.status_code == 202, answer.text
        assert answer.json()["policy"] == "manual"
        assert yaml.safe_load(control_of(http).asked[-1]) == yaml.safe_load(text)
        assert "int8" in http.get("/admin/plan?format=yaml").text


def test_plan_is_parsed_off_the_event_loop():
    class Slow(FakeControl):
        def set_plan(self, yaml_text: str) -> None:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            super().set_plan(yaml_text)

    http = client(control=Slow())
    assert http.put("/admin/plan", json=http.get("/admin/plan").json()).status_code == 202


@pytest.mark.parametrize("policy", POLICIES)
def test_put_policy_changes_the_policy(policy):
    http = client()
    answer = http.put("/admin/policy", json={"policy": policy})
    assert answer.status_code == 202
    assert http.get("/admin/status").json()["policy"] == policy


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"5", b"a: [", b"\xff\xfe", b"a: &x [1]\nb: *x", b"!!python/object/apply:os.getcwd []", b"[" * 30_000,
     b"a: 2001-99-99", b"a: " + b"9" * 5000, b"{? {a: 1} : 2}", b"instances: []", b"version: 1", b"a: 1\n--- \nb: 2"],
)  # fmt: skip
def test_invalid_plan_returns_400_and_changes_nothing(body):
    http = client()
    before = http.get("/admin/plan").json()
    answer = http.put("/admin/plan", content=body, headers=YAML)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "plan"
    assert http.get("/admin/plan").json() == before


def test_plan_that_does_not_fit_returns_400_with_the_limit():
    http = client()
    plan = http.get("/admin/plan").json()
    plan["instances"][0]["stages"][0]["kv_pages"] = 10**9
    answer = http.put("/admin/plan", json=plan)
    assert answer.status_code == 400
    assert "1000000000 KV pages, at most" in answer.json()["error"]["message"]


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_plan_of_another_media_type_returns_415(media_type):
    http = client()
    for path in ("/admin/plan", "/admin/policy"):
        assert http.put(path, content=b"{}", headers={"content-type": media_type}).status_code == 415


def test_plan_above_the_size_limit_returns_413():
    assert client().put("/admin/plan", content=b"#" * (MAX_PLAN_BYTES + 1), headers=YAML).status_code == 413


@pytest.mark.parametrize(
    "policy", ["", "nothing", "../../etc/passwd", "/etc/passwd", "x.yaml", "a" * 65, None, 5, ["morph"]]
)
def test_unknown_policy_name_or_path_is_refused(policy):
    http = client()
    answer = http.put("/admin/policy", json={"policy": policy})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "policy"
    assert control_of(http).policy == "morph"


def test_refused_admin_request_is_not_counted_as_rejection():
    http = client()
    http.put("/admin/policy", json={"policy": "nothing"})
    assert 'reason="invalid"} 0.0' in http.get("/metrics").text


@pytest.fixture(scope="module")
def shared():
    return client()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text()
            | st.sampled_from(["version", "instances", "stages", "devices", "kv_pages", "blocks", "layers.0-3"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@hypothesis_settings(max_examples=150, deadline=None)
@given(body=values)
def test_arbitrary_plan_is_accepted_or_refused_without_500(shared, body):
    answer = shared.put("/admin/plan", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (202, 400), answer.text


@hypothesis_settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200) | st.text(alphabet="[]{}:,-?!&*#|>'\"% \n\tab1", max_size=60))
def test_arbitrary_yaml_is_accepted_or_refused_without_500(shared, text):
    assert shared.put("/admin/plan", content=text.encode(), headers=YAML).status_code in (202, 400)


def test_openapi_has_the_admin_schemas():
    description = client().get("/openapi.json").json()
    paths, schemas = description["paths"], description["components"]["schemas"]
    assert set(paths["/admin/plan"]["put"]["requestBody"]["content"]) == {"application/yaml", "application/json"}
    assert {"PlanDocument", "Status", "Ledger", "Decisions", "PolicyBody"} <= schemas.keys()
    assert not any(path.startswith("/dashboard") for path in paths)
