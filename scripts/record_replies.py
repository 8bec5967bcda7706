# Writes tests/engines/replies/*.jsonl: what real servers answer to a small fixed exchange.
#
#   python scripts/record_replies.py vllm
#   python scripts/record_replies.py llamacpp --gguf models/tiny-lm-f32.gguf
#   python scripts/record_replies.py vllm --url http://127.0.0.1:8000
#
# The engine talks to a server that hands everything on to the real one and writes it down.

import argparse
import json
import re
import sys
import tempfile
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx2

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts import servers  # noqa: E402

from servanda.contract.model import Kernel  # noqa: E402
from servanda.engines import open_engine  # noqa: E402
from servanda.theory.sampling import Sampling  # noqa: E402
from servanda.traces.trace import Batch  # noqa: E402

REPLIES = ROOT / "tests" / "engines" / "replies"
TEXTS = ("hello import", "The list of ")
WIDTH = 24
SEED = 8  # by which both servers end an answer by themselves
# one byte of a text, the end token, and a piece of code
BATCH = Batch((0, 1, 2, 3), ((5, 6, 7, 8), (0,), (300, 77, 80), (14, 0)), WIDTH)
FILTERED = Sampling(temperature=0.7, top_k=3)
_FOLDERS = re.compile(r'(?<="model_path":")[^"]*/')
_PAGE = "vllm:cache_config_info{"  # all that is read of /metrics, which is long


def exchange(engine):
    """What is asked of every server that can answer it."""
    described = engine.describe()
    if described.encodes:
        engine.encode(TEXTS)
    drawn = engine.generate(BATCH, Sampling(), SEED)
    if described.decodes:
        engine.decode(drawn.continuations)
    if engine.dialect.refusal(FILTERED, engine.meaning) is None:
        engine.generate(BATCH, FILTERED, SEED)
    if "prefill" in described.scores:
        given = Batch(BATCH.sequence_S, BATCH.prompts, WIDTH, drawn.continuations)
        engine.score(given, Sampling(), "prefill")
        engine.top(given.take([0, 1]), "prefill")
    engine.time(BATCH.take([0, 1]), Sampling(), SEED, record=False)


def recorder(target, found):
    """A server that hands on to `target` and appends what was said to `found`."""
    client = httpx2.Client(base_url=target, timeout=120, trust_env=False)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            reply = client.request(
                self.command,
                self.path,
                content=body or None,
                headers={"content-type": "application/json"},
            )
            text = reply.text
            if self.path == "/metrics":
                text = "".join(f"{x}\n" for x in text.splitlines() if x.startswith(_PAGE))
            found.append(
                {
                    "endpoint": self.path,
                    "asked": json.loads(body) if body else None,
                    "status": reply.status_code,
                    "type": reply.headers.get("content-type", ""),
                    "text": _FOLDERS.sub("/srv/", text.replace(str(ROOT), "/srv")),
                }
            )
            content = text.encode()
            self.send_response(reply.status_code)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dialect", choices=("vllm", "llamacpp"))
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--gguf", help="models/tiny-lm as float32, for llama-server")
    given = parser.parse_args()
    with ExitStack() as stack:
        url = given.url
        if url is None:
            port = servers.free_port()
            if given.dialect == "vllm":
                command = servers.vllm_command(port)
            else:
                command = servers.llama_command(port, given.gguf)
            log = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log"))
            url = stack.enter_context(servers.running(command, port, log.name))
        found = []
        server = recorder(url, found)
        Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        address = f"http://127.0.0.1:{server.server_address[1]}"
        engine = open_engine(Kernel(engine="openai_http", url=address, batch_size=4))
        exchange(engine)
        engine.close()
    REPLIES.mkdir(exist_ok=True)
    file = REPLIES / f"{given.dialect}.jsonl"
    lines = [json.dumps(record, sort_keys=True, ensure_ascii=False) for record in found]
    # requests in flight come in any order, and a server is asked more than once what it is
    file.write_text("".join(f"{line}\n" for line in sorted(set(lines))), encoding="utf-8")
    print(f"{file}: {len(found)} replies, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
