"""A report as one HTML page that needs nothing else: charts, and below them every number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dflash2.evaluation.evaluate import Row
from dflash2.evaluation.svg import Bar, Line, Point, bars, lines

__all__ = ["page"]

#: Of runs, on light and on dark; most colour-blind readers tell the first four apart. They repeat after the last.
COLORS = (
    ("#1f6fd6", "#6aa9ff"), ("#d9730d", "#ffa94d"), ("#2b8a3e", "#69db7c"), ("#b0308f", "#f783d0"),
    ("#0b8f98", "#4fd6de"), ("#8a6d1a", "#e0c341"), ("#5f3dc4", "#b197fc"), ("#c92a2a", "#ff8787"),
)  # fmt: skip

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#59636e;--rule:#d8dee4;--card:#f6f8fa;LIGHT}
@media(prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e6eaef;--soft:#9aa5b1;--rule:#2d343c;--card:#171c23;DARK}}
*{box-sizing:border-box}
body{margin:0 auto;padding:28px 20px 60px;max-width:1180px;background:var(--bg);color:var(--fg);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:break-word}
h1{font-size:24px;margin:0 0 4px}h2{font-size:16px;margin:0 0 2px}p{margin:0 0 10px}
.soft{color:var(--soft);font-size:13.5px}
.cards,.charts{display:grid;gap:16px;margin:20px 0}
.cards{grid-template-columns:repeat(auto-fit,minmax(min(100%,250px),1fr))}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));align-items:start}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px}
.big{font-size:34px;font-weight:650;line-height:1.15;font-variant-numeric:tabular-nums}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
svg{display:block;width:100%;height:auto;max-width:560px;font:12px system-ui,sans-serif}
svg text{fill:var(--fg)}svg .tick,svg .axis{fill:var(--soft)}svg .name{font-weight:600}
.grid{stroke:var(--rule)}.whisker{stroke:var(--fg);stroke-width:1.2;fill:none;opacity:.75}
.mark{stroke:var(--soft);stroke-dasharray:3 3}.line{fill:none;stroke-width:2}.band{opacity:.16}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:4px 10px;text-align:left;border-bottom:1px solid var(--rule);white-space:nowrap}
td.n,th.n{text-align:right}details{margin:14px 0}summary{cursor:pointer;font-weight:600}
dl{display:grid;grid-template-columns:minmax(110px,max-content) 1fr;gap:3px 16px;margin:8px 0;font-size:13.5px}
dt{color:var(--soft)}dd{margin:0;min-width:0;overflow-wrap:anywhere}
"""

#: Charts over the position of a draft in its block, by metric: title and explanation.
BY_POSITION = {
    "conditional_acceptance": ("Acceptance by position", "share of drafts that stand when all before them stood"),
    "recall": ("Recall of the candidates", "share of those rows whose candidates hold the target's token"),
    "selector_accuracy": ("Choice among the candidates", "share of drafts that stand when they hold it"),
}
NOTE = (
    "A bonus token is the target's own, so 1 means that no draft ever stood. Whiskers, bands and brackets are 95 % "
    "bootstrap intervals over prompts."
)


def page(report: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The whole document.

    Args:
        report: what `dflash2.evaluation.report` puts into ``report.json``.
        rows: its estimates.
    """
    runs = list(report["runs"])
    body = [
        f"<h1>{escape(report['title'])}</h1>",
        f"<p class='soft'>Acceptance length: {escape(report['definition'])}. {NOTE}</p>",
        "<div class='cards'>", *(_card(run, i, report, rows) for i, run in enumerate(runs)), "</div>",
        _lines_are_of(rows), "<div class='charts'>", *_charts(runs, report, _coldest(rows)), "</div>",
        *_check(report), _summary(runs, rows), _table(rows), _settings(report),
    ]  # fmt: skip
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(report['title'])}</title><style>{_style(len(runs))}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _style(runs: int) -> str:
    light, dark, rules = [], [], []
    for i in range(runs):
        one, other = COLORS[i % len(COLORS)]
        light.append(f"--c{i}:{one};")
        dark.append(f"--c{i}:{other};")
        rules.append(f"rect.c{i},circle.c{i},polygon.c{i}{{fill:var(--c{i})}}.line.c{i}{{stroke:var(--c{i})}}")
        rules.append(f".key.c{i}{{background:var(--c{i})}}")
    return STYLE.replace("LIGHT", "".join(light)).replace("DARK", "".join(dark)) + "".join(rules)


def _lines_are_of(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(r.name for r in rows if r.group == "all"))
    return f"<p class='soft'>Lines are of {names[0]}.</p>" if len(names) > 1 else ""


def _coldest(rows: Sequence[Row]) -> list[Row]:
    """Without lines of other temperatures than the first: a line is of one. The table has all."""
    others = tuple(dict.fromkeys(r.name for r in rows if r.group == "all"))[1:]
    return [r for r in rows if r.group not in ("all", "context") or not r.name.endswith(others)]


def _pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [r for r in rows if all(getattr(r, k) == v for k, v in wanted.items())]


def _interval(r: Row, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    return f"{r.value:{form}} [{r.low:{form}}, {r.high:{form}}]"


def _label(r: Row) -> str:
    where = f", draft {r.position}" if r.position else ""
    return f"{r.run}, {r.name}{where}: {_interval(r)}, {r.prompts} prompts"


def _widest(rows: Iterable[Row], run: str) -> int:
    return max(r.drafts for r in rows if r.run == run)


def _card(run: str, color: int, report: Mapping[str, Any], rows: Sequence[Row]) -> str:
    parts = [f"<div class='card'><h2><span class='key c{color}'></span>{escape(run)}</h2>"]
    for r in _pick(rows, run=run, group="all", metric="acceptance_length", drafts=_widest(rows, run)):
        parts.append(f"<div class='big'>{r.value:.2f}</div><div class='soft'>tokens per round, {escape(r.name)}, ")
        parts.append(f"up to {r.drafts} drafts, {r.prompts} prompts [{r.low:.2f}, {r.high:.2f}]</div>")
        for d in _pick(rows, run=run, group="all", name=r.name, metric="difference_to_first_run"):
            parts.append(f"<div class='soft'>{_interval(d, True)} against {escape(report['baseline'])}</div>")
        for g in _pick(rows, run=run, group="all", name=r.name, metric="selector_gain", drafts=r.drafts):
            if report["runs"][run]["selector_top_k"]:
                parts.append(f"<div class='soft'>{_interval(g, True)} by the selector</div>")
        speed = _pick(rows, run=run, group="all", name=r.name, metric="tokens_per_s")
        if speed:
            best = max(speed, key=lambda s: s.value)
            plain = next(s.value for s in speed if s.drafts == 0)
            parts.append(f"<div class='soft'>fastest with {best.drafts} drafts: {best.value:,.0f} tokens/s, ")
            parts.append(f"{best.value / plain:.2f} times plain decoding</div>")
    return "".join(parts) + "</div>"


def _charts(runs: Sequence[str], report: Mapping[str, Any], rows: Sequence[Row]) -> Iterable[str]:
    for group, title in (("dataset", "By data set"), ("domain", "By domain")):
        names = list(dict.fromkeys(r.name for r in _pick(rows, group=group)))
        if names:
            yield _chart(title, "tokens per round; the dashed line is plain decoding", _bars(runs, rows, group, names))
    if len({r.drafts for r in _pick(rows, metric="acceptance_length")}) > 1:
        svg = _by_drafts(runs, report, rows, "acceptance_length", "acceptance_length_unary")
        yield _chart("By number of drafts", "tokens per round; dashed without the selector", svg)
    if _pick(rows, metric="tokens_per_s"):
        note = f"tokens/s, 0 is plain decoding; costs: {report['costs']['source']}"
        yield _chart("Speed by number of drafts", note, _by_drafts(runs, report, rows, "tokens_per_s", None))
    for metric, (title, note) in BY_POSITION.items():
        found = [
            Line([_point(r, r.position) for r in _pick(rows, run=run, metric=metric, group="all")], i)
            for i, run in enumerate(runs)
        ]
        if any(line.points for line in found):
            yield _chart(title, note, lines(found, title=title, x_label="draft", y_from=0, y_to=1))
    contexts = list(dict.fromkeys(r.name for r in _pick(rows, group="context")))
    if len(contexts) > 1:
        found = [
            Line([_point(r, contexts.index(r.name)) for r in _pick(rows, run=run, group="context")], i)
            for i, run in enumerate(runs)
        ]
        svg = lines(found, title="By context length", x_label="tokens before the round", y_from=1, names=contexts)
        yield _chart("By context length", "tokens per round, over all rounds that begin there", svg)


def _point(r: Row, x: float) -> Point:
    return Point(x, r.value, r.low, r.high, _label(r))


def _bars(runs: Sequence[str], rows: Sequence[Row], group: str, names: Sequence[str]) -> str:
    found = []
    for name in names:
        there = [(i, _pick(rows, run=run, group=group, name=name, metric="acceptance_length", position=0))
                 for i, run in enumerate(runs)]  # fmt: skip
        best = [(i, max(rs, key=lambda r: r.drafts)) for i, rs in there if rs]
        found.append((name, [Bar(i, r.value, r.low, r.high, _label(r)) for i, r in best]))
    return bars(found, title=f"acceptance length by {group}", mark=1.0)


def _by_drafts(
    runs: Sequence[str], report: Mapping[str, Any], rows: Sequence[Row], metric: str, other: str | None
) -> str:
    found = []
    for i, run in enumerate(runs):
        kinds = [(metric, False)] + ([(other, True)] if other and report["runs"][run]["selector_top_k"] else [])
        for name, dashed in kinds:
            there = sorted(_pick(rows, run=run, group="all", metric=name), key=lambda r: r.drafts)
            found.append(Line([_point(r, r.drafts) for r in there], i, dashed))
    return lines(found, title=metric, x_label="drafts per round, at most", y_from=1 if other else 0)


def _chart(title: str, note: str, svg: str) -> str:
    return f"<div class='card'><h2>{escape(title)}</h2><p class='soft'>{escape(note)}</p>{svg}</div>"


def _check(report: Mapping[str, Any]) -> Iterable[str]:
    for run, c in report.get("live_check", {}).items():
        yield (
            f"<p><b>Live check of {escape(run)}:</b> {c['same_tokens']} of {c['prompts']} answers came out token for "
            f"token, {c['same_rounds']} of them in the same rounds; {c['acceptance_live']:.4f} tokens per round by "
            f"generating, {c['acceptance_replay']:.4f} by replay, which was {c['times_faster']:.0f} times faster.</p>"
        )


def _summary(runs: Sequence[str], rows: Sequence[Row]) -> str:
    head = "".join(f"<th class='n'>{escape(run)}</th>" for run in runs)
    lines_ = []
    for group in ("all", "dataset", "domain", "context"):
        for name in dict.fromkeys(r.name for r in _pick(rows, group=group)):
            metric = "acceptance_length_over_rounds" if group == "context" else "acceptance_length"
            cells = []
            for run in runs:
                found = _pick(rows, run=run, group=group, name=name, metric=metric)
                gain = _pick(rows, run=run, group=group, name=name, metric="difference_to_first_run")
                text = _interval(max(found, key=lambda r: r.drafts)) if found else "-"
                more = f"<br><span class='soft'>{_interval(gain[0], True)}</span>" if gain else ""
                cells.append(f"<td class='n'>{text}{more}</td>")
            lines_.append(f"<tr><td>{group}</td><td>{escape(name)}</td>{''.join(cells)}</tr>")
    return (
        "<h2>Acceptance length</h2><p class='soft'>Small: the difference to the first run, over the same prompts.</p>"
        f"<div class='scroll'><table><tr><th>by</th><th></th>{head}</tr>{''.join(lines_)}</table></div>"
    )


def _table(rows: Sequence[Row]) -> str:
    heads = ("run", "group", "name", "drafts", "metric", "position", "value", "low", "high", "prompts")
    cells = "".join(f"<th>{h}</th>" for h in heads)
    body = []
    for r in rows:
        values = [r.run, r.group, r.name, r.drafts, r.metric, r.position or "", *(f"{x:.4f}" for x in (r.value, r.low,
                  r.high)), r.prompts]  # fmt: skip
        body.append("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in values) + "</tr>")
    return (
        f"<details><summary>All {len(rows):,} numbers</summary><div class='scroll'><table><tr>{cells}</tr>"
        f"{''.join(body)}</table></div></details>"
    )


def _settings(report: Mapping[str, Any]) -> str:
    parts = []
    for title in ("trace", "settings", "provenance"):
        items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(_flat(v))}</dd>" for k, v in report[title].items())
        parts.append(f"<details><summary>{title}</summary><dl>{items}</dl></details>")
    for run, about in report["runs"].items():
        items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(_flat(v))}</dd>" for k, v in about.items())
        parts.append(f"<details><summary>{escape(run)}</summary><dl>{items}</dl></details>")
    return "".join(parts)


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_flat(v)}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
