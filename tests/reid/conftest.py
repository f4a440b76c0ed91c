"""Fixtures of re-identification."""

from tests.support.reid_worker import root  # noqa: F401
