"""The site as a reader has it: opened from the disk, by a search for an error message, on a telephone or a desk."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from tests.browser.conftest import Heard

CHAPTER = "chapters/05_counting_steps.html"
SEARCH = "[data-md-component=search-query]"
FACTS = """() => ({
    links: [...document.querySelectorAll("a[href]")].map((a) => a.href),
    ids: [...document.querySelectorAll("[id]")].map((element) => element.id),
    broken: [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src),
    silent: [...document.images].filter((image) => image.alt.trim().length < 30).map((image) => image.src),
    images: document.images.length,
    width: document.documentElement.scrollWidth,
})"""


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def page(chromium: Any, heard: Heard) -> Iterator[Any]:
    """A page of 1280 pixels that must stay silent, and speak to no other host."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    heard.listen(page)
    yield page
    page.close()
    assert heard.messages == []
    assert [url for url in heard.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def pages_of(site: Path) -> list[Path]:
    """All but the one that a server shows for addresses that lead nowhere: from the disk, it has no style."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_every_link_and_image_leads_somewhere_at_both_widths(page: Any, site: Path):
    files = pages_of(site)
    facts = {}
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        for path in files:
            page.goto(path.as_uri())
            found = page.evaluate(FACTS)
            facts[path.as_uri()] = found
            assert found["width"] <= width, f"{path.name} is {found['width']} pixels wide on a screen of {width}"
            assert found["broken"] == found["silent"] == []
    assert sum(found["images"] for found in facts.values()) > 30
    links = {(source, link) for source, found in facts.items() for link in found["links"] if link.startswith("file:")}
    lost = []
    for source, link in sorted(links):
        target, anchor = urldefrag(link)
        if target in facts:
            if anchor and unquote(anchor) not in facts[target]["ids"]:
                lost.append((source, link))
        elif not Path(unquote(target.removeprefix("file://"))).is_file():
            lost.append((source, link))
    assert lost == []
    assert len(links) > 1000


SCROLLS = """() => [...document.querySelectorAll("pre, pre > code")]
    .filter((block) => block.scrollWidth > block.clientWidth + 1).map((block) => block.textContent.slice(0, 80))"""
WRAPPED = """() => [...document.querySelectorAll(".hl-ipython3 pre > code")].flatMap((block) => {
    const lines = block.textContent.replace(/\\n$/, "").split("\\n").length
    const height = block.getBoundingClientRect().height, style = getComputedStyle(block)
    const inner = height - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom)
    return inner > (lines + 0.5) * parseFloat(style.lineHeight) ? [block.textContent.slice(0, 80)] : []
})"""


def test_no_block_is_read_by_scrolling_and_no_line_of_a_cell_is_broken(page: Any, site: Path):
    for path in pages_of(site):
        page.goto(path.as_uri())
        assert page.evaluate(SCROLLS) == [], path.name
        assert page.evaluate(WRAPPED) == [], path.name


def results(page: Any, query: str) -> list[str]:
    """Addresses of what a search finds, best first, as they stand when the list no longer changes."""
    field = page.locator(SEARCH)
    field.fill("zzqqxx")
    page.wait_for_function("/No matching/.test(document.querySelector('.md-search-result__meta').textContent)")
    field.fill(query)
    page.wait_for_function("/\\d+ matching/.test(document.querySelector('.md-search-result__meta').textContent)")
    page.wait_for_selector(".md-search-result__item a[href*='#']", state="attached")
    found = page.evaluate("[...document.querySelectorAll('.md-search-result__item a')].map((a) => a.href)")
    return [re.sub(r"\?h=[^#]*", "", link) for link in found]


@pytest.mark.parametrize(
    ("message", "chapter", "section"),
    [
        (
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
            "02_dataloader_internals",
            "What happens when a worker ends?",
        ),
        (
            "RuntimeError: stack expects each tensor to be equal size, but got [3] at entry 0 and [5] at entry 1",
            "01_batching",
            "What does a batch look like?",
        ),
        ("`Trainer.fit` stopped: `max_steps=40` reached.", "05_counting_steps", "Symptom"),
    ],
)
def test_an_error_message_is_two_clicks_from_its_section(
    page: Any, site: Path, message: str, chapter: str, section: str
):
    page.goto((site / "index.html").as_uri())
    page.locator(SEARCH).click()
    results(page, message)
    page.locator(".md-search-result__item a[href*='#']").first.click()
    page.wait_for_url(re.compile(f"{chapter}.html.*#seen-"))
    headings = """() => {
        const here = document.getElementById(decodeURIComponent(location.hash.slice(1))).closest(".symptom")
        const above = [...document.querySelectorAll("h2, h3, h4")].filter(
            (h) => !h.closest(".symptom") && h.compareDocumentPosition(here) & Node.DOCUMENT_POSITION_FOLLOWING)
        return above.at(-1).textContent.replace("¶", "")
    }"""
    assert page.evaluate(headings) == section


def test_each_symptom_is_found_by_its_words(page: Any, site: Path):
    page.goto((site / "symptoms.html").as_uri())
    rows = page.evaluate(
        """[...document.querySelectorAll(".filtered tbody tr")].map(
            (row) => [row.cells[0].textContent, row.cells[1].querySelector("a").href])"""
    )
    assert len(rows) > 50
    page.locator(SEARCH).click()
    missed = []
    for seen, section in rows:
        first = next(link for link in results(page, seen) if "#" in link)
        if urldefrag(first).url != urldefrag(section).url or "#seen-" not in first:
            missed.append((seen, first))
    assert missed == []


def test_every_public_name_has_its_place_in_the_reference(page: Any, site: Path):
    for path in sorted((site / "api").glob("*.html")):
        page.goto(path.as_uri())
        ids = set(page.evaluate("[...document.querySelectorAll('[id]')].map((element) => element.id)"))
        topic = importlib.import_module(f"course_lib.{path.stem}")
        names = getattr(topic, "__all__", [])
        assert {name for name in names if not any(place.endswith(f".{name}") for place in ids)} == set(), path.stem


def test_the_ledger_is_filtered_by_words_and_by_verdict(page: Any, site: Path):
    page.goto((site / "claims.html").as_uri())
    rows = page.locator(".filtered tbody tr")
    visible = page.locator(".filtered tbody tr:visible")
    total = rows.count()
    assert visible.count() == total > 50
    page.get_by_label("verdict").select_option("false")
    assert 0 < visible.count() < total
    assert set(visible.locator("td:nth-child(2)").all_inner_texts()) == {"false"}
    page.get_by_label("verdict").select_option("")
    page.get_by_label("Filter the rows").fill("epoch SHUFFLE")
    texts = [text.lower() for text in visible.all_inner_texts()]
    assert 0 < len(texts) < total
    assert all("epoch" in text and "shuffle" in text for text in texts)
    visible.locator("a").first.click()
    page.wait_for_url(re.compile(r"chapters/.*#cell-"))
    assert page.evaluate("document.getElementById(location.hash.slice(1)).textContent.includes('settle')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "symptoms.html", CHAPTER, "api/steps.html"])
def test_axe_finds_no_serious_violation(chromium: Any, site: Path, name: str, scheme: str):
    from axe_playwright_python.sync_playwright import Axe

    page = chromium.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
    page.goto((site / name).as_uri(), wait_until="networkidle")
    found = Axe().run(page).response["violations"]
    page.close()
    grave = {row["id"]: row["nodes"][0]["html"] for row in found if row["impact"] in {"serious", "critical"}}
    assert grave == {}
