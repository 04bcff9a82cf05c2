"""The documentation as a site: every page is on it, every link leads somewhere, nothing comes from another host."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` builds it; a warning fails it: a link into nowhere, a page in no list."""
    made = tmp_path_factory.mktemp("site")
    found = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-d", str(made / ".trees"), str(DOCS), str(made)],
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert found.returncode == 0, found.stderr
    return made


class Needed(HTMLParser):
    """What a page fetches, and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.fetched.append(str(given["src"]))
        if tag == "link" and "stylesheet" in str(given.get("rel")):
            self.fetched.append(str(given["href"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {file.stem for file in DOCS.glob("*.md")}
    assert {"index", "quickstart", "concepts", "troubleshooting", "metrics"} <= pages
    assert pages <= {file.stem for file in site.glob("*.html")}


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    fetched = [address for page in site.glob("*.html") for address in Needed(page).fetched]
    assert len(fetched) > 10
    assert [address for address in fetched if urlparse(address).netloc] == []
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text("utf-8", errors="replace"), style.name


def test_links_lead_to_pages_and_pictures_that_are_there(site: Path) -> None:
    missing = [
        (page.name, link) for page in site.glob("*.html") for link in Needed(page).links
        if not urlparse(link).netloc and not urlparse(link).scheme and urlparse(link).path
        and not (page.parent / urlparse(link).path).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda file: file.stem)
def test_pictures_say_what_they_show_and_run_nothing(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    names = {element.tag.split("}")[1] for element in root.iter()}
    assert {"title", "desc"} <= names
    assert not names & {"script", "foreignObject", "image"}
