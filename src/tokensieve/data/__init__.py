"""What is read: data sets by name (sources.py), images (images.py), and the scenes that ship (scenes.py, embedded.py)."""
