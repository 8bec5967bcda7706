# Counts of drafts from pages of metrics: vLLM's as vLLM 0.32 prints it, SGLang's by its source.

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from servanda.engines.http.draft_meter import DraftMeter, counters
from servanda.errors import MeasurementError

PAGES = Path(__file__).parent / "replies"
BEFORE, AFTER = ((PAGES / f"vllm_drafts_{n}.txt").read_text() for n in ("before", "after"))
_ON = 'engine_type="unified",model_name="tiny",tp_rank="0"'


def sglang(verifications, tokens, requests, steps=3):
    """SGLang's page after some requests; it counts a request when it ends."""
    return "\n".join(
        [
            f'sglang:generation_tokens_total{{{_ON},is_streaming="false"}} {tokens:.1f}',
            f'sglang:num_requests_total{{{_ON},is_streaming="false"}} {requests:.1f}',
            f"sglang:spec_verify_calls_total{{{_ON}}} {verifications:.1f}",
            f"sglang:spec_num_steps{{{_ON}}} {steps:.1f}",
            f"sglang:spec_accept_rate{{{_ON}}} NaN",
        ]
    )


class Changing:
    """A page that changes between readings."""

    def __init__(self, *pages):
        self.pages = iter(pages)

    def __call__(self):
        return next(self.pages)


def test_vllms_counters_are_read_over_an_interval_and_all_its_engines():
    meter = DraftMeter(Changing(BEFORE, AFTER))
    counts = meter.read()
    assert (counts.drafts, counts.proposed) == (2 * 200, 2 * 200 * 3)
    before, after = counters(BEFORE), counters(AFTER)
    assert counts.accepted == after.accepted - before.accepted == sum(counts.by_depth)
    assert 0.65 < counts.shares[0] < 0.75  # each token was accepted with probability 0.7
    assert counts.mean == pytest.approx((0.7 + 0.49 + 0.343) / 3, abs=0.05)


def test_sglangs_counters_give_what_its_verifications_accepted():
    # 4 responses of 1 + 10 tokens, by 5 verifications each: 5 accepted of 15 proposed
    meter = DraftMeter(Changing("sglang:num_queue_reqs 0", sglang(20, 44, 4), sglang(20, 44, 4)))
    counts = meter.read()
    assert (counts.drafts, counts.proposed, counts.accepted) == (20, 60, 20)
    assert counts.by_depth == () and counts.longest == 3
    assert meter.read().drafts == 0


def test_servers_are_added():
    counts = DraftMeter(Changing(BEFORE, AFTER), Changing(BEFORE, AFTER)).read()
    assert counts.drafts == 800


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        (BEFORE, "a counter went back: the server was restarted"),
        ("", "the page has no counters of drafts among its metrics"),
        (
            "\n".join(line for line in AFTER.splitlines() if 'position="2"' not in line),
            "the length of drafts changed",
        ),
    ],
)
def test_an_interval_that_is_not_known_is_no_count(later, problem):
    meter = DraftMeter(Changing(AFTER, later, AFTER, AFTER))
    assert meter.read() is None
    assert meter.problem == f"drafts were not counted: {problem}"
    later_reads = [meter.read(), meter.read()]
    assert later_reads[-1] is not None and meter.problem == ""


def test_a_page_without_such_counters_is_refused_at_once():
    with pytest.raises(MeasurementError, match="no counters of drafts") as caught:
        DraftMeter(lambda: "vllm:num_requests_running 3.0\n")
    assert "--speculative-config" in str(caught.value)


def test_a_server_is_asked_for_its_page():
    pages = Changing(BEFORE, AFTER)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = pages().encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        meter = DraftMeter(f"http://127.0.0.1:{server.server_port}")
        assert meter.read().drafts == 400
    finally:
        server.shutdown()
        server.server_close()
    assert meter.read() is None
    assert "cannot be reached" in meter.problem


def test_llama_servers_counters_are_vllms_under_its_own_prefix():
    """As a llama-server with --metrics and --spec-type draft-simple printed them."""
    page = """# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 27
llamacpp:spec_decode_num_accepted_tokens_total 14
llamacpp:spec_decode_num_drafts_total 9
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 6
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 4
"""
    assert counters(page) == (9, 27, 14, (6, 4, 4), 0)
