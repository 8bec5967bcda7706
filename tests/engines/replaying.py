# A server that gives the recorded replies of a real one, or fails as it is told to.

import json
from collections import deque
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread

REPLIES = Path(__file__).parent / "replies"
RANDOM = ("cache_salt",)  # fields of a request that are never the same again


def records(dialect):
    """What was asked of a real server, and what it said."""
    text = (REPLIES / f"{dialect}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def found(dialect, endpoint, **fields):
    """The one recorded reply to such a request, as JSON."""
    [record] = [
        r
        for r in records(dialect)
        if r["endpoint"] == endpoint
        if all((r["asked"] or {}).get(name) == value for name, value in fields.items())
    ]
    return json.loads(record["text"])


def _key(endpoint, asked):
    plain = {name: value for name, value in (asked or {}).items() if name not in RANDOM}
    return endpoint, json.dumps(plain, sort_keys=True)


class Replaying:
    """`troubles` are met by the next requests to the endpoints `troubled`, one each.

    A trouble is the status and text of another reply, with headers; or "hang", "drop", "cut".
    `changed`: endpoint -> what is done to its recorded text.
    """

    def __init__(self, given):
        self.replies = {_key(r["endpoint"], r["asked"]): (r["status"], r["text"]) for r in given}
        self.troubles, self.troubled, self.changed = deque(), (), {}
        self.asked, self.lock, self.over = [], Lock(), Event()
        self.stack = ExitStack()  # what is closed before the server is

    def answer(self, endpoint, asked):
        with self.lock:
            self.asked.append(endpoint)
            if endpoint in self.troubled and self.troubles:
                return self.troubles.popleft()
        missing = (404, '{"error": {"message": "nothing was recorded for this request"}}')
        status, text = self.replies.get(_key(endpoint, asked), missing)
        if endpoint in self.changed:
            text = self.changed[endpoint](text)
        return status, text, {}


@contextmanager
def replaying(given):
    """A Replaying, and its `url`."""
    server = Replaying(given)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            length = int(self.headers.get("content-length", 0))
            body = self.rfile.read(length)
            answer = server.answer(self.path, json.loads(body) if body else None)
            if answer == "hang":
                server.over.wait()
            if answer in ("hang", "drop"):
                self.close_connection = True
                return
            cut = answer == "cut"
            status, text, headers = (200, '{"choices": [', {}) if cut else answer
            content = text.encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content) + (100 if cut else 0)))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = cut

        do_POST = do_GET

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        server.stack.close()
        server.over.set()
        http.shutdown()
        thread.join()
        http.server_close()
