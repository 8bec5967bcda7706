"""The picture of the page that examples/gateway/run.py takes."""

import importlib.util
import os
import sys
from pathlib import Path

from tests.gateway.controller.web import fake
from tests.gateway.controller.web.serving import KEY, live

RUN = Path(__file__).parents[4] / "examples" / "gateway" / "run.py"
BROWSER = """#!/bin/sh
for word; do echo "$word" >> "$0.words"; last=$word; done
cp "${last#file://}" "$0.page"
"""


def test_the_browser_of_the_example_gets_the_page_and_no_key(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gateway_run", RUN)
    run = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, run)  # its dataclasses look there
    spec.loader.exec_module(run)
    browser = tmp_path / "chromium"
    browser.write_text(BROWSER)
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with live(fake.Controller()) as client:
        page = str(client.base_url).rstrip("/")
        run.Gateway(None, page=page, key=KEY["operator"]).picture(tmp_path / "x.png", run.DARK)

    words = (tmp_path / "chromium.words").read_text().splitlines()
    assert f"--screenshot={tmp_path / 'x.png'}" in words and run.DARK in words
    shown = (tmp_path / "chromium.page").read_text(encoding="utf-8")
    assert "domain=code" in shown and "prefers-color-scheme" in shown  # its rows, and its style
    for text in (*words, shown):
        assert KEY["operator"] not in text
