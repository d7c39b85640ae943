"""Report page: one self-contained HTML file without network requests. All text is escaped."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from shardtrain.launch import failure
from shardtrain.launch.goodput.account import MEANINGS
from shardtrain.metrics.step_record import TOTAL_SPEED
from shardtrain.tools.runs.report.chart import COLORS, Chart, ChartLine, format_number
from shardtrain.tools.runs.run_files import POINTS, RunRecord, Series
from shardtrain.utils.redact import visible

# Charts at the top of the page, in this order: title, metrics, True if the axis may be logarithmic.
CHARTS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Loss", ("loss",), False),
    ("Gradient norm", ("grad_norm",), True),
    ("Learning rate", ("lr",), False),
    (TOTAL_SPEED.capitalize(), ("tokens_per_second",), False),
    ("MFU", ("mfu",), False),
    ("Memory, GiB", ("memory_gib",), False),
    ("Seconds of a step", ("step_seconds",), False),
    ("Seconds of a step that waited for data", ("data_seconds",), False),
    ("Fullest expert over the mean", ("moe_max_load",), False),
    ("Goodput", ("goodput",), False),
)
# Metrics without a chart: the page shows them elsewhere, or they repeat another metric.
LEFT_OUT = ("max_loss", "tps", "tflops", "tokens_seen", "skipped_updates", "spikes", "rewinds")
_OF_SOURCES = {
    "loss_of/": "Loss of each source",
    "targets_of/": "Target tokens of each source",
    "rows_of/": "Rows read of each source",
}
"""Prefix of the metrics of data sources, and the title of their chart."""
_COUNTS = ("skipped_updates", "spikes", "rewinds")
"""Metrics that count events since the start of the run. The page reports them as alerts."""
_VALIDATIONS = 20
"""Number of validations in the table of each run."""
_MOST_CHARTS = 60


def build(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or of several runs for comparison."""
    # Use paths for folders with the same name.
    short_names = [run.name for run in runs]
    names = []
    for run in runs:
        is_unique = short_names.count(run.name) == 1
        names.append(run.name if is_unique else str(run.folder))
    title = f"{len(runs)} runs"
    if len(runs) == 1:
        title = f"Run {names[0]}"

    charts = _charts(runs, names)
    figures = []
    for index, chart in enumerate(charts):
        figures.append(
            f'<figure id="chart-{index}"><h3>{escape(chart.title)}</h3>{chart.svg(chart.title)}'
            '<div class="value" aria-live="off"></div></figure>'
        )
    body = [
        f"<h1>{escape(title)}</h1>",
        _summary(runs, names),
        '<h2>Curves</h2><p class="hint">Drag to zoom, double-click to go back. Dots mark validations.</p>',
        f'<div class="charts">{"".join(figures)}</div>',
        _samples(runs, names),
        _validations(runs, names),
        _planned(runs, names),
        _time(runs, names),
        _alerts(runs, names),
        _options(runs, names),
    ]

    # Names of runs and metrics are untrusted. JSON without "<" cannot end the script element, and the content
    # security policy allows only this script, identified by its hash.
    package = resources.files(__package__)
    script = package.joinpath("report.js").read_text(encoding="utf-8")
    style = package.joinpath("report.css").read_text(encoding="utf-8")
    data = json.dumps([chart.data() for chart in charts], allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\x7f", "\\u007f")
    script_hash = hashlib.sha256(script.encode()).digest()
    digest = base64.b64encode(script_hash).decode()
    rules = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{style}</style></head><body>",
        *body,
        f'<script type="application/json" id="charts">{data}</script><script>{script}</script></body></html>\n',
    ]
    # Escape control characters and text-direction marks, which an editor or a terminal would interpret.
    return visible("".join(parts))


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    """Return the charts that have a curve: those of CHARTS, one of all data sources, one per unknown metric."""
    curves = _Curves(runs, names)
    charts = []
    known = set(LEFT_OUT)
    for title, metrics, logarithmic in CHARTS:
        known.update(metrics)
        lines = []
        for metric in metrics:
            lines += curves.of_metric(metric)
        # Losses of training and validation share a chart.
        if metrics == ("loss",):
            lines += curves.of_validation("loss", " (validation)")
        charts.append(Chart(title, lines, logarithmic))

    # Metrics that no list above knows also get a chart, such as those of a user's task.
    metrics_of_runs: set[str] = set()
    validations_of_runs: set[str] = set()
    for run in runs:
        metrics_of_runs.update(run.metrics)
        validations_of_runs.update(run.validation)
    for prefix, title in _OF_SOURCES.items():
        charts.append(_sources_chart(title, prefix, curves, sorted(metrics_of_runs)))
    for name in sorted(metrics_of_runs - known):
        if not name.startswith(("goodput_", *_OF_SOURCES)):
            charts.append(Chart(name, curves.of_metric(name)))
    for name in sorted(validations_of_runs - {"loss"}):
        charts.append(Chart(f"{name} (validation)", curves.of_validation(name)))
    with_curves = [chart for chart in charts if chart.lines]
    return with_curves[:_MOST_CHARTS]


class _Curves:
    """Curves of one metric, one for each run that has it, in the color of the run."""

    def __init__(self, runs: Sequence[RunRecord], names: Sequence[str]) -> None:
        self._runs = runs
        self._names = names
        # Points per curve, so the size of the page does not grow with the number of runs.
        self._points = max(100, POINTS * 4 // max(4, len(runs)))

    def of_metric(self, metric: str, suffix: str = "") -> list[ChartLine]:
        """Return the curves of a metric of training. Their names end with ``suffix``."""
        series = [run.metrics.get(metric) for run in self._runs]
        return self._lines(series, suffix, dots=False)

    def of_validation(self, metric: str, suffix: str = "") -> list[ChartLine]:
        """Return the curves of a metric of validation, with dots."""
        series = [run.validation.get(metric) for run in self._runs]
        return self._lines(series, suffix, dots=True)

    def _lines(
        self, series_of_runs: Sequence[Series | None], suffix: str, dots: bool
    ) -> list[ChartLine]:
        lines = []
        for color, series in enumerate(series_of_runs):
            if series is None or not len(series.steps):
                continue
            steps, values = series.thinned(self._points)
            name = self._names[color] + suffix
            lines.append(ChartLine(name, steps, values, color=color, dots=dots))
        return lines


def _sources_chart(title: str, prefix: str, curves: _Curves, metrics: Sequence[str]) -> Chart:
    """Return one chart with a metric of each data source. Every curve has its own color."""
    lines: list[ChartLine] = []
    for metric in metrics:
        if not metric.startswith(prefix):
            continue
        source = metric.removeprefix(prefix)
        for line in curves.of_metric(metric, f" {source}"):
            lines.append(dataclasses.replace(line, color=len(lines)))
    return Chart(title, lines)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table below its title, or "" without rows.

    ``title`` is markup, ``head`` is text, the cells of ``rows`` are markup. Only the last column wraps.
    """
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    body = "".join(lines)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'{title}<div class="tables short">{table}</div>'


def _name(names: Sequence[str], index: int) -> str:
    """Return the name of a run as markup, in the color of its curves."""
    color = COLORS[index % len(COLORS)]
    return f'<span class="name" style="--run:{color}">{escape(names[index])}</span>'


def _last(run: RunRecord, metric: str) -> str:
    series = run.metrics.get(metric)
    if series is None or not len(series.values):
        return ""
    return format_number(series.values[-1])


def _summary(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    speed = TOTAL_SPEED.capitalize()
    head = (
        "Run",
        "Step",
        "Tokens",
        "Loss",
        "Best validation loss",
        speed,
        "Memory, GiB",
        "Goodput",
        "Certificate",
        "State",
    )
    rows = []
    for index, run in enumerate(runs):
        validation = run.validation.get("loss")
        best = ""
        if validation is not None:
            best = format_number(min(validation.values))
        goodput = ""
        if run.account is not None and run.account.attempts:
            goodput = f"{100 * run.account.goodput:.1f} %"
        rows.append(
            (
                _name(names, index),
                f"{run.last_step}",
                _last(run, "tokens_seen"),
                _last(run, "loss"),
                best,
                _last(run, "tokens_per_second"),
                _last(run, "memory_gib"),
                goodput,
                escape(run.certificate),
                escape(_state(run)),
            )
        )
    # Skip columns without values. A column is its title followed by the cells of all runs.
    columns = []
    for column in zip(head, *rows, strict=True):
        _, *cells = column
        if any(cells):
            columns.append(column)
    shown_head, *shown_rows = zip(*columns, strict=True)
    return _table("", shown_head, shown_rows)


def _state(run: RunRecord) -> str:
    # A killed process cannot record its end.
    if not run.end:
        return "under way, or killed"
    code = run.end.get("code")
    if code == 0:
        return "ended"
    verb = "ended"
    if code in (failure.PREEMPTED, failure.NOT_SAVED):
        verb = "stopped"
    message = str(run.end.get("message", ""))
    return f"{verb} with exit code {code}: {message[:500]}"


def _samples(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    figures = []
    for index, run in enumerate(runs):
        for step, prompt, text in run.samples:
            caption = f"<figcaption>{_name(names, index)} after step {step:,}</figcaption>"
            figures.append(
                f"<figure>{caption}<pre><b>{escape(prompt)}</b>{escape(text)}</pre></figure>"
            )
    if not figures:
        return ""
    return f'<h2>Samples</h2><div class="charts samples">{"".join(figures)}</div>'


def _planned(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        for quantity, (planned, measured) in run.planned.items():
            # Nothing was planned for this quantity, and the difference would divide by 0.
            if not planned:
                continue
            difference = measured / planned - 1
            rows.append(
                (
                    _name(names, index),
                    escape(quantity),
                    format_number(planned),
                    format_number(measured),
                    f"{difference:+.0%}",
                )
            )
    head = ("Run", "", "Planned", "Measured", "Off")
    return _table("<h2>Planned and measured</h2>", head, rows)


def _validations(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        # Values may have been recorded at different steps.
        recent_steps: set[int] = set()
        values_by_name: dict[str, dict[int, float]] = {}
        for name, series in run.validation.items():
            recent_steps.update(series.steps[-_VALIDATIONS:])
            values_by_name[name] = dict(zip(series.steps, series.values, strict=True))
        shown_steps = sorted(recent_steps)[-_VALIDATIONS:]
        for step in shown_steps:
            texts = []
            for name, values in values_by_name.items():
                if step in values:
                    number = format_number(values[step])
                    texts.append(f"{escape(name)} {number}")
            rows.append((_name(names, index), str(step), ", ".join(texts)))
    return _table("<h2>Validation</h2>", ("Run", "Step", "Values"), rows)


def _time(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        account = run.account
        if account is None or not account.attempts:
            continue
        running = account.running_seconds
        for name, seconds in account.seconds.items():
            share = ""
            if running:
                share = f"{100 * seconds / running:.1f} %"
            rows.append(
                (
                    _name(names, index),
                    escape(name),
                    f"{seconds:.1f} s",
                    share,
                    escape(MEANINGS[name]),
                ),
            )
    return _table("<h2>Where the time went</h2>", ("Run", "Part", "Time", "Share", "Meaning"), rows)


def _alerts(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        texts = []
        for name in _COUNTS:
            series = run.metrics.get(name)
            if series is None:
                continue
            # The last value counts all events so far.
            count = series.values[-1]
            if count:
                texts.append(f"{name}: {format_number(count)}")
        if run.account is not None and run.account.failures:
            texts.append(f"failures: {run.account.failures}")
        if run.bad_lines:
            texts.append(f"{run.bad_lines} lines of its files are damaged and were ignored")
        for alert in run.alerts:
            texts.append(escape(alert))
        name_of_run = _name(names, index)
        for text in texts:
            rows.append((name_of_run, text))
    return _table("<h2>Alerts</h2>", ("Run", "What"), rows)


def _options(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return all options of one run, or the options that differ between several runs."""
    if len(runs) == 1:
        return _all_options(runs[0])

    # A dict is a set that keeps the order of the configuration.
    option_names: dict[str, None] = {}
    for run in runs:
        option_names.update(dict.fromkeys(run.options))
    # Options of another version may be missing, so compare with a value that no option has.
    missing = object()
    differing = []
    for option in option_names:
        values = [run.options.get(option, missing) for run in runs]
        if all(value == values[0] for value in values):
            continue
        row = [escape(option)]
        for value in values:
            row.append("" if value is missing else _option_text(value))
        differing.append(row)
    if not differing:
        return "<h2>Options</h2><p>All runs have the same options.</p>"
    return _table("<h2>Options that differ</h2>", ("Option", *names), differing)


def _all_options(run: RunRecord) -> str:
    rows = []
    for name, value in run.options.items():
        rows.append((escape(name), _option_text(value)))
    if not rows:
        return ""
    table = _table("", ("Option", "Value"), rows)
    return f"<h2>Options</h2><details><summary>all {len(rows)}</summary>{table}</details>"


def _option_text(value: Any) -> str:
    return escape(json.dumps(value, default=str)[:1000])
