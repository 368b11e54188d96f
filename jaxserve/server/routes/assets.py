"""Files of the server's pages, with headers that let a page load nothing from elsewhere."""

from importlib.resources import files
from types import ModuleType

from fastapi import Response
from starlette.exceptions import HTTPException

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Assets:
    """The files of a package that browsers load, read once."""

    def __init__(self, package: ModuleType):
        found = (file for file in files(package).iterdir() if file.name.endswith(tuple(MEDIA_TYPES)))
        self._files = {file.name: file.read_bytes() for file in found}

    def response(self, name: str) -> Response:
        """Return a file by its name. Raise HTTPException (404) if there is none."""
        if name not in self._files:
            raise HTTPException(404)
        media_type = MEDIA_TYPES[name[name.rindex(".") :]]
        return Response(self._files[name], media_type=media_type, headers=HEADERS)
