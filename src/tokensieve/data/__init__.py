"""Data sets: declarations and opening by name (registry.py), what they come as (source.py), images (images.py)."""
