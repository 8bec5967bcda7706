# A registry of packs in an OCI registry, by the distribution specification 1.1.
#
# A pack is a manifest with the file as its first layer, and the signature as its second.  It has
# two tags: the one that was given, and sha256-HEX, by which the manifest of a digest is found.

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2

from servanda.engines.packs.http_packs import HttpClient
from servanda.engines.packs.pack_store import joined
from servanda.errors import MeasurementError

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_EMPTY = "application/vnd.oci.empty.v1+json"
_PACK = "application/vnd.servanda.pack.v1+zip"
_SIGNATURE = "application/vnd.servanda.pack.signature.v1"
_LOCAL = ("localhost", "127.0.0.1", "::1")  # without TLS, as in docker
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_DIGEST_TAG = "sha256-"
_PAGE = 100  # repositories of one answer


class OciStore:
    """See `PackStore`.

    User and password are those that `docker login` wrote into ~/.docker/config.json; credential
    helpers are not asked.

    Args:
        place: oci://HOST[:PORT][/PATH].
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._host, _, self._path = place.removeprefix("oci://").partition("/")
        local = urlsplit(f"//{self._host}").hostname in _LOCAL
        self._url = f"{'http' if local else 'https'}://{self._host}/v2/"
        self._http = HttpClient(place)
        self._authorization: dict[str, str] = {}  # scope -> header

    def tags(self, name: str = "") -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for repository in [self._repository(name)] if name else self._catalog():
            listed = self._json("GET", f"{repository}/tags/list", repository) or {}
            tags = {}
            for tag in listed.get("tags") or ():
                layers = () if tag.startswith(_DIGEST_TAG) else self._layers(repository, tag)
                if layers and layers[0]["mediaType"] == _PACK:
                    tags[tag] = str(layers[0]["digest"])
            if tags:
                found[name or repository.removeprefix(f"{self._path}/")] = tags
        return found

    def content(self, name: str, digest: str) -> Iterator[bytes] | None:
        return self._blob(self._repository(name), digest)

    def signature(self, name: str, digest: str) -> bytes | None:
        repository = self._repository(name)
        for layer in self._layers(repository, digest.replace(":", "-")):
            if layer["mediaType"] == _SIGNATURE:
                return joined(self._blob(repository, layer["digest"]), self._place)
        return None

    def publish(
        self, name: str, tag: str, digest: str, file: Path, signature: bytes | None
    ) -> None:
        repository = self._repository(name)
        parts = [(_EMPTY, b"{}"), (_PACK, file.read_bytes())]
        parts += [(_SIGNATURE, signature)] if signature is not None else []
        described = [self._upload(repository, kind, data) for kind, data in parts]
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": _PACK,
            "config": described[0],
            "layers": described[1:],
        }
        for reference in (digest.replace(":", "-"), tag):
            path = f"{repository}/manifests/{reference}"
            done = self._ask(
                "PUT",
                path,
                repository,
                content=json.dumps(manifest).encode(),
                headers={"content-type": _MANIFEST},
            )
            if not done.is_success:
                raise self._http.refused(done, f"PUT {path}")
            done.close()

    def _repository(self, name: str) -> str:
        return f"{self._path}/{name}" if self._path else name

    def _catalog(self) -> list[str]:
        """The repositories of this place; not every registry lists its own."""
        found: list[str] = []
        path = f"_catalog?n={_PAGE}"
        while True:
            listed = self._json("GET", path, "")
            if listed is None:
                raise MeasurementError(
                    f"{self._place} does not list its repositories",
                    hint=f"name one: servanda tools packs list {self._place} NAME",
                )
            page = [str(repository) for repository in listed.get("repositories") or ()]
            found += page
            if len(page) < _PAGE:
                break
            path = f"_catalog?n={_PAGE}&last={page[-1]}"
        start = f"{self._path}/" if self._path else ""
        return [repository for repository in found if repository.startswith(start)]

    def _layers(self, repository: str, reference: str) -> list[dict[str, Any]]:
        manifest = self._json("GET", f"{repository}/manifests/{reference}", repository) or {}
        return manifest.get("layers") or []

    def _json(self, method: str, path: str, repository: str) -> dict[str, Any] | None:
        response = self._ask(method, path, repository, headers={"accept": _MANIFEST})
        if response.status_code in (404, 405):
            response.close()
            return None
        if response.status_code != 200:
            raise self._http.refused(response, f"{method} {path}")
        value = _object(joined(self._http.pieces(response), self._place))
        if value is None:
            raise MeasurementError(
                f"{self._place}: {path} is not what an OCI registry answers with",
                hint="is it an OCI registry? A plain HTTP server is named by https://",
            )
        return value

    def _blob(self, repository: str, digest: str) -> Iterator[bytes] | None:
        path = f"{repository}/blobs/{digest}"
        response = self._ask("GET", path, repository)
        if response.status_code == 404:
            response.close()
            return None
        if response.status_code != 200:
            raise self._http.refused(response, f"GET {path}")
        return self._http.pieces(response)

    def _upload(self, repository: str, kind: str, data: bytes) -> dict[str, Any]:
        """The descriptor of a blob, which is there afterwards."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        there = self._ask("HEAD", f"{repository}/blobs/{digest}", repository)
        there.close()
        if there.status_code != 200:
            path = f"{repository}/blobs/uploads/"
            begun = self._ask("POST", path, repository)
            if begun.status_code != 202:
                raise self._http.refused(begun, f"POST {path}")
            begun.close()
            url = httpx2.URL(urljoin(str(begun.url), begun.headers["location"]))
            done = self._ask(
                "PUT",
                str(url.copy_merge_params({"digest": digest})),
                repository,
                content=data,
                headers={"content-type": "application/octet-stream"},
            )
            if not done.is_success:
                raise self._http.refused(done, "the upload")
            done.close()
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def _ask(self, method: str, path: str, repository: str, **more: Any) -> httpx2.Response:
        """A response; asked again with what the registry's challenge asks for."""
        url = urljoin(self._url, path)
        headers = more.pop("headers", {})
        known = {k: v for k, v in (("authorization", self._authorization.get(repository)),) if v}
        response = self._http.ask(method, url, headers={**headers, **known}, **more)
        if response.status_code != 401:
            return response
        response.close()
        challenge = response.headers.get("www-authenticate", "")
        header = self._answer(challenge, repository)
        if header is None or header == known.get("authorization"):
            return response
        self._authorization[repository] = header
        return self._http.ask(method, url, headers={**headers, "authorization": header}, **more)

    def _answer(self, challenge: str, repository: str) -> str | None:
        """The header that answers a challenge; None if it cannot be answered."""
        kind, basic = challenge.partition(" ")[0].lower(), _login(self._host)
        if kind == "basic":
            return basic
        asked = dict(_PARAMETER.findall(challenge))
        if kind != "bearer" or "realm" not in asked:
            return None
        realm = urlsplit(asked["realm"])
        if basic and realm.scheme != "https" and realm.hostname not in _LOCAL:
            raise MeasurementError(
                f"{self._place} asks for its password at {asked['realm']}, without TLS",
                hint="the realm of a registry has to be https",
            )
        scope = asked.get("scope") or f"repository:{repository}:pull,push"
        service = {"service": asked["service"]} if "service" in asked else {}
        headers = {"authorization": basic} if basic else {}
        response = self._http.ask(
            "GET", asked["realm"], params={"scope": scope, **service}, headers=headers
        )
        if response.status_code != 200:
            raise self._http.refused(response, "the request for a token")
        answer = _object(joined(self._http.pieces(response), self._place))
        token = (answer or {}).get("token") or (answer or {}).get("access_token")
        return f"Bearer {token}" if token else None


def _object(data: bytes | None) -> dict[str, Any] | None:
    """A JSON object; None if it is none."""
    try:
        value = json.loads(data or b"")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _login(host: str) -> str | None:
    """The header of the user that `docker login` keeps for a host."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        auth = known["auths"][host]["auth"]
        base64.b64decode(auth, validate=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return f"Basic {auth}"
