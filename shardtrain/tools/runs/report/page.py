"""Report page: one self-contained HTML file without network requests. All text is escaped."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
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
_ROWS_OF = "rows_of/"
_COUNTS = ("skipped_updates", "spikes", "rewinds")
_VALIDATIONS = 20
_MOST_CHARTS = 60


def build(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or of several runs for comparison."""
    # Use paths for folders with the same name.
    short = [run.name for run in runs]
    names = [run.name if short.count(run.name) == 1 else str(run.folder) for run in runs]
    charts = _charts(runs, names)
    title = "Run " + names[0] if len(runs) == 1 else f"{len(runs)} runs"
    package = resources.files(__package__)
    script = package.joinpath("report.js").read_text(encoding="utf-8")
    style = package.joinpath("report.css").read_text(encoding="utf-8")

    # Names of runs and metrics are untrusted. JSON without "<" cannot end the script element, and the content
    # security policy allows only this script, identified by its hash.
    data = json.dumps([chart.data() for chart in charts], allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("\x7f", "\\u007f")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'"
    figures = [
        f'<figure id="chart-{index}"><h3>{escape(chart.title)}</h3>{chart.svg(chart.title)}'
        '<div class="value" aria-live="off"></div></figure>'
        for index, chart in enumerate(charts)
    ]
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
    # Escape control characters and text-direction marks, which an editor or a terminal would interpret.
    return visible(
        "".join(
            [
                '<!doctype html><html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{rules}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(title)}</title><style>{style}</style></head><body>",
                *body,
                f'<script type="application/json" id="charts">{data}</script><script>{script}</script></body></html>\n',
            ]
        )
    )


def _charts(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    points = max(100, POINTS * 4 // max(4, len(runs)))

    def lines(metric: str, source: str = "metrics", suffix: str = "") -> Iterable[ChartLine]:
        for color, (run, name) in enumerate(zip(runs, names, strict=True)):
            series: Series | None = getattr(run, source).get(metric)
            if series is not None and len(series.steps):
                yield ChartLine(name + suffix, *series.thinned(points), color=color, dots=source == "validation")

    # First the charts of CHARTS, then one chart with the rows of each source, then one chart per unknown metric.
    found = []
    known = {*LEFT_OUT, *(name for _, metrics, _ in CHARTS for name in metrics)}
    for title, metrics, logarithmic in CHARTS:
        curves = [line for metric in metrics for line in lines(metric)]
        if metrics == ("loss",):
            curves += lines("loss", "validation", " (validation)")
        found.append(Chart(title, curves, logarithmic))
    sources = sorted({name for run in runs for name in run.metrics if name.startswith(_ROWS_OF)})
    if sources:
        of_rows = [line for name in sources for line in lines(name, suffix=f" {name.removeprefix(_ROWS_OF)}")]
        colored = [dataclasses.replace(line, color=place) for place, line in enumerate(of_rows)]
        found.append(Chart("Rows read of each source", colored))
    left_out = ("goodput_", _ROWS_OF)
    others = {name for run in runs for name in run.metrics if not name.startswith(left_out)} - known
    found += [Chart(name, list(lines(name))) for name in sorted(others)]
    of_validation = {name for run in runs for name in run.validation} - {"loss"}
    found += [Chart(f"{name} (validation)", list(lines(name, "validation"))) for name in sorted(of_validation)]
    return [chart for chart in found if chart.lines][:_MOST_CHARTS]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table. ``head`` is text, the cells of ``rows`` are markup. Only the last column wraps."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="tables short"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _name(names: Sequence[str], index: int) -> str:
    return f'<span class="name" style="--run:{COLORS[index % len(COLORS)]}">{escape(names[index])}</span>'


def _last(run: RunRecord, metric: str) -> str:
    series = run.metrics.get(metric)
    return format_number(series.values[-1]) if series is not None and len(series.values) else ""


def _summary(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        validation = run.validation.get("loss")
        best = format_number(min(validation.values)) if validation is not None else ""
        goodput = f"{100 * run.account.goodput:.1f} %" if run.account is not None and run.account.attempts else ""
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
    # Skip columns without values.
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    return _table([head[place] for place in kept], [[row[place] for place in kept] for row in rows])


def _state(run: RunRecord) -> str:
    if not run.end:
        return "under way, or killed"
    if run.end.get("code") == 0:
        return "ended"
    code = run.end.get("code")
    how = "stopped" if code in (failure.PREEMPTED, failure.NOT_SAVED) else "ended"
    return f"{how} with exit code {code}: {str(run.end.get('message', ''))[:500]}"


def _samples(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    parts = []
    for index, run in enumerate(runs):
        for step, prompt, text in run.samples:
            head = f"{_name(names, index)} after step {step:,}"
            parts.append(
                f"<figure><figcaption>{head}</figcaption><pre><b>{escape(prompt)}</b>{escape(text)}</pre></figure>"
            )
    return f'<h2>Samples</h2><div class="charts samples">{"".join(parts)}</div>' if parts else ""


def _planned(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = [
        (_name(names, index), escape(what), format_number(plan), format_number(found), f"{found / plan - 1:+.0%}")
        for index, run in enumerate(runs)
        for what, (plan, found) in run.planned.items()
        if plan
    ]
    return "<h2>Planned and measured</h2>" + _table(("Run", "", "Planned", "Measured", "Off"), rows) if rows else ""


def _validations(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        steps = sorted({step for series in run.validation.values() for step in series.steps[-_VALIDATIONS:]})
        by_name = {name: dict(zip(series.steps, series.values, strict=True)) for name, series in run.validation.items()}
        for step in steps[-_VALIDATIONS:]:
            values = ", ".join(
                f"{escape(name)} {format_number(found[step])}" for name, found in by_name.items() if step in found
            )
            rows.append((_name(names, index), str(step), values))
    return "<h2>Validation</h2>" + _table(("Run", "Step", "Values"), rows) if rows else ""


def _time(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    accounts = [
        (index, run.account) for index, run in enumerate(runs) if run.account is not None and run.account.attempts
    ]
    if not accounts:
        return ""
    rows = []
    for index, account in accounts:
        running = account.running_seconds
        for name, seconds in account.seconds.items():
            share = f"{100 * seconds / running:.1f} %" if running else ""
            rows.append((_name(names, index), escape(name), f"{seconds:.1f} s", share, escape(MEANINGS[name])))
    return "<h2>Where the time went</h2>" + _table(("Run", "Part", "Time", "Share", "Meaning"), rows)


def _alerts(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = []
    for index, run in enumerate(runs):
        for count in _COUNTS:
            series = run.metrics.get(count)
            if series is not None and series.values[-1]:
                rows.append((_name(names, index), f"{count}: {format_number(series.values[-1])}"))
        if run.account is not None and run.account.failures:
            rows.append((_name(names, index), f"failures: {run.account.failures}"))
        if run.bad_lines:
            rows.append((_name(names, index), f"{run.bad_lines} lines of its files are damaged and were ignored"))
        rows += [(_name(names, index), escape(line)) for line in run.alerts]
    return "<h2>Alerts</h2>" + _table(("Run", "What"), rows) if rows else ""


def _options(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    def text(value: Any) -> str:
        return escape(json.dumps(value, default=str)[:1000])

    if len(runs) == 1:
        rows = [(escape(name), text(value)) for name, value in runs[0].options.items()]
        if not rows:
            return ""
        return (
            f"<h2>Options</h2><details><summary>all {len(rows)}</summary>{_table(('Option', 'Value'), rows)}</details>"
        )
    missing = object()
    every = dict.fromkeys(name for run in runs for name in run.options)
    different = [
        name
        for name in every
        if any(run.options.get(name, missing) != runs[0].options.get(name, missing) for run in runs)
    ]
    if not different:
        return "<h2>Options</h2><p>All runs have the same options.</p>"
    compared = [
        (escape(name), *(text(run.options[name]) if name in run.options else "" for run in runs)) for name in different
    ]
    return "<h2>Options that differ</h2>" + _table(("Option", *names), compared)
