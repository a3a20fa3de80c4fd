"""A report in a real browser: it draws all charts, downloads nothing, and fits the screen of a phone."""

import json
from pathlib import Path

import pytest
from support.browser import Browser
from support.reports import HOSTILE, hostile_page, outcome_of_noise, write_run

from jaxddp.reports.classes import accuracy_tables, feature_map, run_classes
from jaxddp.reports.compose import Page, render
from jaxddp.reports.tables import read_runs

pytestmark = pytest.mark.ci

WIDE, PHONE = (1400, 1000), (390, 844)
CHARTS = 16
"""Seven charts of curves, two of seeds, confusion matrices and reliability diagrams of three runs, features of one."""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A report of three seeds and of a run with another learning rate and without times."""
    folder = tmp_path_factory.mktemp("runs")
    workdirs = [write_run(folder / f"imagenet_resnet50-with-a-long-name-seed{seed}", seed) for seed in range(3)]
    workdirs.append(write_run(folder / "other", 3, optimizer={"learning_rate": 0.3}))
    (workdirs[3] / "metrics.jsonl").write_text((workdirs[3] / "metrics.jsonl").read_text().replace("images_per_", "i_"))
    page_content = Page(read_runs(workdirs))
    classes = [run_classes(run, page_content.legend[run], outcome_of_noise(60 + run)) for run in range(3)]
    classes[1] = classes[1]._replace(features=feature_map(1, outcome_of_noise(61)))
    page_content.classes, page_content.accuracies = classes, accuracy_tables(classes)
    page_content.class_faults = ["none"]
    file = folder / "report.html"
    file.write_text(render(page_content))
    return file


def drawn_charts(browser: Browser) -> dict[str, bool]:
    """Return by id whether a chart shows a line, a marker, a bar or an image."""
    return browser.run(
        """Object.fromEntries([...document.querySelectorAll(".chart")].map(chart => [chart.id,
            [...chart.querySelectorAll(".scatterlayer path, .barlayer path, .heatmaplayer image")].some(mark => {
                const {width, height} = mark.getBoundingClientRect();
                return width + height > 5;
            })]))"""
    )


def opened(browser: Browser, page: Path, *size: int, dark: bool = False) -> Browser:
    """Open a page with all its details."""
    browser.open(page, *size, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    browser.settle()
    browser.settle()
    return browser


def press(browser: Browser, button: str) -> None:
    browser.run(f"document.querySelector({json.dumps(button)}).click()")
    browser.settle()


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (WIDE, True), (PHONE, False)])
def test_all_charts_are_drawn_and_nothing_is_downloaded(browser, page, size, dark):
    marks = drawn_charts(opened(browser, page, *size, dark=dark))
    missing = [chart for chart, shown in marks.items() if not shown]
    assert len(marks) == CHARTS and missing == []
    assert browser.errors == [] and browser.requests == [page.as_uri()]
    ink = browser.run("getComputedStyle(document.body).color")
    assert (ink == "rgb(230, 232, 235)") == dark
    assert browser.run("document.querySelector('.gtitle, .xtitle').style.fill") != ""
    browser.run("dispatchEvent(new Event('beforeprint'))")
    width = "document.querySelector('.chart .main-svg').getBoundingClientRect().width"
    assert browser.run(width) < 346 and browser.run("getComputedStyle(document.body).color") == "rgb(36, 41, 47)"


def test_errors_on_the_page_are_detected(browser, tmp_path):
    """The test above detects a failing script and a request to another host."""
    bad = tmp_path / "bad.html"
    bad.write_text("<script>undefined.x</script><img src='http://127.0.0.1:9/x.png'>")
    opened(browser, bad, *WIDE)
    assert any("TypeError" in error for error in browser.errors)
    assert "http://127.0.0.1:9/x.png" in browser.requests


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_page_is_no_wider_than_the_screen_and_its_text_can_be_read(browser, page, size):
    press(opened(browser, page, *size), "[data-scale=log]")
    assert browser.run("document.scrollingElement.scrollWidth") <= size[0]
    small = browser.run(
        """[...document.querySelectorAll("body *")]
            .filter(part => [...part.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
            .filter(part => !["SCRIPT", "STYLE"].includes(part.tagName.toUpperCase()) && part.getClientRects().length)
            .filter(part => parseFloat(getComputedStyle(part).fontSize) < 12)
            .map(part => part.outerHTML.slice(0, 200))"""
    )
    assert small == []
    outside = browser.run(
        """[...document.querySelectorAll("body *")].filter(part => !part.closest(".scroll") && !part.closest("svg"))
            .filter(part => part.getBoundingClientRect().right > innerWidth + 0.5)
            .map(part => part.outerHTML.slice(0, 99))"""
    )
    assert outside == []


def test_the_reader_chooses_the_axis(browser, page):
    runs = read_runs(sorted(page.parent.glob("imagenet*")))
    browser.open(page, *WIDE)
    chart = browser.run("document.querySelector('.chart').id")
    for axis in ("step", "time", "epoch"):
        press(browser, f"[data-axis={axis}]")
        traces = browser.run(f"document.getElementById('{chart}').data.map(trace => [...trace.x])")
        expected = [run.positions(columns)[axis] for run in runs for columns in run.series if columns]
        unit = 60 if axis == "time" else 1
        for x, values in zip(traces, expected, strict=False):
            assert x == pytest.approx((values / unit).tolist(), rel=1e-6)
        # The fourth run logs no speed.
        assert all(bool(x) == (axis != "time") for x in traces[9:]) and len(traces) == 12
        title = browser.run(f"document.querySelector('#{chart} .xtitle').textContent")
        assert title == {"time": "training time (min)"}.get(axis, axis)
        pressed = "[...document.querySelectorAll('[data-axis][aria-pressed=true]')].map(one => one.dataset.axis)"
        assert browser.run(pressed) == [axis]


def test_the_reader_chooses_the_scale_of_the_loss_and_the_runs(browser, page):
    browser.open(page, *WIDE)
    scales = "[...document.querySelectorAll('.chart')].filter(one => one._fullLayout?.yaxis.type === 'log').length"
    assert browser.run(scales) == 0
    press(browser, "[data-scale=log]")
    assert browser.run(scales) == 2
    lines = "document.querySelectorAll('.chart')[0].querySelectorAll('.scatterlayer .trace').length"
    before = browser.run(lines)
    press(browser, "[data-run='1']")
    assert browser.run(lines) == before - 3
    press(browser, "[data-run='1']")
    assert browser.run(lines) == before == 12


def test_markup_in_names_is_text(browser, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(render(hostile_page(tmp_path)))
    assert all(drawn_charts(opened(browser, file, *PHONE)).values()) and browser.errors == []
    assert browser.run("document.querySelectorAll('script').length") == 3
    assert browser.run("document.querySelectorAll('main b i, main td i:not(.swatch), img[src=x]').length") == 0
    headings = browser.run("[...document.querySelectorAll('tbody th')].map(cell => cell.textContent)")
    assert HOSTILE in headings and "<i>b</i>" in headings
    ticks = browser.run("[...document.querySelectorAll('.square .ytick text')].map(tick => tick.textContent)")
    assert "<i>b</i>" in ticks
    press(browser, "[data-scale=log]")  # Its losses are between 2 and 5.
    assert browser.run("document.querySelectorAll('#curve-0 .ytick').length") > 2
    assert browser.run("document.scrollingElement.scrollWidth") <= PHONE[0]
