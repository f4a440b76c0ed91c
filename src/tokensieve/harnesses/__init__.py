"""Plans in the evaluation harnesses lm-eval and lmms-eval. Nothing here is imported by the rest of the package."""
