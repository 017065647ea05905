"""The report in a real browser: nothing fails, nothing is fetched, everything is there, on every screen."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tailguard.evaluation.assessment import Fold, OptimumFound
from tailguard.evaluation.report import write_report
from tailguard.evaluation.training_record import RiskPromise, TrainingRecord
from tests.evaluation.browser import MISSING, Browser
from tests.evaluation.results import assessed, foresight, market

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

CONTRAST = """
const parse = c => { const v = c.match(/[0-9.]+/g).map(Number); return [v.slice(0, 3), v.length > 3 ? v[3] : 1]; };
const light = rgb => { const [r, g, b] = rgb.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const back = e => { if (!e) return [255, 255, 255];
  const [rgb, alpha] = parse(getComputedStyle(e).backgroundColor);
  if (alpha === 1) return rgb;
  const under = back(e.parentElement); return rgb.map((v, i) => alpha * v + (1 - alpha) * under[i]); };
return ['h1', '.verdict strong', '.verdict p', '.tile .name', '.tile .value', '.tile .detail', 'td', '.u4', '.d4', 'dt']
  .filter(q => document.querySelector(q)).map(q => { const e = document.querySelector(q);
    const [a, b] = [light(parse(getComputedStyle(e).color)[0]), light(back(e))];
    return [q, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; });
"""
CHARTS = """
return [...document.querySelectorAll('figure')].map(f => { const s = f.querySelector('svg').getBoundingClientRect();
  return [f.id, s.width, s.height, f.querySelectorAll('svg path, svg rect, svg circle').length]; });
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    place = tmp_path_factory.mktemp("report")
    bars = market(4_000, symbols=("AAA", "<b>BBB</b>"))
    strategy = foresight(bars, 0.54)
    quantiles = np.sort(np.random.default_rng(0).normal(0, 0.02, (len(strategy), 5)), axis=1)
    found = assessed(
        bars,
        replace(strategy, quantiles=quantiles),
        folds=(Fold("fold 1", 0), Fold("fold 2", 2_000)),
        levels=np.array([0.1, 0.3, 0.5, 0.7, 0.9]),
        optimum=OptimumFound(4e-4, 5e-4, 5e-4),
    )
    figures = {
        "train/explained_variance": 0.2,
        "rollout/ep_rew_mean": 0.1,
        "train/approx_kl": 0.01,
        "train/entropy": 1.0,
    }
    rows = tuple({"step": s, **figures, "risk/period_cvar": -0.05} for s in range(1, 6))
    alert = {"step": 4, "alert": "warn/x", "meaning": "Something.", "advice": "Look."}
    return write_report(found, TrainingRecord(rows, (alert,), RiskPromise(-0.04, 0.05, 250)), place / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


def test_nothing_fails_and_nothing_is_fetched(browser, page):
    browser.size(1280, 800)
    browser.requests()
    browser.open(page)
    browser.run("window.scrollTo(0, document.body.scrollHeight); return document.title;")
    assert browser.console() == []
    assert {url for url in browser.requests() if not url.startswith("data:")} == {page.as_uri()}


def test_every_chart_is_drawn(browser, page):
    browser.size(1280, 800)
    browser.open(page)
    drawn = {name: (width, height, marks) for name, width, height, marks in browser.run(CHARTS)}
    expected = {
        "equity",
        "underwater",
        "returns",
        "calibration",
        "cvar-path",
        "costs",
        "exposure",
        "weights",
        "turnover",
    }
    expected |= {f"health-{i}" for i in range(4)}
    assert set(drawn) == {f"chart-{name}" for name in expected}
    assert all(width > 300 and height > 80 and marks > 0 for width, height, marks in drawn.values())
    assert browser.run("return document.querySelectorAll('#chart-months td').length") >= 13
    assert browser.run("return document.querySelectorAll('b').length") < 30  # a name from data is text, not a tag
    assert "<b>BBB</b>" in browser.run("return document.body.innerText")


def test_the_first_screen_fits(browser, page):
    browser.size(1280, 800)
    browser.open(page)
    assert browser.run("return document.getElementById('first-screen').getBoundingClientRect().bottom") <= 800


@pytest.mark.parametrize("width", [360, 390, 768])
def test_a_small_screen_does_not_scroll_sideways(browser, page, width):
    browser.size(width, 844)
    browser.open(page)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    wide = browser.run(
        "return [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(browser, page, theme):
    browser.size(1280, 800)
    browser.theme(theme)
    browser.open(page)
    found = dict(browser.run(CONTRAST))
    browser.theme("light")
    assert all(contrast >= 4.5 for contrast in found.values()), json.dumps(found)


def test_it_prints_on_a_few_pages(browser, page):
    browser.size(1280, 800)
    browser.open(page)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 15
