"""The page at `GET /`: HTML and CSS only, nothing of it from anywhere else."""
from __future__ import annotations

import base64
import hashlib

from flask import Response, render_template_string

from hooksink.received import KEPT, Received

_STYLE = """
:root { color-scheme: light dark; --good: #15662b; --bad: #a3141c; --note: #7a4b00; --line: #c9ced6; --soft: #f1f3f6; }
@media (prefers-color-scheme: dark) {
  :root { --good: #7bd88f; --bad: #ff9a94; --note: #f0c674; --line: #454b54; --soft: #23272d; }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 90rem; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; }
dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: .5rem 0 1rem; }
dl div { display: flex; gap: .4rem; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th:nth-child(5), th:nth-child(6) { width: 10%; } th:nth-child(1) { width: 12%; } th:nth-child(2) { width: 11%; }
th:nth-child(3), th:nth-child(4) { width: 17%; }
caption { text-align: left; padding-bottom: .5rem; }
th, td { box-sizing: border-box; text-align: left; vertical-align: top; padding: .4rem .6rem;
  border-top: 1px solid var(--line); overflow-wrap: anywhere; font-weight: normal; }
thead th { font-weight: 600; background: var(--soft); overflow-wrap: normal; }
code, pre, time { font: .87rem/1.4 ui-monospace, monospace; unicode-bidi: isolate;
  overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: var(--soft); padding: .6rem; margin: .4rem 0 0;
  max-height: 24rem; overflow: auto; }
summary { cursor: pointer; }
.good { color: var(--good); } .bad { color: var(--bad); } .note { color: var(--note); }
.good, .bad, .note { font-weight: 600; }
@media (max-width: 60rem) {
  table, caption, tbody, tr { display: block; }
  thead { position: absolute; clip-path: inset(50%); height: 1px; width: 1px; overflow: hidden; }
  tbody tr { border: 1px solid var(--line); margin-bottom: .8rem; }
  tbody th:nth-child(n), tbody td { width: auto; display: grid; grid-template-columns: 6.5rem minmax(0, 1fr);
    border-top: 0; padding: .25rem .6rem; }
  tbody th { background: var(--soft); }
  tbody th::before, tbody td::before { content: attr(data-name); }
}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hooksink: {{ counts.received }} received</title>
<link rel="icon" href="data:,">
<style>{{ style|safe }}</style>
</head>
<body>
<main>
<h1>hooksink</h1>
<p>What this process has received since {{ since }}; <code>{{ log }}</code> is the record, also of what came before.</p>
<dl>{% for name, count in counts.items() %}<div><dt>{{ name }}</dt><dd>{{ count }}</dd></div>{% endfor %}</dl>
{%- if hooks %}
<table role="table">
<caption>The latest hooks, newest first, {{ kept }} at most</caption>
<thead role="rowgroup"><tr role="row">
{%- for name in ("time", "path", "job", "webhook id", "signature", "answer", "body") %}
<th scope="col" role="columnheader">{{ name }}</th>{% endfor %}
</tr></thead>
<tbody role="rowgroup">
{%- for hook in hooks %}
<tr role="row">
<th scope="row" role="rowheader" data-name="time">
<time datetime="{{ hook.at }}">{{ hook.at|replace("T", " ") }}</time></th>
<td role="cell" data-name="path"><code>{{ hook.path }}</code></td>
<td role="cell" data-name="job"><div><code>{{ hook.job_id or "-" }}</code><br>{{ hook.status }}
{%- if hook.kind %} ({{ hook.kind }}){% endif %}</div></td>
<td role="cell" data-name="webhook id"><code>{{ hook.webhook_id or "-" }}</code></td>
<td role="cell" data-name="signature"><div>
{%- if hook.wrong is none %}<span class="good">valid</span>
{%- else %}<span class="bad">invalid</span>: {{ hook.wrong }}{% endif %}
{%- if hook.duplicate %}<br><span class="note">duplicate</span>{% endif %}</div></td>
<td role="cell" data-name="answer"><div>{{ hook.answer }}</div></td>
<td role="cell" data-name="body"><details><summary>{{ hook.body_bytes }} bytes</summary>
<pre>{{ hook.body }}</pre>
{%- if hook.cut %}<p>Only the beginning is kept.</p>{% endif %}</details></td>
</tr>
{%- endfor %}
</tbody>
</table>
{%- else %}
<p>Nothing yet. A first one:</p>
<pre>curl -i http://127.0.0.1:{{ api_port }}/jobs -H 'Content-Type: application/json' \\
  -d '{"n": 100000, "callback_url": "http://127.0.0.1:{{ port }}/"}'</pre>
<p>It misbehaves on request: <code>/flaky/2</code>, <code>/slow/5</code>, <code>/status/503?retry_after=15</code>.</p>
{%- endif %}
</main>
</body>
</html>
"""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
}


def render(received: Received, since: str, log: str, api_port: str, port: str) -> Response:
    """The hooks received, newest first; how to get one when there are none."""
    hooks, counts = received.latest()
    text = render_template_string(
        _PAGE, hooks=hooks, counts=counts, since=since, log=log, api_port=api_port, port=port, style=_STYLE,
        kept=KEPT)
    return Response(text, mimetype="text/html", headers=_HEADERS)
