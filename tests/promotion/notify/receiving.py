# A receiver of effects: a real server on this machine, which fails as its script says.

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "T000/B000/s3cr3t"


class Receiver:
    """Meets each request with the next trouble of its script, then with 200; keeps what came.

    A trouble is a status, a pair of status and headers, "drop" (the connection ends without
    an answer), "body" or "trickle" (a body, or headers, that never end).
    """

    def __init__(self, *troubles):
        self.got, self.raw, self.headers, self._over = [], [], [], threading.Event()
        script = [*troubles]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):  # noqa: N805
                data = handler.rfile.read(int(handler.headers["content-length"]))
                self.got.append(json.loads(data))
                self.raw.append(data)
                self.headers.append((handler.path, handler.headers))
                self._answer(handler, script.pop(0) if script else 200)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/{SECRET}"

    def _answer(self, handler, trouble):
        if trouble == "drop":
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if trouble == "trickle":
            try:
                handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
                while not self._over.wait(0.02):
                    handler.wfile.write(b"x: y\r\n")
            except OSError:
                pass  # the other side has had enough
            return
        status, headers = (200, {"content-length": "1000"}) if trouble == "body" else (trouble, {})
        status, headers = status if isinstance(status, tuple) else (status, headers)
        handler.send_response_only(status)
        for name, value in {"content-length": "0", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if trouble == "body":
            self._over.wait()

    def __enter__(self):
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
