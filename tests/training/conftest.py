"""Fixtures of the trainings."""

from tests.support.pruning_worker import backbone  # noqa: F401
