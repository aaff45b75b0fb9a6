"""The documentation site: it builds without warnings and without a network, and its links resolve."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from pages import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
INDEXES = {"genindex.html", "py-modindex.html", "search.html"}
# Any connection fails: Python's sockets are replaced before Sphinx starts.
BUILD = """
import socket, sys
def refuse(*args, **kwargs): raise OSError("the build needs a network")
socket.socket.connect = refuse
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-d", str(folder / "doctrees")]
    environ = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *options, str(ROOT / "docs"), str(folder / "html")],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@cache
def content(path: Path) -> str:
    return path.read_text()


def links(path: Path) -> set[str]:
    return {html.unescape(target) for target in re.findall(r'<a [^>]*?href="([^"]+)"', content(path))}


@cache
def anchors(path: Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', content(path)))


def target_of(path: Path, link: str) -> tuple[Path, str]:
    file, _, anchor = unquote(link).partition("#")
    return (path.parent / file).resolve() if file else path, anchor


def is_local(link: str) -> bool:
    return not re.match(r"\w+:", link)


@pytest.mark.slow
@pytest.mark.timeout(600)  # 30 s, several times as long on a busy machine
def test_site_links_and_anchors_resolve(site: Path) -> None:
    broken = []
    for path in site.rglob("*.html"):
        for link in filter(is_local, links(path)):
            file, anchor = target_of(path, link)
            if not file.is_file() or (anchor and file.suffix == ".html" and anchor not in anchors(file)):
                broken.append((path.relative_to(site).as_posix(), link))
    assert broken == []


@pytest.mark.slow
def test_every_page_is_within_two_clicks_of_index(site: Path) -> None:
    reached = {site / "index.html"}
    for _ in range(2):
        reached |= {target_of(path, link)[0] for path in reached for link in filter(is_local, links(path))}
        reached = {path for path in reached if path.suffix == ".html"}
    assert {path.relative_to(site).as_posix() for path in set(site.rglob("*.html")) - reached} <= INDEXES


@pytest.mark.slow
def test_site_pages_load_no_external_resources(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="([^"]+)"', content(path))
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preload|icon)[^>]*href="([^"]+)"', content(path))
        assert [source for source in loaded if re.match(r"(\w+:)?//", source)] == [], path


@pytest.mark.slow
def test_search_index_loads_from_file_system(site: Path) -> None:
    """The index is a script, which browsers load from files, and it has the words of pages and public names."""
    index = (site / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    assert "Search.setIndex" in index and 'src="searchindex.js"' in content(site / "search.html")
    for word in ("reshard_after_forward", "clip_grad_norm_", "zero3", "rankmismatcherror"):
        assert word in index.lower()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: make browser")
def test_search_finds_pages_in_a_browser(site: Path) -> None:
    address = f"{(site / 'search.html').as_uri()}?q=reshard_after_forward"
    options = ["--headless", "--no-sandbox", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run([CHROMIUM, *options, address], capture_output=True, text=True, check=True).stdout
    assert "Search finished" in shown
    assert 'href="api/fullshard.FSDPModule.html#fullshard.FSDPModule.set_reshard_after_forward' in shown


@pytest.mark.slow
def test_site_pages_begin_with_sentence(site: Path) -> None:
    """The first sentence states the task of the page."""
    pages = [path for path in site.glob("*.html") if path.name not in INDEXES]
    assert [path.name for path in pages if not re.search(r"</h1>\s*<p>", content(path))] == []
