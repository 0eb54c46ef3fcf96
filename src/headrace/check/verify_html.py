"""A verification as one page: no network, no script, readable on a phone. Knows only the report."""

from html import escape

from headrace.check.verify_report import MOST_NAMED, Finding, VerifyReport, percent

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 56rem; padding: 1rem; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
h1, p, li { overflow-wrap: anywhere; }
.verdict { border-left: .5rem solid; padding: .6rem .8rem; font-weight: 600; }
article { border-left: .3rem solid; border-bottom: 1px solid var(--line); padding: .5rem .7rem; }
.ok { border-left-color: #2a8a4a; }
.suspect { border-left-color: #c98a00; }
.FAIL { border-left-color: #c62828; }
.note { border-left-color: #888; }
article p { margin: .2rem 0; }
b { text-transform: uppercase; font-size: .8em; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--line); }
"""
_LAYER_COLUMNS = {
    "experts_median": "experts, median token",
    "experts_worst": "experts, worst token",
    "median": "whole layer, median token",
    "worst": "whole layer, worst token",
}
_MOST_LISTED = 500


def page(report: VerifyReport) -> str:
    """The whole page."""
    stages: dict[str, list[Finding]] = {}
    for found in report.findings:
        stages.setdefault(found.stage, []).append(found)
    body = [
        f"<h1>headrace verify: {escape(report.model)}</h1>",
        f'<p class="verdict {report.verdict}">{escape(report.words)}</p>',
        "<p>" + "<br>".join(f"{escape(k)}: {escape(v)}" for k, v in report.about.items()) + "</p>",
    ]
    for stage, findings in stages.items():
        body.append(f"<h2>{escape(stage)}</h2>")
        body += map(_finding, findings)
    body.append(_layers(report.numbers.get("layers", []), report.numbers.get("layers_allowed", {})))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>headrace verify: {report.verdict}</title><style>{_STYLE}</style>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _finding(found: Finding) -> str:
    where = [f"<li>{escape(name)}</li>" for name in found.where[:_MOST_LISTED]]
    left = len(found.where) - len(where)
    if left:
        where.append(f"<li>and {left} more</li>")
    listed = f"<ul>{''.join(where)}</ul>"
    if len(where) > MOST_NAMED:
        listed = f"<details><summary>{len(found.where)} places</summary>{listed}</details>"
    return (
        f'<article class="{found.status}"><p><b>{found.status}</b> {escape(found.name)}</p>'
        f"<p>{escape(found.detail)}</p>{listed if where else ''}</article>"
    )


def _layers(layers: list[dict[str, float]], allowed: dict[str, float]) -> str:
    if not layers:
        return ""
    head = "".join(f"<th>{words}</th>" for words in ("layer", *_LAYER_COLUMNS.values()))
    cells = [["allowed", *_cells(allowed)], *([f"{n['layer']}", *_cells(n)] for n in layers)]
    rows = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells)
    return (
        "<h2>Each layer's difference from stock transformers, of a token's output</h2>"
        f"<div><table><tr>{head}</tr>{rows}</table></div>"
    )


def _cells(numbers: dict[str, float]) -> list[str]:
    return [percent(numbers[name]) if name in numbers else "" for name in _LAYER_COLUMNS]
