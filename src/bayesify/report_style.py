"""The look of a report: its style sheet and the page around its body."""

from __future__ import annotations

__all__ = ["STYLE", "TEMPLATE"]

#: Light and dark, screen and paper; figures stay on white.
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #626a73; --page: #fbfbfa;
  --card: #ffffff; --line: #e4e4e0; --warn: #b3541e; --code: #f2f2ef; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e6e3; --soft: #a2a7ad; --page: #17181a;
  --card: #202225; --line: #35383c; --warn: #f0a070; --code: #26282c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 56px 32px 96px; }
header { margin-bottom: 40px; }
h1 { font-size: 2rem; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; margin: 0; }
header p { color: var(--soft); margin: 8px 0 0; }
h2 { font-size: 1.2rem; font-weight: 620; margin: 0 0 14px; }
section { margin: 0 0 64px; }
.notes { border-left: 3px solid var(--warn); padding: 2px 0 2px 20px; margin-bottom: 40px; }
.notes h2 { font-size: 1rem; color: var(--warn); margin-bottom: 4px; }
.notes ul { margin: 0; padding-left: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(max(160px, 23%), 1fr));
  gap: 16px; margin: 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 20px 14px; }
.tiles dt { color: var(--soft); font-size: 0.85rem; }
.tiles dd { margin: 2px 0 0; font-size: 1.7rem; font-weight: 620; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; }
.tiles small { display: block; font-size: 0.85rem; font-weight: 400; letter-spacing: 0;
  color: var(--soft); }
figure { margin: 0; }
.plate { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 20px; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { max-width: 46rem; color: var(--soft); margin: 14px 0 0; }
.wide { overflow-x: auto; margin-top: 24px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 8px 12px; border-bottom: 1px solid var(--line); }
th { font-weight: 400; }
thead th { color: var(--soft); font-size: 0.85rem; vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; }
table.config { margin-top: 16px; font-size: 0.9rem; }
table.config th { color: var(--soft); white-space: nowrap; vertical-align: top; width: 1%;
  padding-right: 24px; }
table.config td { text-align: left; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: 10px; padding: 16px 20px; margin: 0;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
code { font: 0.9rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
summary { cursor: pointer; font-size: 1.2rem; font-weight: 620; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --page: #fff;
  --card: #fff; --line: #ccc; --code: #f4f4f4; --warn: #8a3c10; }
  main { padding: 0; max-width: none; } section { margin-bottom: 32px; }
  figure, tr, .tiles div { break-inside: avoid; } h2 { break-after: avoid; }
  details::details-content { content-visibility: visible; } }
"""

#: Filled in by ``str.format`` with title, style and body, all of them HTML already.
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
