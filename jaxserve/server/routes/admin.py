"""/admin: reading and changing the plan and the policy, with the admin key."""

import asyncio
from typing import Annotated, Any, Literal

import yaml
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.engine.client import ControlClient
from jaxserve.server.errors import json_response
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.admin import (
    Decisions,
    EditedPlan,
    Ledger,
    PlanDocument,
    PlanEditBody,
    PolicyBody,
    PolicyInForce,
    Status,
)
from jaxserve.server.state import State

JSON, YAML = "application/json", "application/yaml"
YAML_TYPES = frozenset({YAML, "application/x-yaml", "text/yaml", "text/x-yaml"})
MAX_DECISIONS = 1000
MAX_PLAN_BYTES = 4 << 20  # an instance takes a few hundred bytes, and a thousand where layers alternate
MAX_PLAN_DEPTH = 20  # levels of a plan's YAML; a valid plan has 7

# Those in C, where PyYAML has them: a plan of 1,000 instances takes seconds otherwise.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
YAML_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

router = APIRouter(prefix="/admin", tags=["admin"])
json_router = APIRouter(prefix="/admin", tags=["admin"], route_class=JsonRoute)


def documented(model: type[BaseModel], status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a response that is sent without going through `model`."""
    return {status: {"model": model}}


PLAN_SCHEMA = {"$ref": "#/components/schemas/PlanDocument"}
PLAN_BODY = {"requestBody": {"required": True, "content": {kind: {"schema": PLAN_SCHEMA} for kind in (YAML, JSON)}}}
PLAN_ANSWER = {
    200: {"model": PlanDocument, "content": {YAML: {"schema": {"type": "string"}}}, "description": "The plan in force."}
}


@router.get("/plan", response_model=None, responses=PLAN_ANSWER)
async def get_plan(request: Request, state: State, format: Literal["json", "yaml"] | None = None) -> Response:
    """Return the plan in force, as YAML if `format` or otherwise the header Accept asks for it."""
    control = state.control()
    headers = {"vary": "accept"}
    if (format or _accepted(request)) == "yaml":
        return Response(control.plan_yaml(), media_type=YAML, headers=headers)
    return json_response(control.plan_dict(), headers=headers)


@router.put("/plan", status_code=202, response_model=None, responses=documented(Status, 202), openapi_extra=PLAN_BODY)
async def put_plan(request: Request, state: State) -> Response:
    """Make a plan (YAML or JSON) the target of the policy `manual`.

    The engine changes to the plan while it serves requests.
    """
    control = _changeable(state)
    body = await request.body()
    if len(body) > MAX_PLAN_BYTES:
        raise HTTPException(413, f"the plan has {len(body)} bytes: the limit is {MAX_PLAN_BYTES}")
    text = await asyncio.to_thread(_plan_text, request.headers.get("content-type", ""), body)
    try:
        await asyncio.to_thread(control.set_plan, text)
    except ConfigError as error:
        raise RequestError(str(error), field="plan") from error
    return json_response(control.status(), 202)


@json_router.patch("/plan", status_code=202, response_model=None, responses=documented(EditedPlan, 202))
async def patch_plan(body: PlanEditBody, state: State) -> Response:
    """Change the instances: make the plan in force with a merge, split, drop or other action the target of `manual`.

    The engine changes to the plan while it serves requests.
    """
    control = _changeable(state)
    body.check()
    wanted = await asyncio.to_thread(
        control.edit_plan, body.action, body.instances, into=body.into, devices=body.devices
    )
    return json_response({"wanted": wanted, "status": control.status()}, 202)


@router.get("/policy", response_model=None, responses=documented(PolicyInForce))
async def policy(state: State) -> Response:
    """Return the policy that decides, with its settings and objectives."""
    return json_response(state.control().policy_in_force())


@json_router.put("/policy", status_code=202, response_model=None, responses=documented(Status, 202))
async def put_policy(body: PolicyBody, state: State) -> Response:
    """Let another policy decide from now on, or the same one with other settings. The plan in force stays."""
    control = _changeable(state)
    body.check()
    await asyncio.to_thread(control.set_policy, body.policy, body.settings)
    return json_response(control.status(), 202)


@router.get("/status", response_model=None, responses=documented(Status))
async def status(state: State) -> Response:
    """Return the current policy, plan version, memory, layers, KV pages and load."""
    return json_response(state.control().status())


@router.get("/decisions", response_model=None, responses=documented(Decisions))
async def decisions(state: State, limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 100) -> Response:
    """Return the latest decisions with their reasons and outcomes, newest last."""
    return json_response({"decisions": state.control().decisions(limit)})


@router.get("/ledger", response_model=None, responses=documented(Ledger))
async def ledger(state: State) -> Response:
    """Return the bytes of every ledger entry of the fullest device, the budget, and the bytes used on each device."""
    now = state.control().status()
    entries, budget = now["ledger"], now["budget"]
    used = sum(entries.values())
    free, devices = budget - used, now["devices"]
    return json_response({"budget": budget, "used": used, "free": free, "entries": entries, "devices": devices})


def _changeable(state: State) -> ControlClient:
    """Return the control plane. Raise EngineStopped while the server is loading or draining."""
    state.client()
    return state.control()


def _accepted(request: Request) -> str:
    """Return the first of "yaml" and "json" that the header Accept names, or "json"."""
    for entry in request.headers.get("accept", "").split(","):
        media_type = entry.partition(";")[0].strip().lower()
        if media_type in YAML_TYPES:
            return "yaml"
        if media_type == JSON:
            return "json"
    return "json"


def _plain_yaml(text: str) -> Any:
    """Return the value of a YAML text. Aliases, which can expand a short text to an enormous value, are refused."""
    depth = 0
    for event in yaml.parse(text, YAML_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed in a plan")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_PLAN_DEPTH:
            raise yaml.YAMLError(f"it has more than {MAX_PLAN_DEPTH} levels")
    return yaml.load(text, YAML_LOADER)


def _plan_text(content_type: str, body: bytes) -> str:
    """Return a plan as YAML that is safe to load. Raise HTTPException or RequestError if the body is not a plan."""
    media_type = content_type.partition(";")[0].strip().lower()
    try:
        if media_type == JSON:
            plan = from_json(body, allow_inf_nan=False)
        elif media_type in YAML_TYPES:
            plan = _plain_yaml(body.decode())
        else:
            raise HTTPException(415, f"the body must have the type {YAML} or {JSON} (header content-type)")
        if isinstance(plan, dict):
            return yaml.dump(plan, Dumper=YAML_DUMPER, sort_keys=False)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RequestError(f"the plan is not valid: {error.problem}{where}", field="plan") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"the plan is not valid: {error}", field="plan") from error
    raise RequestError("the plan must be a mapping with the key 'instances'", field="plan", value=plan)
