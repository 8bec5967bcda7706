# Spans and gauges by OTLP, to a real HTTP server that reads the messages of the protocol.

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.http_post import Busy
from servanda.promotion.notify.otlp import GaugeExport
from servanda.promotion.notify.sinks import sinks_of
from servanda.rl.watch.sinks import SINKS
from tests.promotion.notify.made import effect

TINY = Path(__file__).parents[3] / "examples" / "tiny-dump"
HINT = "pip install 'servanda[otel]'"


class Collector:
    """Takes what is posted, by path; status: of every answer."""

    def __init__(self, status=200):
        self.got = got = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler):  # noqa: N805
                data = handler.rfile.read(int(handler.headers["content-length"]))
                packed = handler.headers.get("content-encoding") == "gzip"
                got.append((handler.path, gzip.decompress(data) if packed else data))
                handler.send_response(status)
                handler.send_header("content-length", "0")
                handler.end_headers()

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/s3cr3t"

    def __enter__(self):
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def spans(data):
    service = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    [resource] = service.ExportTraceServiceRequest.FromString(data).resource_spans
    return resource.scope_spans[0].spans


def gauges(data):
    service = import_module("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    [resource] = service.ExportMetricsServiceRequest.FromString(data).resource_metrics
    return {
        (metric.name, *(a.value.string_value for a in point.attributes)): point.as_double
        for metric in resource.scope_metrics[0].metrics
        for point in metric.gauge.data_points
    }


@pytest.fixture
def otel():
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        pytest.importorskip(module, reason=HINT)


@pytest.mark.usefixtures("otel")
def test_a_promotion_is_one_trace_and_a_repeat_the_same_span():
    with Collector() as collector:
        for _ in range(2):  # as two processes
            [made] = sinks_of(notify=[f"otlp={collector.url}"])
            made.deliver(effect())
        made.deliver(effect("page", key="llama/5/page", to="oncall", status="rolled_back"))

    assert [path for path, _ in collector.got] == ["/s3cr3t/v1/traces"] * 3
    [first], [again], [page] = (spans(data) for _, data in collector.got)
    assert (first.trace_id, first.span_id) == (again.trace_id, again.span_id)
    assert page.trace_id == first.trace_id and page.span_id != first.span_id
    assert first.name == "notify canary-2"
    assert first.start_time_unix_nano == first.end_time_unix_nano == 1795267379500000000
    values = {a.key: a.value for a in first.attributes}
    assert values["servanda.share"].double_value == 0.25
    assert values["servanda.decided.limit"].double_value == 0.05
    assert values["servanda.turn"].int_value == 4
    assert (first.status.code, page.status.code) == (0, 2)
    assert page.status.message == "every cell holds at 1,412 groups"
    assert "s3cr3t" not in made.name


@pytest.mark.usefixtures("otel")
def test_the_series_of_a_step_are_gauges():
    with Collector() as collector:
        sink = SINKS["otlp"](collector.url, print)
        sink.series(3, 1795267379.5, {"servanda/worst": 1.5, "servanda/slice/env=a": 0.5})
        sink.series(4, 1795267380.5, {"servanda/worst": 2.5})
        sink.close()

    assert [path for path, _ in collector.got] == ["/s3cr3t/v1/metrics"] * 2
    first, second = (gauges(data) for _, data in collector.got)
    step, worst, part = ("servanda.step",), ("servanda.worst",), ("servanda.slice", "env=a")
    assert first == {step: 3.0, worst: 1.5, part: 0.5}
    assert second == {step: 4.0, worst: 2.5}  # absent is not the last value


@pytest.mark.slow
@pytest.mark.usefixtures("otel")
def test_a_watch_sends_every_step():
    with Collector() as collector:
        words = ["watch", str(TINY), "--once", "--otlp", collector.url]
        done = CliRunner().invoke(main, words, catch_exceptions=False)

    assert done.exit_code == 1 and "--otlp failed" not in done.output
    sent = [gauges(data) for _, data in collector.got]
    assert [numbers[("servanda.step",)] for numbers in sent] == [*range(1, 17)]
    assert any(name[0] == "servanda.slice" for name in sent[-1])


@pytest.mark.usefixtures("otel")
def test_what_is_refused_is_named_without_its_path(capfd):
    with Collector(status=400) as collector:
        [made] = sinks_of(notify=[f"otlp={collector.url}"])
        with pytest.raises(Busy) as busy:
            made.deliver(effect())
        with pytest.raises(MeasurementError) as lost:
            GaugeExport(collector.url, "--otlp").send({"servanda/worst": 1.0})

    assert str(busy.value) == str(lost.value) == "127.0.0.1: OpenTelemetry could not deliver it"
    assert "s3cr3t" not in "".join(capfd.readouterr())


def test_a_wrong_call_is_named(monkeypatch):
    with pytest.raises(ContractError, match="--notify otlp=URL takes a URL that begins with http"):
        sinks_of(notify=["otlp=collector:4317"])
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MeasurementError, match="needs OpenTelemetry") as error:
        sinks_of(notify=["otlp=http://127.0.0.1:4318"])
    assert error.value.problems[0].hint == HINT


def test_files_of_another_package_are_named(monkeypatch, tmp_path):
    """xds-protos has an opentelemetry/ of its own, without names that the exporter imports."""
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "opentelemetry" / "sdk").mkdir(parents=True)
    for name in ("", "sdk"):
        (tmp_path / "opentelemetry" / name / "__init__.py").touch()
    (tmp_path / "opentelemetry" / "sdk" / "trace.py").write_text("from os import NoSuchName")
    monkeypatch.syspath_prepend(tmp_path)

    try:
        with pytest.raises(MeasurementError, match="cannot import name 'NoSuchName'") as error:
            sinks_of(notify=["otlp=http://127.0.0.1:4318"])
    finally:  # before the real ones come back
        for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
            del sys.modules[name]
    assert "an environment of its own" in error.value.problems[0].hint
