# TLS: the certificate of a listener, and the certificates that https of others is verified against.

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx2

from servanda.errors import ContractError

VARIABLE = "SERVANDA_CA_FILE"
TRUST_HINT = f"{VARIABLE}=FILE trusts the certificates in FILE, such as those of your own CA, too"


def trusted(environ: Mapping[str, str] = os.environ) -> ssl.SSLContext:
    """What https is verified against: the certificates that this machine trusts, and those in
    the file that SERVANDA_CA_FILE names.

    Raises:
        ContractError: there are no certificates in that file.
    """
    context = httpx2.create_ssl_context()
    if file := environ.get(VARIABLE):
        try:
            context.load_verify_locations(cafile=file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ContractError(
                f"{VARIABLE} names {file}, and no certificates can be read from it: "
                f"{_reason(error)}",
                hint="it is a PEM file, with -----BEGIN CERTIFICATE----- before each of them",
            ) from None
    return context


def distrusted(error: BaseException | None) -> bool:
    """Whether a connection failed since the certificate of the other side is not trusted."""
    return by_tls(error, ssl.SSLCertVerificationError)


def by_tls(error: BaseException | None, kind: type[ssl.SSLError] = ssl.SSLError) -> bool:
    """Whether a connection failed in its handshake."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


class Certificate:
    """The certificate of a listener, with its private key.

    Args:
        chain: a PEM file: the certificate, and those between it and the root that clients trust.
        key: a PEM file; None: the key is in `chain`.

    Attributes:
        context: for the listener.  `read` changes what its next connections are shown.
        pinned: for a client of this very listener: it trusts the certificate and nothing else,
            whatever name it asks for.

    Raises:
        ContractError: a file cannot be read, or they do not belong together.
    """

    def __init__(self, chain: Path, key: Path | None = None) -> None:
        self._chain, self._key = chain, key or chain
        self.context = _of_listener()
        self.pinned = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.pinned.check_hostname = False
        # the certificate itself is the root, though another one signed it
        self.pinned.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self.read()

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((self._chain, self._key)))

    def read(self) -> None:
        """Read the files again, for connections that begin from now on.

        Raises:
            ContractError: as at the start; the certificate of before stays.
        """
        self._load(_of_listener())  # one that fails would leave the context with half of it
        self._load(self.context)
        self.pinned.load_verify_locations(cafile=str(self._chain))

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._chain, self._key, password=_no_password)
        except (OSError, ValueError) as error:
            for file in self.files:
                hint = "--tls-cert and --tls-key are PEM files"
                with ContractError.of_system(f"{file} cannot be read", hint=hint):
                    file.read_bytes()
            raise ContractError(
                f"{' and '.join(map(str, self.files))} are no certificate with its private key: "
                f"{_reason(error)}",
                hint="--tls-cert is a PEM file with the certificate, and with those that lead to "
                "its root; --tls-key is one with its private key, not encrypted",
            ) from None


def _of_listener() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)
