"""Task files of the harnesses for the embedded questions, and the functions that they name."""
