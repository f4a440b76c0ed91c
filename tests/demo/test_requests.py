"""What the server lets in: hosts, origins, headers, sizes, broken images, a full queue, clients that go away."""

from __future__ import annotations

import asyncio
import io
import socket
import struct
import threading
import zlib
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient
from PIL import Image

from tokensieve.demo import uploads
from tokensieve.demo.app import FILES, make_app
from tokensieve.demo.guard import Guard
from tokensieve.demo.serve import host_names
from tokensieve.demo.worker import BusyError, GoneAwayError, Worker
from tokensieve.errors import UserError

EVIL = "<img src=x onerror=alert(1)>\"'</script>"


class Stub:
    """A session that answers without a model."""

    def __init__(self) -> None:
        self.uploads = uploads.Uploads()
        self.go, self.began = threading.Event(), threading.Event()

    def run(self, **asked: Any) -> dict[str, Any]:
        self.began.set()
        assert self.go.wait(30)
        return asked

    def measure(self, **asked: Any) -> dict[str, Any]:
        raise UserError(f"nothing is measured: {asked['prompt']}")

    def is_loaded(self, model: str) -> bool:
        return True

    def sample_image(self, model: str, number: int, slot: str) -> bytes:
        return b"a picture"

    def setup(self, model: str) -> dict[str, Any]:
        raise RuntimeError("a surprise")


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def quick(stub: Stub) -> Any:
    with TestClient(make_app(stub, waiting=2), base_url="http://127.0.0.1:7860", raise_server_exceptions=False) as client:  # type: ignore[arg-type]
        yield client


# -------------------------------------------------------------------------------------------------------------- hosts, origins


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "localhost.evil", "10.0.0.1"]
)
def test_other_hosts_are_refused(quick: TestClient, host: str) -> None:
    for path in ("/", "/api/setup", "/page/page.js"):
        answer = quick.get(path, headers={"Host": host})
        assert answer.status_code == 403 and "nosniff" in answer.headers["x-content-type-options"]


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:7860", "[::1]:7860", "LOCALHOST"])
def test_own_hosts_are_served(quick: TestClient, host: str) -> None:
    assert quick.get("/", headers={"Host": host}).status_code == 200


def test_a_server_for_the_network_takes_numbers_and_its_own_names(stub: Stub) -> None:
    app = make_app(stub, hosts=host_names("Studio.local"), takes_numbers=True)  # type: ignore[arg-type]
    with TestClient(app, base_url="http://192.168.1.7:7860") as client:
        assert client.get("/").status_code == 200
        for own in ("Studio.local:7860", "studio.local", "localhost:7860", f"{socket.gethostname()}:7860"):
            assert client.get("/", headers={"Host": own}).status_code == 200, own
        for other in ("evil.example", "studio.local.evil.example", ""):
            assert client.get("/", headers={"Host": other}).status_code == 403, other


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:7860"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_requests_of_other_sites_are_refused(quick: TestClient, ask: Any, headers: dict[str, str]) -> None:
    assert quick.post("/api/run", json=ask(), headers=headers).status_code == 403
    assert quick.post("/api/images", content=b"x", headers=headers).status_code == 403


def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append(scope)

    asyncio.run(Guard(app)({"type": "websocket"}, None, None))  # type: ignore[arg-type]
    assert not sent


# ------------------------------------------------------------------------------------------------------------ files, headers


def test_headers_allow_the_page_its_own_files_only(quick: TestClient) -> None:
    for path in ("/", "/page/page.js", "/nothing", "/api/setup"):
        headers = quick.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"


def test_the_page_loads_nothing_from_elsewhere(quick: TestClient) -> None:
    for name in FILES:
        text = quick.get("/" if name == "index.html" else f"/page/{name}").text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text, name
        assert (
            "innerHTML" not in text
            and "insertAdjacentHTML" not in text
            and "eval(" not in text
            and "document.write" not in text
        )
    page = quick.get("/").text
    assert "style=" not in page and "onclick" not in page and "<script>" not in page


@pytest.mark.parametrize(
    "path",
    [
        *("/page/", "/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/..\\app.py", "/page/__init__.py"),
        *("/page/index.html", "/page/page.js/", "/app.py", "/docs", "/openapi.json", "/api/samples"),
    ],
)
def test_no_folder_is_served(quick: TestClient, path: str) -> None:
    answer = quick.get(path, follow_redirects=False)
    assert answer.status_code in (404, 307, 405)
    assert "import" not in answer.text and "swagger" not in answer.text


# ------------------------------------------------------------------------------------------------------------------- images


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def test_an_image_is_kept_and_shown_anew(quick: TestClient, photo: bytes) -> None:
    first = quick.post("/api/images", content=photo).json()
    assert (first["width"], first["height"]) == (90, 60) and quick.post("/api/images", content=photo).json() == first
    shown = quick.get(f"/api/images/{first['image']}")
    assert shown.headers["content-type"] == "image/png" and shown.content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"not an image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\xff\xd8\xff\xe0 broken", b"%PDF-1.4"),
        *(b"GIF89a", png_of_size(60_000, 60_000), png_of_size(9_000, 9_000), png_of_size(50_000, 1)),
    ],
)
def test_broken_large_and_other_files_are_refused(quick: TestClient, content: bytes) -> None:
    answer = quick.post("/api/images", content=content)
    assert answer.status_code == 422 and answer.json()["error"]["message"].startswith("this file cannot be used: ")


def test_truncated_images_are_refused(quick: TestClient, photo: bytes) -> None:
    assert quick.post("/api/images", content=photo[: len(photo) // 2]).status_code == 422


def test_bodies_have_a_limit_whether_they_say_their_length_or_not(quick: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokensieve.demo.app.MAX_UPLOAD", 1000)
    assert quick.post("/api/images", content=b"x" * 1001).status_code == 413
    assert quick.post("/api/images", content=(b"x" * 100 for _ in range(11))).status_code == 413
    assert quick.post("/api/run", content=b"{" + b" " * 300_000).status_code == 413


def add_shades(kept: uploads.Uploads, count: int) -> list[str]:
    """Sends images of 20 x 20 pixels; their names."""
    names = []
    for shade in range(count):
        file = io.BytesIO()
        Image.new("RGB", (20, 20), (shade, 0, 0)).save(file, "PNG")
        names.append(kept.add(file.getvalue())[0])
    return names


def test_memory_of_images_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MEMORY", 3 * 20 * 20 * 2)
    kept = uploads.Uploads()
    names = add_shades(kept, 3)
    with pytest.raises(uploads.GoneError):
        kept.get(names[0])
    assert kept.get(names[2]).getpixel((0, 0)) == (2, 0, 0)


def test_images_of_one_request_are_kept_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MEMORY", 3 * 20 * 20 * 2)
    kept = uploads.Uploads()
    kept.together = 3
    names = add_shades(kept, 4)
    assert [kept.get(name).getpixel((0, 0)) for name in names[1:]] == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    with pytest.raises(uploads.GoneError):
        kept.get(names[0])


def test_photos_are_turned_upright(quick: TestClient) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.new("RGB", (90, 60)).save(file, "JPEG", exif=exif)
    answer = quick.post("/api/images", content=file.getvalue()).json()
    assert (answer["width"], answer["height"]) == (60, 90)


def test_an_image_that_is_gone_is_asked_for_again(client: TestClient, ask: Any) -> None:
    assert client.post("/api/run", json=ask(images={"image": "0" * 32})).status_code == 410


# ------------------------------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "[]", "null", "3", "[" * 5000, "\x00", '{"model": 3}', '{"model": "a", "images": {}, "plans": []}'),
        '{"model": "a", "images": {"image": "b"}, "plans": ["c"], "more": 1}',
        '{"model": "a", "images": {"image": "b"}, "plans": ["c", "d", "e"]}',
        '{"model": "a", "images": ["b"], "plans": ["c"]}',
    ],
)
def test_wrong_requests_are_errors_of_one_line(quick: TestClient, body: str) -> None:
    answer = quick.post("/api/run", content=body)
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert message and "\n" not in message and len(message) <= 300


def test_texts_of_users_come_back_as_json_only(quick: TestClient, ask: Any) -> None:
    answer = quick.post("/api/measure", json=ask(prompt=EVIL, batch=1))
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/json"
    assert EVIL in answer.json()["error"]["message"]


def test_surprises_are_one_line_too(quick: TestClient) -> None:
    answer = quick.get("/api/setup")
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "unexpected error: RuntimeError: a surprise"


def test_a_full_queue_refuses_at_once(quick: TestClient, stub: Stub, ask: Any, photo: bytes) -> None:
    answers: list[int] = []

    def send() -> None:
        answers.append(quick.post("/api/run", json=ask()).status_code)

    senders = [threading.Thread(target=send) for _ in range(2)]
    for sender in senders:
        sender.start()
    assert stub.began.wait(30)
    while quick.app.state.workers[0].pending < 2:  # type: ignore[attr-defined]
        pass
    refused = quick.post("/api/run", json=ask())
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1" and "busy" in refused.json()["error"]["message"]
    sample = quick.get("/api/sample?model=a&number=3&slot=image")  # images do not wait for the model
    assert sample.status_code == 200 and sample.headers.get_list("cache-control") == ["private, max-age=3600"]
    sent = quick.post("/api/images", content=photo).json()["image"]
    assert quick.get(f"/api/images/{sent}").headers.get_list("cache-control") == ["no-store"]
    stub.go.set()
    for sender in senders:
        sender.join(30)
    assert answers == [200, 200]
    assert quick.post("/api/run", json=ask()).status_code == 200


def test_work_of_clients_that_went_away_is_dropped() -> None:
    async def scenario() -> list[str]:
        worker, go, ran = Worker(limit=2), threading.Event(), []

        async def here() -> bool:
            return False

        async def gone() -> bool:
            return True

        def first() -> None:
            assert go.wait(30)
            ran.append("first")

        running = asyncio.create_task(worker.run(first, gone))  # it has begun, so it ends
        await asyncio.sleep(0.05)
        with pytest.raises(GoneAwayError):
            await worker.run(lambda: ran.append("second"), gone)
        third = asyncio.create_task(worker.run(lambda: ran.append("third"), here))
        await asyncio.sleep(0.05)
        with pytest.raises(BusyError):
            await worker.run(lambda: ran.append("fourth"), here)
        go.set()
        await running
        await third
        worker.close()
        return ran

    assert asyncio.run(scenario()) == ["first", "third"]
