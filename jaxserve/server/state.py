"""ServerState: what the routes of one app share: the engine once it is loaded, the settings and the wall clock."""

import time
import uuid
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

from fastapi import Depends, Request

from jaxserve.core.errors import EngineStopped, RequestError
from jaxserve.engine.client import ControlClient, EngineClient
from jaxserve.server.settings import ServerSettings


class Phase(StrEnum):
    """Where the server is in its life; the values are what /ready says."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class NoControlPlane(RequestError):
    """The engine has no plan that could be shown or changed."""

    status = 409


class ServerState:
    """Mutated by `attach` (the engine is loaded) and `start_draining` only."""

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
        self._client: EngineClient | None = None
        if client is not None:
            self.attach(client)

    def attach(self, client: EngineClient) -> None:
        """Mutates: requests are served from now on."""
        self._client = client
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    def start_draining(self) -> None:
        """Mutates: new requests are refused from now on."""
        self.phase = Phase.DRAINING

    @property
    def loaded(self) -> EngineClient | None:
        """The engine, or None while it is loading."""
        return self._client

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.phase is Phase.SERVING and self._client is not None and self._client.ready

    def client(self) -> EngineClient:
        """The engine for a new request. Raises EngineStopped while loading or draining."""
        if self._client is None or self.phase is Phase.LOADING:
            raise EngineStopped("the model is still loading")
        if self.phase is Phase.DRAINING:
            raise EngineStopped("the server is shutting down")
        return self._client

    def control(self) -> ControlClient:
        """The engine's control plane, also while draining. Raises EngineStopped while loading, or NoControlPlane."""
        if self._client is None:
            raise EngineStopped("the model is still loading")
        control = self._client.control
        if control is None:
            raise NoControlPlane("this engine has no control plane: its plan cannot change while it serves")
        return control

    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served, the one to show first."""
        return self.settings.served_model_names or (self.client().info.name,)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFound if `name` is not served; None stands for the default."""
        names = self.model_names()
        if name is None or name in names:
            return name or names[0]
        raise ModelNotFound(
            f"the model {name[:200]!r} is not served here", field="model", value=name[:200], limit=", ".join(names)
        )

    def timestamp(self) -> int:
        """Seconds since the epoch."""
        return int(self.wall_clock())


async def get_state(request: Request) -> ServerState:  # async: FastAPI sends others through a thread
    """FastAPI dependency: the app's state."""
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(get_state)]


def new_id(prefix: str) -> str:
    """A unique id of a response, e.g. "chatcmpl-..."."""
    return f"{prefix}-{uuid.uuid4().hex}"
