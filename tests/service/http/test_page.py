"""The page in a browser: every task shows its answer, also with the keyboard only, without requests to other hosts."""

import csv
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"there is no browser at {CHROMIUM}")]


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked, errors = [], []
        page.on("request", lambda request: asked.append(urlsplit(request.url)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        yield page
        page.goto(f"{address}/docs")
        expect(page.locator(".opblock-post").first).to_be_visible()
        browser.close()
    assert {url.hostname for url in asked if url.scheme not in ("data", "blob")} == {"127.0.0.1"}
    assert [text for text in errors if "422" not in text] == []


def ask(page: Page, model: str, task: str, text: str | None = None) -> None:
    page.get_by_label("Model").select_option(model)
    page.get_by_label("Task").select_option(task)
    if text is None:
        page.get_by_role("button", name="Example").click()
    else:
        page.get_by_label("Sequences").fill(text)
    page.get_by_role("button", name="Run").click()


def downloaded(page: Page) -> list[list[str]]:
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    assert download.value.suggested_filename.endswith(".csv")
    return list(csv.reader(Path(download.value.path()).read_text().splitlines()))


def test_the_example_gives_a_heat_map_and_a_table_of_mutations(page: Page):
    ask(page, "esm", "masked")
    expect(page.locator("#status")).to_contain_text("4 sequences in")
    label = "Heat map of residue probabilities; the table below has the best mutations"
    expect(page.get_by_role("img")).to_have_attribute("aria-label", label)
    expect(page.get_by_role("table").locator("tr")).to_have_count(11)
    expect(page.locator("h2")).to_contain_text("insulin_human. Best mutation: ")
    pixels = "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size"
    assert page.locator("canvas").evaluate(pixels) > 20
    unnamed = "all => all.filter(each => !each.labels?.length && !each.textContent.trim()).map(each => each.outerHTML)"
    assert page.locator("input, select, textarea, button").evaluate_all(unnamed) == [], "every control has a name"


def test_neighbours_are_a_table_whose_ids_are_links(page: Page):
    ask(page, "esm", "search-proteins", ">mine\nMKTAYIAKQR\n>other\nMSILV")
    expect(page.locator("h2")).to_have_text("mine and its neighbours")
    expect(page.get_by_role("table").locator("tr")).to_have_count(11)
    link = page.get_by_role("table").get_by_role("link").first
    expect(link).to_have_attribute("href", f"https://example.org/{link.inner_text()}/page")
    assert downloaded(page)[0] == ["query", "rank", "target", "score"]
    shown = "id => import('./page.js').then(({linked}) => linked(id, '').href ?? null)"
    links = [page.evaluate(shown, name) for name in ("sp|P12345|A_B", "contig7")]
    assert links == ["https://www.uniprot.org/uniprotkb/P12345", None]


def test_a_classifier_draws_bars_and_letters_and_a_wrong_letter_is_named(page: Page):
    ask(page, "places", "classify", "MKTAYIAKQR\nMSI")
    expect(page.locator("td.bar")).to_have_count(3)
    ask(page, "helices", "classify", '>a,"b"\nMKTAYIAKQR')
    expect(page.locator("#picture p.scroll span")).to_have_count(10)
    assert downloaded(page)[:2][1][0] == 'a,"b"'
    ask(page, "esm", "embeddings", ">P7\nMK1T")
    expect(page.get_by_role("status")).to_have_text("record P7: the letter at position 3 is not a residue")
    expect(page.locator("#results")).to_be_hidden()
