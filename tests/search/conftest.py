"""Fixtures of the searches."""

from tests.support.pruning_worker import backbone  # noqa: F401
