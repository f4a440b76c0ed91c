"""The frame of a page and its look, which reports, the leaderboard and the page of `demo` share."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib import resources

STYLE, SCRIPT = (
    (resources.files("tokensieve.report") / name).read_text(encoding="utf-8") for name in ("look.css", "look.js")
)  # the script sorts tables and shows what points of plots are
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def render_page(title: str, body: str) -> str:
    """A page that loads nothing from elsewhere, and runs no script but its own."""
    mark = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{mark}'"
    return PAGE.format(title=escape(title), policy=policy, style=STYLE, body=body, script=SCRIPT)
