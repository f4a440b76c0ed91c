"""The frame of the page and its style."""

from __future__ import annotations

from importlib import resources

STYLE = (resources.files("tokensieve.report") / "look.css").read_text(encoding="utf-8")  # also of the leaderboard and of `demo`
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
