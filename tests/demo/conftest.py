"""The page of `tokensieve demo`, without a browser: a client of its server."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from tests.support.pictures import picture
from tokensieve.demo.app import make_app
from tokensieve.demo.session import Session
from tokensieve.demo.subject import find_models

ADDRESS = "http://127.0.0.1:7860"


@pytest.fixture(scope="session")
def session() -> Session:
    """The embedded models, each loaded when it is first used."""
    return Session(find_models(argparse.Namespace(model=None, pretrained=None, model_type=None)), device="cpu")


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    with TestClient(make_app(session), base_url=ADDRESS, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def photo() -> bytes:
    """A JPEG file."""
    file = io.BytesIO()
    picture(1, 1).resize((90, 60)).save(file, "JPEG")
    return file.getvalue()


def asked(**changes: Any) -> dict[str, Any]:
    """What the page sends for a run."""
    return {"model": "sieve-vit-8", "images": {"image": "sample:3"}, "plans": ["cover@4:32"], **changes}


@pytest.fixture
def ask() -> Any:
    return asked
