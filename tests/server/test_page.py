"""The page at `/`: its headers, its cache, its keys, and what its files may not contain."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.server.page.assets import CONTENT_SECURITY_POLICY, FOLDER, MEDIA, PageAssets
from paceline.web import api_keys
from support.servers import IDLE_S, NAME, Running, toy_running

FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in MEDIA)
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
PARSES_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML"
    r"|\beval\(|new Function|srcdoc|javascript:"
)
ELSEWHERE = re.compile(r"""(?:https?:)?//[\w.-]+\.\w+""")
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture(scope="module")
def server(toy_server: Running) -> Running:
    return toy_server


def fetch(server: Running, path: str, **headers: str) -> httpx.Response:
    return httpx.get(
        f"{server.url}{path}", headers=headers, trust_env=False, follow_redirects=True, timeout=IDLE_S
    )


def assets(index: str) -> list[str]:
    return re.findall(r"""(?:src|href)="(/assets/[^"]+)\"""", index)


def test_the_page_and_its_files_are_served_with_a_strict_policy(server: Running) -> None:
    index = fetch(server, "/")
    found = assets(index.text)
    assert len(found) == 8
    for path, kind in [("/", "html"), *((path, path.rpartition(".")[2]) for path in found)]:
        response = fetch(server, path)
        assert response.status_code == 200
        assert response.headers["content-type"] == MEDIA[f".{kind}"]
        assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY


def test_files_are_kept_by_their_hash_and_the_index_is_asked_for_again(server: Running) -> None:
    index = fetch(server, "/")
    assert index.headers["cache-control"] == "no-cache"
    again = fetch(server, "/", **{"if-none-match": index.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert fetch(server, "/", **{"if-none-match": '"another"'}).status_code == 200
    path = assets(index.text)[0]
    assert fetch(server, path).headers["cache-control"] == "public, max-age=31536000, immutable"
    stale = path.replace(PageAssets().version, "0" * 16)
    assert stale != path
    assert fetch(server, stale).status_code == 404


def test_another_content_has_another_version(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("VERSION")
    (tmp_path / "main.js").write_text("1")
    before = PageAssets(tmp_path).version
    (tmp_path / "main.js").write_text("2")
    assert PageAssets(tmp_path).version != before


@pytest.mark.parametrize("name", ["assets.py", "../app.py", "..%2fapp.py", "%2e%2e/app.py", "index.html", ""])
def test_nothing_but_the_files_of_the_page_is_served(server: Running, name: str) -> None:
    assert fetch(server, f"/assets/{PageAssets().version}/{name}").status_code == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path: Path) -> None:
    assert not ELSEWHERE.findall(path.read_text().replace(NAMESPACE, ""))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_parses_text_as_html(path: Path) -> None:
    assert not PARSES_HTML.findall(path.read_text())


def test_the_index_has_no_inline_script_or_style() -> None:
    index = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>(.*?)</script>", index, re.S) == ["", ""]
    assert not re.search(r"<style|\sstyle=|\son\w+=", index)


def test_every_view_that_is_listed_has_a_module() -> None:
    listed = re.findall(r'name: "(\w+)"', (FOLDER / "views" / "index.js").read_text())
    assert listed
    assert {f"{name}.js" for name in listed} <= {path.name for path in (FOLDER / "views").iterdir()}


def test_another_site_may_not_read_the_page_data(server: Running) -> None:
    assert fetch(server, "/page/about", origin="https://evil.example").status_code == 403
    assert fetch(server, "/page/about", origin=server.url).status_code == 200
    assert fetch(server, "/", host="rebound.example").status_code == 403


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    anna = api_keys.add(file, "anna", {"requests_per_minute": 1})
    return {"file": str(file), "anna": anna, "olga": api_keys.add(file, "olga", operator=True)}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Running]:
    with toy_running(tmp_path_factory.mktemp("locked"), keys=keys["file"]) as found:
        yield found


def test_the_page_opens_without_a_key_and_its_data_do_not(locked: Running, keys: dict[str, str]) -> None:
    assert fetch(locked, "/").status_code == 200
    assert fetch(locked, "/page/about").status_code == 401
    about = {
        name: fetch(locked, "/page/about", authorization=f"Bearer {keys[name]}").json()
        for name in ("anna", "olga")
    }
    assert about["anna"]["model"] == NAME
    assert not about["anna"]["operator"]
    assert about["olga"]["operator"]


def test_the_page_s_own_requests_count_for_no_limit(locked: Running, keys: dict[str, str]) -> None:
    statuses = [
        fetch(locked, "/page/about", authorization=f"Bearer {keys['anna']}").status_code for _ in range(5)
    ]
    assert statuses == [200] * 5


def test_without_keys_a_local_server_is_its_user_s(server: Running) -> None:
    assert fetch(server, "/page/about").json()["operator"]


def test_without_keys_a_server_that_others_reach_shows_nobody_the_requests_of_others(tmp_path: Path) -> None:
    with toy_running(tmp_path, allowed_hosts=("box.example",)) as proxied:
        assert not fetch(proxied, "/page/about").json()["operator"]
