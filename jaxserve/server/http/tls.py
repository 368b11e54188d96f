"""TLS: the certificate that new connections get, read again when its files change."""

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass

from jaxserve.core.errors import ConfigError
from jaxserve.server.settings import ServerSettings

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0  # between two looks at the files
CLIENT_CERTIFICATES = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)  # by the option's value

Versions = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class _Files:
    """The files of a server's identity, and of the authorities that sign its clients' certificates."""

    certificate: str
    key: str  # may be the same file
    authorities: str | None
    client_certificates: ssl.VerifyMode
    password: str | None

    def versions(self) -> Versions:
        """Return what changes when a file is replaced. A link stands for the file that it leads to."""
        return tuple(_version(path) for path in (self.certificate, self.key, self.authorities) if path)

    def context(self) -> ssl.SSLContext:
        """Return a context with the files as they are now. Raise ConfigError, naming the option and the file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # a client could make the server compute at no cost of its own
        context.set_alpn_protocols(["http/1.1"])
        # Only to tell which of the two files is bad.
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.certificate, "--ssl-certfile")
        if "PRIVATE KEY-----" not in _read(self.key, "--ssl-keyfile"):
            raise ConfigError(f"{self.key} holds no private key in PEM format (--ssl-keyfile)")
        try:
            context.load_cert_chain(self.certificate, self.key, self._password)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            if reason == "KEY_VALUES_MISMATCH":
                reason = f"it is not the key of the certificate in {self.certificate}"
            raise ConfigError(f"{self.key}: {reason} (--ssl-keyfile)") from error
        if self.authorities is not None:
            _load_authorities(context, self.authorities, "--ssl-ca-certs")
        context.verify_mode = self.client_certificates
        return context

    def _password(self) -> str:
        # Without a function, OpenSSL would ask for the password in the terminal.
        if self.password is None:
            raise ConfigError(f"{self.key} needs a password (JAXSERVE_SSL_KEYFILE_PASSWORD)")
        return self.password


class Certificates:
    """The TLS context for new connections. While files that have changed cannot be used, it stays as it was."""

    def __init__(self, settings: ServerSettings):
        """Load the files. Raise ConfigError, naming the option and the file, if they cannot be used."""
        assert settings.ssl_certfile is not None
        certificate = str(settings.ssl_certfile)
        self._files = _Files(
            certificate,
            certificate if settings.ssl_keyfile is None else str(settings.ssl_keyfile),
            None if settings.ssl_ca_certs is None else str(settings.ssl_ca_certs),
            CLIENT_CERTIFICATES[settings.ssl_cert_reqs],
            settings.ssl_keyfile_password,
        )
        self._versions = self._files.versions()  # before they are read: a later change is then seen
        self.context = self._files.context()

    async def follow_files(self) -> None:
        """Load the files again whenever they have changed, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Load the files if they have changed. Log one error for each change after which they cannot be used."""
        if (versions := self._files.versions()) == self._versions:
            return
        self._versions = versions
        try:
            self.context = self._files.context()
        except ConfigError as error:
            logger.error("new connections still get the earlier certificate: %s", error)
        else:
            logger.info("new connections get the certificate that is in %s now", self._files.certificate)


def certificates(settings: ServerSettings) -> Certificates | None:
    """Return the certificates for a server, or None for one without TLS. Raise ConfigError if they cannot be used."""
    return None if settings.ssl_certfile is None else Certificates(settings)


def _version(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: str, option: str) -> str:
    try:
        with open(path, encoding="latin-1") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} ({option})") from error


def _load_authorities(context: ssl.SSLContext, path: str, option: str) -> None:
    """Add a file's certificates to those that a context trusts. Raise ConfigError if it has none."""
    text = _read(path, option)
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{path} holds no certificate in PEM format ({option})") from error
