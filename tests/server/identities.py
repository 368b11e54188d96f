"""Certificates for tests of TLS: an authority of the test's own, and what it signs."""

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Identity:
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority whose certificate is in the file `certificates`."""

    def __init__(self, folder: Path):
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority")
        signed = self._builder(self._name, self._key)
        signed = signed.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificates = self._write("authority.pem", signed)

    def sign(self, name: str, password: bytes | None = None) -> Identity:
        """Return a new identity for this machine, in files that are replaced if they are there."""
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        signed = self._builder(_name(name), key).add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        certificate, file = self._write(f"{name}.pem", signed), self._folder / f"{name}.key"
        encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        return Identity(certificate, file)

    def trusted(self) -> ssl.SSLContext:
        """Return the context of a client that trusts this authority alone."""
        return ssl.create_default_context(cafile=self.certificates)

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - DAY,
            not_valid_after=now + DAY,
        )

    def _write(self, name: str, builder: x509.CertificateBuilder) -> Path:
        file = self._folder / name
        file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return file


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
