"""Report page: one self-contained HTML file without network requests. All text is escaped."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from typing import Any

from shardtrain.launch import failure
from shardtrain.launch.goodput.account import MEANINGS
from shardtrain.metrics.step_record import TOTAL_SPEED
from shardtrain.tools.runs.report.chart import COLORS, Chart, ChartLine, format_number
from shardtrain.tools.runs.run_files import POINTS, RunRecord
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
_VALIDATIONS = 20
_MOST_CHARTS = 60


def build(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or of several runs for comparison."""
    # Use paths for folders with the same name.
    short_names = [run.name for run in runs]
    names = []
    for run in runs:
        is_unique = short_names.count(run.name) == 1
        names.append(run.name if is_unique else str(run.folder))
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs"

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
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
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
    points = max(100, POINTS * 4 // max(4, len(runs)))

    def lines(metric: str, suffix: str = "", is_validation: bool = False) -> list[ChartLine]:
        """Return the curve of each run that has the metric."""
        curves = []
        for color, (run, name) in enumerate(zip(runs, names, strict=True)):
            by_metric = run.validation if is_validation else run.metrics
            series = by_metric.get(metric)
            if series is not None and len(series.steps):
                steps, values = series.thinned(points)
                curves.append(
                    ChartLine(name + suffix, steps, values, color=color, dots=is_validation)
                )
        return curves

    charts = []
    known = set(LEFT_OUT)
    for title, metrics, logarithmic in CHARTS:
        known.update(metrics)
        curves = []
        for metric in metrics:
            curves += lines(metric)
        # Losses of training and validation share a chart.
        if metrics == ("loss",):
            curves += lines("loss", " (validation)", is_validation=True)
        charts.append(Chart(title, curves, logarithmic))

    metrics_of_runs: set[str] = set().union(*(run.metrics for run in runs))
    validations_of_runs: set[str] = set().union(*(run.validation for run in runs))
    for prefix, title in _OF_SOURCES.items():
        charts.append(_sources_chart(title, prefix, lines, sorted(metrics_of_runs)))
    for name in sorted(metrics_of_runs - known):
        if not name.startswith(("goodput_", *_OF_SOURCES)):
            charts.append(Chart(name, lines(name)))
    for name in sorted(validations_of_runs - {"loss"}):
        charts.append(Chart(f"{name} (validation)", lines(name, is_validation=True)))
    charts = [chart for chart in charts if chart.lines]
    return charts[:_MOST_CHARTS]


def _sources_chart(
    title: str,
    prefix: str,
    lines: Callable[[str, str], list[ChartLine]],
    metrics: Sequence[str],
) -> Chart:
    """Return one chart with a metric of each data source. Every curve has its own color."""
    curves: list[ChartLine] = []
    for metric in metrics:
        if metric.startswith(prefix):
            source = metric.removeprefix(prefix)
            for curve in lines(metric, f" {source}"):
                curves.append(dataclasses.replace(curve, color=len(curves)))
    return Chart(title, curves)


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
    return f'<span class="name" style="--run:{COLORS[index % len(COLORS)]}">{escape(names[index])}</span>'


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
    # Skip columns without values.
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    shown_head, *shown_rows = zip(*columns, strict=True)
    return _table("", shown_head, shown_rows)


def _state(run: RunRecord) -> str:
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
            if planned:
                difference = f"{measured / planned - 1:+.0%}"
                values = (format_number(planned), format_number(measured), difference)
                rows.append((_name(names, index), escape(quantity), *values))
    return _table("<h2>Planned and measured</h2>", ("Run", "", "Planned", "Measured", "Off"), rows)


def _validations(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        # Values may have been recorded at different steps.
        recent_steps: set[int] = set()
        values_of: dict[str, dict[int, float]] = {}
        for name, series in run.validation.items():
            recent_steps.update(series.steps[-_VALIDATIONS:])
            values_of[name] = dict(zip(series.steps, series.values, strict=True))
        for step in sorted(recent_steps)[-_VALIDATIONS:]:
            texts = []
            for name, values in values_of.items():
                if step in values:
                    texts.append(f"{escape(name)} {format_number(values[step])}")
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
            share = f"{100 * seconds / running:.1f} %" if running else ""
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
            if series is not None and series.values[-1]:
                texts.append(f"{name}: {format_number(series.values[-1])}")
        if run.account is not None and run.account.failures:
            texts.append(f"failures: {run.account.failures}")
        if run.bad_lines:
            texts.append(f"{run.bad_lines} lines of its files are damaged and were ignored")
        texts += [escape(alert) for alert in run.alerts]
        rows += [(_name(names, index), text) for text in texts]
    return _table("<h2>Alerts</h2>", ("Run", "What"), rows)


def _options(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return all options of one run, or the options that differ between several runs."""
    if len(runs) == 1:
        rows = [(escape(name), _option_text(value)) for name, value in runs[0].options.items()]
        if not rows:
            return ""
        table = _table("", ("Option", "Value"), rows)
        return f"<h2>Options</h2><details><summary>all {len(rows)}</summary>{table}</details>"

    # Options of another version may be missing, so compare with a value that no option has.
    missing = object()
    names_of_options = dict.fromkeys(name for run in runs for name in run.options)
    compared = []
    for name in names_of_options:
        values = [run.options.get(name, missing) for run in runs]
        if any(value != values[0] for value in values):
            texts = ["" if value is missing else _option_text(value) for value in values]
            compared.append((escape(name), *texts))
    if not compared:
        return "<h2>Options</h2><p>All runs have the same options.</p>"
    return _table("<h2>Options that differ</h2>", ("Option", *names), compared)


def _option_text(value: Any) -> str:
    return escape(json.dumps(value, default=str)[:1000])
