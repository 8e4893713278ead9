"""The book: every page and output is in it, every link leads somewhere, and it loads nothing from another host."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

HOUSE = Path(__file__).parents[2]
SOURCES = [*HOUSE.glob("*.md"), *HOUSE.glob("lessons/**/*.md"), *HOUSE.glob("notebooks/*.ipynb")]
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),  # several minutes, if another program is at work
    pytest.mark.skipif(not all(map(importlib.util.find_spec, ("sphinx", "myst_nb", "furo"))),
                       reason="needs requirements-book.txt"),
]


def build(sources, site, *options):
    """The book of these sources: (its exit code, what it complained of)."""
    run = subprocess.run([sys.executable, "-m", "sphinx", "-q", *options, "-c", HOUSE / "book", sources, site],
                         capture_output=True, text=True)
    return run.returncode, run.stderr


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Its pages: {file: what it holds}. What a page lets you download is a file as it stands."""
    site = tmp_path_factory.mktemp("book")
    assert build(HOUSE, site, "-W", "--keep-going") == (0, "")
    pages = [page for page in site.rglob("*.html") if "_downloads" not in page.parts]
    return {page: BeautifulSoup(page.read_text(), "html.parser") for page in pages}


def site_of(book):
    return next(page.parent for page in book if page.name == "index.html")


def test_every_page_and_every_stored_picture_is_in_it(book):
    for source in SOURCES:
        page = book[(site_of(book) / source.relative_to(HOUSE)).with_suffix(".html")]
        assert page.h1
        if source.suffix == ".ipynb":
            outputs = [output for cell in json.loads(source.read_text())["cells"] for output in cell.get("outputs", ())]
            pictures = [output for output in outputs if "image/png" in output.get("data", ())]
            assert pictures and len(page.select(".cell_output img")) == len(pictures)
    assert "deadlock" in (site_of(book) / "searchindex.js").read_text()


def test_every_link_and_anchor_leads_somewhere(book):
    names = {page: {tag["id"] for tag in soup.select("[id]")} for page, soup in book.items()}
    links = [(page, urlsplit(tag.get("href") or tag.get("src") or "")) for page, soup in book.items()
             for tag in soup.select("[href], [src]")]
    inside = [(page, link) for page, link in links if not (link.scheme or link.netloc)]
    assert len(inside) > 1000
    for page, link in inside:
        target = (page.parent / unquote(link.path)).resolve() if link.path else page
        assert target.is_file(), f"{page}: {link.geturl()}"
        assert not link.fragment or target not in book or unquote(link.fragment) in names[target], f"{page}: {link}"


def test_it_loads_nothing_from_another_host(book):
    for page, soup in book.items():
        loaded = [tag.get("src") or tag.get("href") for tag in soup.select("[src], link[href]")]
        assert not [address for address in loaded if re.match(r"(\w+:)?//", address)], page
    for style in [*site_of(book).rglob("*.css"), *book]:
        assert not re.search(r"""(url\(|@import)\s*['"]?(\w+:)?//""", style.read_text()), style


def test_formulas_become_mathematics(book, tmp_path):
    (tmp_path / "README.md").write_text("# F\n\n$2Ψ\\frac{N-1}{N}$\n\n$$\\alpha + \\beta n$$\n\n```math\nx^2\n```\n")
    build(tmp_path, tmp_path / "site")
    assert (tmp_path / "site/README.html").read_text().count("<math ") == 3
    (tmp_path / "README.md").write_text("# F\n\n$\\fraction$\n")
    assert re.search(r"README.md:3: WARNING: .fraction", build(tmp_path, tmp_path / "site")[1])
    for page, soup in book.items():
        for tag in soup.select("pre, code, script, style"):
            tag.decompose()
        assert not re.search(r"\$[^$\n]+\$", soup.get_text()), page
