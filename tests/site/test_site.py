"""The documentation in a browser: the front page, the search, light and dark, and a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

REFERENCE = "docs/reference/attention.html"
OPTION = "selfattn_ext.scaled_dot_product_attention.dropout_p"

#: The widths of contents and of room, of the page and of the part of it that the theme lets scroll by itself.
WIDTHS = """
    return [document.documentElement, document.querySelector(".bd-article-container")]
        .map(element => [element.scrollWidth, element.clientWidth]);
"""


@pytest.fixture
def phone(browser: Chrome) -> Iterator[None]:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def links(browser: Chrome, selector: str) -> list[str]:
    found = [element.text for element in browser.find_elements(By.CSS_SELECTOR, selector)]
    return [text for text in found if text]  # what is hidden has none


def test_front_page(browser: Chrome, address: str) -> None:
    """It shows the README, the pages' order, and a picture that has been loaded."""
    browser.get(f"{address}/index.html")
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("selfattn_ext")
    order = ["Install", "Five minutes", "Guides", "Reference", "How it works", "Contributing"]
    assert links(browser, "header .navbar-nav .nav-link")[:6] == order
    picture = browser.find_element(By.CSS_SELECTOR, "img.only-light")
    assert picture.is_displayed()
    assert picture.get_property("naturalWidth") > 100


def test_the_search_finds_an_option(browser: Chrome, address: str) -> None:
    browser.get(f"{address}/index.html")
    browser.find_element(By.CSS_SELECTOR, ".search-button__button").click()
    field = browser.find_element(By.CSS_SELECTOR, "dialog input[type=search]")
    field.send_keys("dropout", Keys.ENTER)
    found = browser.find_element(By.LINK_TEXT, OPTION)
    assert OPTION in links(browser, "#search-results li a")[:3]
    found.send_keys(Keys.ENTER)  # a click may miss it, as results move while more of them come
    browser.find_element(By.ID, OPTION)
    assert browser.current_url.partition("#")[::2] == (f"{address}/{REFERENCE}", OPTION)


def test_files_need_no_server(browser: Chrome, html: Path) -> None:
    browser.get((html / "search.html").as_uri() + "?q=dropout")
    browser.find_element(By.LINK_TEXT, OPTION)


def test_a_phone_needs_no_sideways_scrolling(browser: Chrome, address: str, html: Path, phone: None) -> None:
    pages = [path.relative_to(html).as_posix() for path in html.rglob("*.html")]
    pages = sorted(page for page in pages if not page.startswith("_"))
    assert {"index.html", REFERENCE} <= {*pages}
    widths = {}
    for page in pages:
        browser.get(f"{address}/{page}")
        widths[page] = browser.execute_script(WIDTHS)
    wide = [
        page for page, (whole, article) in widths.items() if whole != [390, 390] or article[0] > article[1]
    ]
    assert wide == []


def test_light_and_dark(browser: Chrome, address: str) -> None:
    colours = set()
    for mode in ("light", "dark"):
        browser.get(f"{address}/index.html")
        browser.execute_script("localStorage.setItem('mode', arguments[0])", mode)
        browser.refresh()
        colours.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        assert browser.find_element(By.CSS_SELECTOR, f"img.only-{mode}").is_displayed()
    assert len(colours) == 2


def test_nothing_comes_from_elsewhere(browser: Chrome, address: str) -> None:
    """No font, script, style or picture is loaded from another machine."""
    browser.get(f"{address}/{REFERENCE}")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert loaded
    assert [one for one in loaded if not one.startswith((address, "data:"))] == []
