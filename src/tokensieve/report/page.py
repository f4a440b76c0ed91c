"""The frame of the page and its style."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1a1a1a;--soft:#666;--line:#ddd;--box:#f6f6f6;--link:#0b57a4;
--c0:#d55e00;--c1:#0072b2;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#7a5195}
@media(prefers-color-scheme:dark){:root{--paper:#16181b;--ink:#e8e8e8;--soft:#a0a4a8;--line:#363a3f;--box:#1f2226;--link:#7db8f0;
--c0:#f58231;--c1:#4aa8e8;--c2:#2fc69b;--c3:#e59cc4;--c4:#f2bb3d;--c5:#8fd0f7;--c6:#b08fd0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:1.2rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:.4rem 0}h2{font-size:1.25rem;margin:2.2rem 0 .7rem;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:1.2rem 0 .5rem;overflow-wrap:anywhere}a{color:var(--link)}
.soft{color:var(--soft)}.wide{overflow-x:auto}code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.88em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:.32rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;font-weight:400}
thead th{font-weight:600;border-bottom:2px solid var(--line)}
th:first-child,td:first-child,th[scope=row],thead th:nth-child(2){text-align:left}
tbody tr:hover{background:var(--box)}
table.settings{min-width:0}table.settings td{text-align:left;white-space:normal;overflow-wrap:anywhere}
details{margin:.7rem 0;border:1px solid var(--line);border-radius:6px;padding:.4rem .8rem}
summary{cursor:pointer;font-weight:600}
pre{background:var(--box);padding:.7rem;border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere}
.notes{color:var(--soft);font-size:.92rem}nav ul{padding-left:1.2rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:1rem 0 .2rem;font-size:.9rem;align-items:center}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1rem}
figure{margin:0}figcaption{font-size:.85rem}svg.plot{width:100%;height:auto;display:block}
svg.mark{width:14px;height:14px;vertical-align:-2px;overflow:visible}
.card{background:#fff;border:1px solid var(--line);border-radius:8px;padding:.5rem;margin:.8rem 0;overflow-x:auto}
.card img{display:block;width:100%;min-width:640px;height:auto}
svg .grid{stroke:var(--line);stroke-width:1}svg text{fill:var(--ink);font-size:12px}svg .tick{fill:var(--soft)}
svg .label{font-size:11px;paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
svg .frontier{fill:none;stroke:var(--soft);stroke-width:1.5;stroke-dasharray:5 4}
svg .mark{stroke:var(--paper);stroke-width:1}svg .error{stroke:var(--soft);stroke-width:1.2;fill:none}
svg .mark.k-none,svg .mark[class*=k-control]{fill:var(--paper);stroke:var(--ink);stroke-width:1.6}
svg .mark.k-none{fill:var(--ink)}
svg .mark.k-0{fill:var(--c0)}svg .mark.k-1{fill:var(--c1)}svg .mark.k-2{fill:var(--c2)}svg .mark.k-3{fill:var(--c3)}
svg .mark.k-4{fill:var(--c4)}svg .mark.k-5{fill:var(--c5)}svg .mark.k-6{fill:var(--c6)}
svg .error.k-0{stroke:var(--c0)}svg .error.k-1{stroke:var(--c1)}svg .error.k-2{stroke:var(--c2)}svg .error.k-3{stroke:var(--c3)}
svg .error.k-4{stroke:var(--c4)}svg .error.k-5{stroke:var(--c5)}svg .error.k-6{stroke:var(--c6)}
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
