# Servers that hold packs: a plain HTTP server with PUT, and the registry of the CNCF distribution.

import base64
import contextlib
import hashlib
import json
import shutil
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2


def _etag(file):
    return f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"'


class _Handler(SimpleHTTPRequestHandler):
    """Files of a folder; PUT writes them, and only if their ETag is still what is asked for."""

    def log_message(self, *_):
        pass

    def end_headers(self):
        file = Path(self.translate_path(self.path))
        if self.command == "GET" and file.is_file():
            self.send_header("ETag", _etag(file))
        super().end_headers()

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["content-length"]))
        file = Path(self.translate_path(self.path))
        match, none = self.headers.get("if-match"), self.headers.get("if-none-match")
        stale = match and (not file.exists() or _etag(file) != match)
        if stale or (none and file.exists()):
            self.send_response(412)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            self.send_response(201)
        self.send_header("content-length", "0")
        self.end_headers()


@contextlib.contextmanager
def http(folder):
    """The URL of a folder."""
    folder.mkdir(exist_ok=True)

    def handler(*arguments):
        return _Handler(*arguments, directory=str(folder))

    with _served(handler) as url:
        yield url


@contextlib.contextmanager
def _served(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def token_registry(realm=""):
    """The host of an empty registry that asks for a token, and what it was asked.

    Args:
        realm: where tokens are; "": at the registry, for ana with the password secret.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            own = f"http://{self.headers['host']}/token"
            given = self.headers.get("authorization", "")
            asked.append((self.path, given))
            if self.path.startswith("/token"):
                known = given == f"Basic {base64.b64encode(b'ana:secret').decode()}"
                self._reply(200 if known else 401, {"token": "t"} if known else {})
            elif given == "Bearer t":
                self._reply(200, {"tags": []})
            else:
                challenge = f'Bearer realm="{realm or own}",service="s",scope="repository:a:pull"'
                self._reply(401, {}, ("www-authenticate", challenge))

        def _reply(self, status, body, *headers):
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in (("content-length", str(len(data))), *headers):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    with _served(Handler) as url:
        yield url.removeprefix("http://"), asked


def distribution():
    """The registry's program; None where it is not installed."""
    return shutil.which("docker-registry") or shutil.which("registry")


@contextlib.contextmanager
def oci(folder):
    """The host of a real registry, whose storage is a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    folder.mkdir(exist_ok=True)
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: '{host}'}}\n"
    )
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([distribution(), "serve", config], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"http://{host}/v2/").status_code == 200:
                    break
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the registry did not start"
            time.sleep(0.05)
        yield host
    finally:
        server.terminate()
        server.wait()
