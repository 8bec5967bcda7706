# Notifiers (sinks) for series and alerts, besides the terminal.  One class each, with an option of
# its name; libraries are imported on use.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from servanda.errors import ContractError, MeasurementError
from servanda.promotion.notify.http_post import Hook, insist
from servanda.promotion.notify.otlp import GaugeExport
from servanda.promotion.notify.slack import section
from servanda.registry import Registry
from servanda.rl.watch.transitions import Alert
from servanda.traces.serialization import to_plain

SCHEMA = 1


class Sink:
    """A notifier for the series of every step, for alerts, or both.

    `takes`: placeholder of its option's value; `summary`: help text of the option.

    Args:
        where: value of the option.
        wait: sleeps for seconds between attempts.

    Raises:
        ContractError: a library is not installed, or `where` is invalid.
    """

    takes: ClassVar[str]
    summary: ClassVar[str]

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        """Open it."""

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """The numbers of a step; at: unix seconds."""

    def alert(self, alert: Alert, at: float, watched: str) -> None:
        """One transition; watched: the path that is followed."""

    def close(self) -> None:
        """Close the notifier."""


SINKS: Registry[type[Sink]] = Registry("sink", plugins="servanda.watch_sinks")


@SINKS.register("series")
class Lines(Sink):
    takes = "FILE"
    summary = "Append the series of each step to FILE, as JSON lines."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        self._path = Path(where)
        with ContractError.of_system(f"--series {where} cannot be written"):
            self._path.open("a").close()

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        data = {"step": step, "at": at, "series": to_plain(values)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


@SINKS.register("webhook")
class Webhook(Sink):
    takes = "URL"
    summary = "POST every alert to URL as JSON."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        self._hook, self._wait = Hook(where, "--webhook"), wait

    def alert(self, alert: Alert, at: float, watched: str) -> None:
        insist(lambda: self._hook.post(body(alert, at, watched)), self._wait)


@SINKS.register("slack")
class Slack(Sink):
    takes = "URL"
    summary = "POST every alert to this Slack incoming webhook."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        self._hook, self._wait = Hook(where, "--slack"), wait

    def alert(self, alert: Alert, at: float, watched: str) -> None:
        message = section(alert.level, alert.lines(), watched)
        insist(lambda: self._hook.post(message), self._wait)


class _Tracker(Sink):
    """An experiment tracker whose module has AlertLevel, and whose runs accept alerts."""

    takes = "PROJECT[/RUN]"
    _library: Any
    _run: Any

    def alert(self, alert: Alert, at: float, watched: str) -> None:
        levels = {"error": "ERROR", "warning": "WARN"}
        level = getattr(self._library.AlertLevel, levels.get(alert.level, "INFO"))
        head, *rest = alert.lines()
        self._run.alert(title=head, text="\n".join([*rest, watched]), level=level)

    def close(self) -> None:
        self._run.finish()


@SINKS.register("wandb")
class Wandb(_Tracker):
    summary = "Log series and alerts to Weights & Biases; ENTITY/PROJECT/RUN names the entity too."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        self._library = _imported("wandb", "wandb")
        entity, project, run = _names(where, "--wandb", entity=True)
        # without its own system metrics
        settings = self._library.Settings(console="off", x_disable_stats=True)
        self._run = self._library.init(
            entity=entity, project=project, id=run, name=run, resume="allow", settings=settings
        )
        self._run.define_metric("servanda/step")
        # a separate step axis: the trainer's run keeps its own
        self._run.define_metric("servanda/*", step_metric="servanda/step")

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({"servanda/step": step, **values})


@SINKS.register("trackio")
class Trackio(_Tracker):
    summary = "Log series and alerts to Trackio."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        self._library = self._run = _imported("trackio", "trackio")  # its run is the module
        _, project, run = _names(where, "--trackio")
        self._library.init(
            project=project, name=run, resume="allow", auto_log_gpu=False, auto_log_cpu=False
        )

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)


@SINKS.register("mlflow")
class MLflow(Sink):
    takes = "EXPERIMENT[/RUN]"
    summary = "Log series and alerts to MLflow, at MLFLOW_TRACKING_URI."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        library = _imported("mlflow", "mlflow")
        _, name, run = _names(where, "--mlflow", takes=self.takes)
        self._entities = import_module("mlflow.entities")
        self._client = client = library.MlflowClient()
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        # of a watch that was started again; a quote cannot be escaped in a filter
        query = f'attributes.run_name = "{run}"'
        same = client.search_runs([experiment], query, max_results=1) if run else ()
        if same:
            client.update_run(same[0].info.run_id, status="RUNNING")
        self._run = (same[0] if same else client.create_run(experiment, run_name=run)).info.run_id

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        metric, at_ms = self._entities.Metric, int(at * 1000)
        # other characters are refused in the name of a metric
        names = {name: re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII) for name in values}
        metrics = [metric(names[name], value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def alert(self, alert: Alert, at: float, watched: str) -> None:
        head, *rest = alert.lines()
        self._client.set_tag(self._run, "servanda.alert", head)  # the last one, in lists of runs
        file = f"servanda/alerts/step-{alert.step:06d}-{alert.kind}.txt"
        self._client.log_text(self._run, "\n".join([head, *rest, watched]), file)

    def close(self) -> None:
        self._client.set_terminated(self._run)


@SINKS.register("swanlab")
class SwanLab(Sink):
    takes = "PROJECT[/RUN]"
    summary = "Log series and alerts to SwanLab."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        self._library = _imported("swanlab", "swanlab")
        _, project, run = _names(where, "--swanlab")
        # without the terminal's text and its own system metrics
        quiet = self._library.Settings(
            terminal={"proxy_type": "none"}, probe={"hardware": False, "monitor": False}
        )
        self._run = self._library.init(
            project=project, id=run, name=run, resume="allow", settings=quiet
        )

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def alert(self, alert: Alert, at: float, watched: str) -> None:
        head, *rest = alert.lines()
        text = self._library.Text("\n".join([head, *rest, watched]), caption=head)
        self._run.log({"servanda/alerts": text}, step=alert.step)

    def close(self) -> None:
        self._run.finish()


@SINKS.register("otlp")
class Gauges(Sink):
    takes = "URL"
    summary = "Send series as gauges of OpenTelemetry to this OTLP/HTTP receiver."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        self._export = GaugeExport(where, "--otlp")
        self.close = self._export.close

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._export.send({"servanda/step": float(step), **values})


@SINKS.register("tensorboard")
class TensorBoard(Sink):
    takes = "DIR"
    summary = "Write series and alerts to DIR as TensorBoard event files."

    def __init__(self, where: str, wait: Callable[[float], None]) -> None:
        files = _imported("tensorboard.summary.writer.event_file_writer", "tensorboard")
        compat = "tensorboard.compat.proto"
        parts = ("event_pb2", "summary_pb2", "tensor_pb2", "tensor_shape_pb2")
        self._event, self._summary, self._tensor, self._shape = (
            import_module(f"{compat}.{part}") for part in parts
        )
        self._text = import_module("tensorboard.plugins.text.metadata")
        self._writer = files.EventFileWriter(where)

    def series(self, step: int, at: float, values: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        self._add(step, at, [value(tag=name, simple_value=v) for name, v in values.items()])

    def alert(self, alert: Alert, at: float, watched: str) -> None:
        text = "\n\n".join([*alert.lines(), watched])
        shape = self._shape.TensorShapeProto
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=shape(dim=[shape.Dim(size=1)]),
        )
        metadata = self._text.create_summary_metadata("servanda/alerts", "")
        value = self._summary.Summary.Value
        self._add(alert.step, at, [value(tag="servanda/alerts", metadata=metadata, tensor=tensor)])

    def _add(self, step: int, at: float, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=at, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def body(alert: Alert, at: float, watched: str) -> dict[str, Any]:
    """The JSON body of an alert for webhooks; a missing number is null."""
    advice = alert.advice
    return {
        "servanda": "watch",
        "schema": SCHEMA,
        "kind": alert.kind,
        "level": alert.level,
        "watched": watched,
        "step": alert.step,
        "at": at,
        "text": alert.text,
        "slice": alert.slice or None,
        "clause": alert.clause or None,
        "value": to_plain(alert.value),
        "interval": to_plain(alert.interval),
        "limit": to_plain(alert.limit),
        "n": alert.n,
        "cause": (advice.cause if advice else "") or None,
        "found_slices": [part.entry for part in advice.slices] if advice else [],
        "command": (advice.command if advice else "") or None,
        "change": (advice.switch if advice else "") or None,
        "would_have_stopped_at": alert.stop,
    }


class GuardedSink:
    """A notifier whose failures are printed once, until a success, and end nothing."""

    def __init__(self, name: str, sink: Sink, write: Callable[[str], None]) -> None:
        self.name, self._sink, self._write = name, sink, write
        self._failed: set[str] = set()

    def __call__(self, what: str, *values: Any) -> None:
        """Call `series`, `alert` or `close`."""
        try:
            getattr(self._sink, what)(*values)
        except Exception as error:
            if what not in self._failed:
                self._write(f"! --{self.name} failed, and the watch goes on: {_reason(error)}")
            self._failed.add(what)
        else:
            self._failed.discard(what)


def _reason(error: Exception) -> str:
    """The printable reason: library messages may contain URLs, and URLs secrets."""
    return str(error) if isinstance(error, MeasurementError) else type(error).__name__


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ContractError(
            f"--{package} needs {package}, which is not installed here",
            hint=f"pip install {package}",
        ) from None


def _names(
    where: str, option: str, *, entity: bool = False, takes: str = ""
) -> tuple[str | None, str, str | None]:
    """(entity, project, run) of PROJECT, PROJECT/RUN or ENTITY/PROJECT/RUN.

    Args:
        takes: the shape in the tool's own words.
    """
    parts = where.split("/")
    if not all(parts) or len(parts) > 2 + entity or (takes and '"' in where):
        shape = takes or "PROJECT, PROJECT/RUN" + (" or ENTITY/PROJECT/RUN" if entity else "")
        raise ContractError(f"{option} takes {shape}, and not {where!r}")
    if len(parts) == 3:
        return parts[0], parts[1], parts[2]
    return None, parts[0], parts[1] if len(parts) == 2 else None
