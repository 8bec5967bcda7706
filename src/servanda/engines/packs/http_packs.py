# A registry of packs behind a URL: read by GET, written by PUT where the server takes it; and the
# requests that the client of OCI registries makes too.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from servanda.engines.packs.pack_store import INDEX, joined
from servanda.engines.tls import TRUST_HINT, by_tls, distrusted, trusted
from servanda.errors import MeasurementError

_CONNECT_S, _SILENT_S = 10.0, 120.0
_PIECE = 1 << 20
_TRIES = 5  # of an index that others write meanwhile


class HttpClient:
    """Requests to one server; what goes wrong is a MeasurementError that names it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._client = httpx2.Client(
            verify=trusted(),
            follow_redirects=True,  # to the storage of a registry; digests are verified
            timeout=httpx2.Timeout(_SILENT_S, connect=_CONNECT_S),
            # few requests, so that a connection ends with its response
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    def ask(self, method: str, url: str, **more: Any) -> httpx2.Response:
        """A response that began; it is to be read and closed."""
        with self._reached():
            request = self._client.build_request(method, url, **more)
            return self._client.send(request, stream=True)

    def pieces(self, response: httpx2.Response) -> Iterator[bytes]:
        try:
            with self._reached():
                yield from response.iter_bytes(_PIECE)
        finally:
            response.close()

    def refused(self, response: httpx2.Response, what: str) -> MeasurementError:
        """The error of a status that was not expected."""
        status = response.status_code
        response.close()
        hint = "look at the server's log"
        if status in (401, 403):
            hint = "give the user and password that may do this; `docker login` keeps them for oci"
        elif status in (404, 405, 501):
            hint = "is this the address of a registry, and does it accept uploads?"
        return MeasurementError(f"{self.place}: {what} was answered with {status}", hint=hint)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            hint = "check the address and the network; a pack that was pulled before is read "
            hint += "without a network by its digest"
            if by_tls(error):
                hint = TRUST_HINT if distrusted(error) else "the server may speak http alone"
            raise MeasurementError(f"{self.place} cannot be reached: {error}", hint=hint) from None
        except httpx2.InvalidURL as error:
            raise MeasurementError(f"{self.place} is no URL: {error}", hint="correct it") from None


class HttpTree:
    """See `Tree`."""

    def __init__(self, place: str) -> None:
        self.place, self._http = place, HttpClient(place)

    def read(self, path: str) -> Iterator[bytes] | None:
        response = self._get(path)
        return None if response is None else self._http.pieces(response)

    def write(self, files: Mapping[str, Path | bytes], index: Callable[[bytes], bytes]) -> None:
        for path, content in files.items():
            self._put(path, content, {})
        for _ in range(_TRIES):
            response = self._get(INDEX)
            condition = {"if-none-match": "*"}
            before = b""
            if response is not None:
                tag = response.headers.get("etag")
                condition = {"if-match": tag} if tag else {}
                before = joined(self._http.pieces(response), self.place) or b""
            if self._put(INDEX, index(before), condition):
                return
        raise MeasurementError(
            f"{self.place}: others changed {INDEX} {_TRIES} times meanwhile", hint="push again"
        )

    def _get(self, path: str) -> httpx2.Response | None:
        response = self._http.ask("GET", f"{self.place}/{path}")
        if response.status_code in (404, 410):
            response.close()
            return None
        if response.status_code != 200:
            raise self._http.refused(response, f"GET {path}")
        return response

    def _put(self, path: str, content: Path | bytes, headers: Mapping[str, str]) -> bool:
        """Whether it was written; otherwise the file is no longer what `headers` say."""
        data = content if isinstance(content, bytes) else content.read_bytes()
        response = self._http.ask("PUT", f"{self.place}/{path}", content=data, headers=headers)
        if response.status_code == 412:
            response.close()
            return False
        if not response.is_success:
            raise self._http.refused(response, f"PUT {path}")
        response.close()
        return True
