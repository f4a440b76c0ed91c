"""Evaluation: jobs from the arguments, passes over the data under all plans, and the result files."""
