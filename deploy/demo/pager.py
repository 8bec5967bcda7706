# Stands in for the service that pages you: prints a line for each alert that Alertmanager sends.

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Pager(BaseHTTPRequestHandler):
    """Takes a webhook of Alertmanager, https://prometheus.io/docs/alerting/latest/configuration."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        for alert in message["alerts"]:
            name, notes = alert["labels"]["alertname"], alert["annotations"]
            print(
                f"{alert['status']}: {name}: {notes['summary']}; {notes['runbook_url']}", flush=True
            )
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A receiver of pages that prints them.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    given = parser.parse_args()
    ThreadingHTTPServer((given.host, given.port), Pager).serve_forever()
