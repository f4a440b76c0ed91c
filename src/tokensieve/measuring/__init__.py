"""Measuring what a plan costs and saves: FLOPs, times, memory, and which model families can be cut."""
