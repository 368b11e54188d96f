"""The state that all routes of one app share: the engine once it is loaded, the settings and the wall clock."""

import difflib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import Depends, Request

from jaxserve.core.errors import ConfigError, EngineFailed, EngineStopped, NoTokenizer, RequestError
from jaxserve.core.template_variables import OPTIONAL_VARIABLES
from jaxserve.engine.client import ControlClient, EngineClient
from jaxserve.server.answers.answer_formats import AnswerFormats
from jaxserve.server.responses.store import ResponseStore
from jaxserve.server.settings import CHAT_TEMPLATE_KWARGS, MEBIBYTE, ServerSettings


class Phase(StrEnum):
    """The phases of a server's life, in their order. Probes answer with their values."""

    LOADING = "loading"
    SERVING = "serving"
    TERMINATING = "terminating"  # still serves, while probes tell balancers to send requests elsewhere
    DRAINING = "draining"


@dataclass(frozen=True)
class Condition:
    """The answer to probes: whether requests should be sent here, and whether the process makes progress."""

    status: str  # a phase, "stopped" or "failed"
    ready: bool
    live: bool
    reason: str = ""  # of a failure


class ModelNotFound(RequestError):
    """Raised when a request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class NoControlPlane(RequestError):
    """Raised when the engine has no plan that could be shown or changed."""

    status = 409


class ServerState:
    """The state of one server. `attach`, `terminate`, `start_draining` and the middleware `InFlight` change it."""

    def __init__(
        self,
        client: EngineClient | None,
        settings: ServerSettings,
        *,
        wall_clock: Callable[[], float] = time.time,
    ):
        self.settings = settings
        self.wall_clock = wall_clock
        self.phase = Phase.LOADING
        self.responses = ResponseStore(settings.max_stored_responses, int(settings.stored_responses_mb * MEBIBYTE))
        self.in_flight = 0  # requests that the engine works for
        self._client: EngineClient | None = None
        self._formats: AnswerFormats | None = None
        if client is not None:
            self.check_defaults(client)
            self.attach(client)

    def check_defaults(self, client: EngineClient) -> None:
        """Raise ConfigError if a variable of `default_chat_template_kwargs` is not one of the model's chat template.

        Variables of some models' templates that are set for every model are only left out.
        """
        defaults = self.settings.template_defaults
        if not defaults:
            return
        known = client.tokenizer.template_variables
        if unread := sorted(defaults.keys() - known - OPTIONAL_VARIABLES):
            nearest = difflib.get_close_matches(unread[0], sorted(known), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it reads {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(
                f"the model's chat template does not read {unread[0][:40]!r}: {hint} ({CHAT_TEMPLATE_KWARGS})"
            )

    def attach(self, client: EngineClient) -> None:
        """Set the loaded engine, and begin to serve requests."""
        self._client = client
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    def terminate(self) -> None:
        """Go on serving, but let probes say that this server is about to refuse requests."""
        self.phase = Phase.TERMINATING

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self.phase = Phase.DRAINING

    @property
    def loaded(self) -> EngineClient | None:
        """The engine, or None while it is loading."""
        return self._client

    def condition(self) -> Condition:
        """Return what probes tell.

        While it serves, an engine may fail or get stuck. All other phases end by themselves.
        """
        if self._client is None or self.phase is not Phase.SERVING:
            return Condition(self.phase.value, ready=False, live=True)
        try:
            self._client.check_health()
        except EngineFailed as error:
            return Condition("failed", ready=False, live=False, reason=str(error))
        if not self._client.ready:
            return Condition("stopped", ready=False, live=False)
        return Condition(self.phase.value, ready=True, live=True)

    def client(self) -> EngineClient:
        """Return the engine for a new request. Raise EngineStopped while loading or draining."""
        if self._client is None or self.phase is Phase.LOADING:
            raise EngineStopped("the model is still loading")
        if self.phase is Phase.DRAINING:
            raise EngineStopped("the server is shutting down")
        return self._client

    def loaded_client(self) -> EngineClient:
        """Return the engine, also while draining. Raise EngineStopped while loading."""
        if self._client is None:
            raise EngineStopped("the model is still loading")
        return self._client

    def control(self) -> ControlClient:
        """Return the engine's control plane, also while draining.

        Raise EngineStopped while loading, and NoControlPlane if the engine has none.
        """
        control = self.loaded_client().control
        if control is None:
            raise NoControlPlane("this engine has no control plane: its plan cannot change while it serves")
        return control

    def formats(self) -> AnswerFormats:
        """Return the formats of the model's answers. Raise NoTokenizer if the model has no tokenizer."""
        if self._formats is None:
            self._formats = AnswerFormats.of(self.settings, self.client().tokenizer)
        return self._formats

    def capabilities(self) -> list[str]:
        """Return what the model can do beyond completing tokens, as `AnswerFormats.capabilities` names it."""
        try:
            return self.formats().capabilities(self.client().tokenizer)
        except NoTokenizer:
            return []

    def model_names(self) -> tuple[str, ...]:
        """Return the names under which the model is served. Responses show the first one."""
        return self.settings.served_model_names or (self.client().info.name,)

    def check_model(self, name: str | None) -> str:
        """Return the name to answer with: `name`, or the default for None. Raise ModelNotFound if it is not served."""
        names = self.model_names()
        if name is None or name in names:
            return name or names[0]
        raise ModelNotFound(
            f"the model {name[:200]!r} is not served here: choose from {', '.join(names)}",
            field="model",
            value=name[:200],
            limit=", ".join(names),
        )

    def timestamp(self) -> int:
        """Return the wall-clock time in whole seconds since the epoch."""
        return int(self.wall_clock())


# Async, since FastAPI calls other dependencies in a thread.
async def get_state(request: Request) -> ServerState:
    """Return the app's state, as a FastAPI dependency."""
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(get_state)]


def new_id(prefix: str) -> str:
    """Return a unique id for a response, such as "chatcmpl-..."."""
    return f"{prefix}-{uuid.uuid4().hex}"
