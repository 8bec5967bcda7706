# OpenTelemetry: decisions as spans, and numbers as gauges, sent by OTLP over HTTP.
#
# A promotion is one trace, also over several processes: its id is a digest of the run's name, and
# that of a span a digest of the notification's key, so a repeated delivery is the same span.

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from servanda._version import __version__
from servanda.contract.identity import digest_of
from servanda.engines.http_policy import server_url
from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.base import KINDS
from servanda.promotion.notify.http_post import Busy
from servanda.promotion.state import Effect

_WAIT_S = 10.0
_BAD = ("halted", "rolled_back", "quarantined")


class Otlp:
    """Every decision as a span: --notify otlp=URL.

    Raises:
        ContractError: not an http or https URL.
        MeasurementError: OpenTelemetry is not installed.
    """

    kinds = KINDS

    def __init__(self, url: str) -> None:
        option = "--notify otlp=URL"
        self._host = _host(url, option)
        self._sdk: Any = _imported(option, "opentelemetry.sdk.trace")
        self._trace: Any = import_module("opentelemetry.trace")
        exporter: Any = _imported(option, "opentelemetry.exporter.otlp.proto.http.trace_exporter")
        at = f"{url.rstrip('/')}/v1/traces"
        self._exporter = exporter.OTLPSpanExporter(endpoint=at, timeout=_WAIT_S)
        self._success = import_module("opentelemetry.sdk.trace.export").SpanExportResult.SUCCESS
        self.name = f"otlp:{self._host}:{digest_of(url)[:8]}"

    def deliver(self, effect: Effect) -> None:
        if self._exporter.export([self._span(effect)]) is not self._success:
            raise Busy(f"{self._host}: OpenTelemetry could not deliver it")

    def _span(self, effect: Effect) -> Any:
        body = effect.body
        base: Any = import_module("opentelemetry.sdk.trace.id_generator").IdGenerator
        trace_id, span_id = _id(body.get("run") or effect.key, 16), _id(effect.key, 8)
        ids = {"generate_trace_id": lambda _: trace_id, "generate_span_id": lambda _: span_id}
        provider = self._sdk.TracerProvider(
            sampler=import_module("opentelemetry.sdk.trace.sampling").ALWAYS_ON,
            resource=_resource(),
            id_generator=type("Ids", (base,), ids)(),
            shutdown_on_exit=False,
        )
        at_ns = int(float(body["at"]) * 1e9)
        what = body.get("slice") or body.get("leg") or ""
        span = provider.get_tracer("servanda", __version__).start_span(
            f"{effect.kind} {what}".strip(), start_time=at_ns, attributes=attributes(effect)
        )
        if effect.kind == "page" or body.get("status") in _BAD:
            status, code = self._trace.Status, self._trace.StatusCode
            span.set_status(status(code.ERROR, body.get("why") or ""))
        span.end(at_ns)
        return span


def attributes(effect: Effect) -> dict[str, str | int | float | bool]:
    """The body of a notification as attributes; one that is missing is left out."""
    plain = {"kind": effect.kind, "key": effect.key, **effect.body}
    decided = plain.pop("decided", None) or {}
    plain |= {f"decided.{name}": value for name, value in decided.items()}
    return {
        f"servanda.{name}": value
        for name, value in plain.items()
        if isinstance(value, str | int | float) and value != ""
    }


class GaugeExport:
    """Numbers as gauges of OpenTelemetry, sent when they are set.

    Args:
        option: of the command line, for messages.

    Raises:
        ContractError: not an http or https URL.
        MeasurementError: OpenTelemetry is not installed.
    """

    def __init__(self, url: str, option: str) -> None:
        self._host = _host(url, option)
        self._sdk: Any = _imported(option, "opentelemetry.sdk.metrics")
        self._export: Any = import_module("opentelemetry.sdk.metrics.export")
        http: Any = _imported(option, "opentelemetry.exporter.otlp.proto.http.metric_exporter")
        at = f"{url.rstrip('/')}/v1/metrics"
        self._exporter = http.OTLPMetricExporter(endpoint=at, timeout=_WAIT_S)

    def send(self, values: Mapping[str, float]) -> None:
        """Send numbers by name; servanda/slice/NAME is servanda.slice with the attribute slice.

        Raises:
            MeasurementError: they were not accepted.
        """
        # a reader of its own each time: one that lives on repeats the last value of what is absent
        reader = self._export.InMemoryMetricReader()
        provider = self._sdk.MeterProvider([reader], resource=_resource(), shutdown_on_exit=False)
        meter = provider.get_meter("servanda", __version__)
        gauges: dict[str, Any] = {}
        for series, value in values.items():
            head, found, part = series.partition("/slice/")  # a slice may have any name
            name = (f"{head}/slice" if found else head).replace("/", ".")
            if name not in gauges:
                gauges[name] = meter.create_gauge(name)
            gauges[name].set(value, {"slice": part} if found else {})
        result = self._exporter.export(reader.get_metrics_data())
        provider.shutdown()
        if result is not self._export.MetricExportResult.SUCCESS:
            raise MeasurementError(f"{self._host}: OpenTelemetry could not deliver it")

    def close(self) -> None:
        self._exporter.shutdown()


def _id(text: str, size: int) -> int:
    return int(digest_of(text)[: 2 * size], 16) or 1


def _resource() -> Any:
    resources: Any = import_module("opentelemetry.sdk.resources")
    return resources.Resource.create({"service.name": "servanda", "service.version": __version__})


def _host(url: str, option: str) -> str:
    parts = server_url(url)
    if parts is None:
        raise ContractError(
            f"{option} takes a URL that begins with http:// or https://",
            hint="the OTLP/HTTP receiver of a collector, such as http://127.0.0.1:4318",
        )
    # the exporter's warnings contain the URL, in which there may be a token
    logger = logging.getLogger("opentelemetry.exporter.otlp")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return parts.hostname or ""


def _imported(option: str, module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise MeasurementError(
            f"{option} needs OpenTelemetry, which is not installed here",
            hint="pip install 'servanda[otel]'",
        ) from None
    except ImportError as error:
        raise MeasurementError(
            f"{option} needs OpenTelemetry, whose installation here is damaged: {error.msg}",
            hint="xds-protos, of servanda[envoy], replaces files of it: "
            "install servanda[otel] into an environment of its own",
        ) from None
