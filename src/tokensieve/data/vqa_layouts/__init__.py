"""Layouts of question files, one module for each: as published, or a JSONL of the user's own. `layout.py` has the interface."""
