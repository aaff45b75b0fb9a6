"""The page of a run: the content of its files, its look in a browser, and updates during the run."""

from __future__ import annotations

import csv
import gzip
import http.client
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import HOSTILE, bare_run, exhausted, findings_of, hostile, made_run, offloaded

import fullshard.cli.report
from fullshard.cli import main
from fullshard.errors import ConfigError
from fullshard.report.causes import find_causes, tier_lines, verdict
from fullshard.report.figures import milliseconds
from fullshard.report.page import DATA, PAGE, TRACE, write
from fullshard.report.run import PARTS, Finding, Run
from fullshard.report.shown import shown
from fullshard.report.watching import follow, serving

MOST_BYTES = 2_000_000
SECTIONS = ["verdict", "step", "units", "memory", "ranks", "shards", "training", "what-if", "facts"]


def late_run(**knobs: Any) -> Run:
    return made_run(ranks=8, late=3, steps=120, checkpoint_every=40, leak_bytes=2**20, **knobs)


@dataclass(frozen=True)
class Case:
    """A page, and what it must show."""

    run: Run
    findings: tuple[Finding, ...] = ()
    against: Run | None = None
    says: tuple[str, ...] = ()
    leaves_out: tuple[str, ...] = field(default=())


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """Return the cases, named as in the first column of the issue's table of pages to open in a browser."""
    faulty = late_run()
    large = made_run(ranks=64, steps=1000, units=500, late=17, prefix="module.language_model.model.decoder.")
    return {
        "healthy": Case(
            made_run(report_every=5),
            says=("No cause of lost time",),
            leaves_out=("wait longest", "Out of memory", "Compared with", "by tier", "Offload"),
        ),
        "faulty": Case(
            faulty, findings_of(faulty), says=("one unit too large", "Simulated gain: 140 ms", "rank 3 on node-0")
        ),
        "out of memory": Case(exhausted(faulty), says=("Rank 1 held 7.17 GB of 7.52 GB", "--activation-checkpointing")),
        "64 ranks and 500 units": Case(large, findings_of(large), says=("rank 17", "Showing 3 of 64 ranks")),
        "hostile names": Case(hostile(faulty), findings_of(faulty)),
        "hardly anything": Case(bare_run(), says=("Not measured: memory by state",)),
        "offloaded": Case(
            offloaded(faulty),
            findings_of(faulty),
            says=("Memory and traffic by tier", "from the disk, per step", "to the CPU, per step", "598 MB"),
        ),
        "two runs": Case(
            faulty,
            findings_of(faulty),
            made_run(name="runs/other"),
            says=("Compared with runs/other", "22\xa0% longer", "8 ranks"),
        ),
    }


@pytest.fixture(scope="module")
def pages(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: write(case.run, case.findings, folder / name, against=case.against) for name, case in cases.items()}


@pytest.mark.slow
def test_page_is_one_small_file_without_external_requests(pages: dict[str, Path]) -> None:
    for name, path in pages.items():
        text = path.read_text(encoding="utf-8")
        assert path.stat().st_size < MOST_BYTES, name
        assert "default-src 'none'" in text
        assert re.findall(r"<(?:link|img|iframe|object|script[^>]*src)", text) == []
        assert text.count("</script>") == 4, "a name has ended a script"
        assert sorted(each_path.name for each_path in path.parent.iterdir()) == sorted(
            [PAGE, DATA, *([TRACE] if name != "hardly anything" else [])]
        )


def test_written_data_matches_the_run(cases: dict[str, Case], pages: dict[str, Path]) -> None:
    for name, path in pages.items():
        run = cases[name].run
        reported = json.loads((path.parent / DATA).read_text())
        assert reported["name"] == run.name
        parts = {item["part"]: item["mean_s"] for item in reported["step"]["parts"]}
        assert list(parts) == list(PARTS)
        settled = run.parts_s[:, 1:] if len(run.steps) > 1 else run.parts_s
        for place, part in enumerate(PARTS):
            assert parts[part] == pytest.approx(settled[..., place].mean(), rel=1e-4), (name, part)
        assert reported["step"]["sum_s"] == pytest.approx(reported["step"]["clock_s"], rel=0.02)


def test_downsampling_keeps_peak_memory_late_rank_and_exposed_units() -> None:
    run = made_run(ranks=300, steps=900, units=10, late=211)
    reported = shown(run, ())
    assert run.memory is not None
    total = np.sum(list(run.memory.by_state.values()), axis=0)
    memory = reported["memory"]
    assert memory["labels"][memory["peak"]] == run.memory.labels[run.memory.peak]
    assert sum(values[memory["peak"]] for values in memory["by_state"].values()) == total.max()
    assert 211 in [item["rank"] for item in reported["timeline"]["ranks"]]
    assert reported["ranks"]["rows"][0]["rank"] == reported["ranks"]["slowest"]["rank"] == 211
    assert reported["ranks"]["slowest"]["part"] == "backward"
    row = next(place for place, name in enumerate(reported["ranks"]["map"]["ranks"]) if name == "210 to 214")
    assert int(np.argmax(np.mean(reported["ranks"]["map"]["late_s"], axis=1))) == row
    assert len(reported["over_steps"]["at"]) <= 400
    assert len(reported["timeline"]["ranks"]) < reported["timeline"]["of_ranks"] == 300
    reported = shown(made_run(ranks=1, units=700), ())
    assert reported["units"]["rows"][0]["fqn"] == "layers.7"
    assert len(reported["units"]["rows"]) < reported["units"]["of"] == 700
    waits = sum(item["gather_exposed_s"] + item["reduce_exposed_s"] for item in reported["units"]["rows"])
    assert waits + reported["units"]["left_out_s"] == pytest.approx(reported["units"]["waited_s"], rel=1e-4)


def test_step_averages_preserve_the_total_time() -> None:
    run = made_run(steps=1000, ranks=2, checkpoint_every=50)
    over = shown(run, ())["over_steps"]
    counts = [len(range(at, min(at + over["each"], 1001))) for at in over["at"]]
    for place, part in enumerate(PARTS):
        whole = np.dot(over["parts"][part], counts)
        assert whole == pytest.approx(run.parts_s[..., place].mean(0).sum(), rel=1e-3, abs=1e-3), part


def test_tier_rows_add_up_to_stored_and_moved_bytes() -> None:
    run = offloaded(made_run())
    reported = shown(run, ())["tiers"]
    bytes_of = {row["name"]: row["nbytes"] for row in reported["rows"]}
    assert list(bytes_of)[:3] == ["on the device", "on the CPU", "on the disk"]
    for tier in run.tiers:
        assert bytes_of[f"on the {tier.name}"] == sum(tier.stored.values())
        assert bytes_of.get(f"from the {tier.name}, per step", 0) == pytest.approx(sum(tier.comes.values()), rel=1e-5)
        assert bytes_of.get(f"to the {tier.name}, per step", 0) == pytest.approx(sum(tier.goes.values()), rel=1e-5)
    assert reported["away_bytes"] == bytes_of["on the CPU"] + bytes_of["on the disk"]
    assert reported["moved_bytes"] == pytest.approx(
        sum(row["nbytes"] for row in reported["rows"] if row["moves"]), rel=1e-5
    )
    for row in reported["rows"]:
        assert sum(row["by_state"].values()) == pytest.approx(row["nbytes"], rel=1e-5)
        assert set(row["by_state"]) <= set(reported["states"])
    assert [line.split(":")[0] for line in tier_lines(run)] == list(bytes_of)[:3]
    assert shown(made_run(), ())["tiers"] is None
    assert tier_lines(made_run()) == []


def test_missing_measurements_are_none_and_not_zero() -> None:
    reported = shown(bare_run(), ())
    for section in ("timeline", "units", "memory", "held", "shards", "training", "over_steps"):
        assert reported[section] is None
    (row,) = reported["ranks"]["rows"]
    assert row["late_s"] is row["busy"] is None
    json.dumps(reported, allow_nan=False)


def test_run_out_of_memory_in_first_step_has_a_page(tmp_path: Path) -> None:
    run = exhausted(bare_run())
    nothing = np.zeros((1, 0))
    run = replace(
        run, steps=np.zeros(0, dtype=np.int64), step_s=nothing, parts_s=np.zeros((1, 0, 8)), waited_for_s=nothing,
        busy_s=nothing,
    )  # fmt: skip
    text = write(run, (), tmp_path).read_text(encoding="utf-8")
    assert "Rank 1 held 7.17 GB" in text
    assert "no step was recorded" in text


def test_shard_boundaries_survive_a_round_trip() -> None:
    run = made_run(ranks=3, units=2)
    odd = replace(run.shards[0], fqn="odd", rows=((0, 1000), (1000, 1000), (1000, 3072)))
    reported = shown(replace(run, shards=(*run.shards, odd)), ())["shards"]
    for item in reported["parameters"]:
        (shard,) = [one for one in (*run.shards, odd) if one.fqn == item["fqn"]]
        count = item["shape"][item["dim"]]
        even = (
            [min((rank + 1) * item["cut"], count) for rank in range(3)] if isinstance(item["cut"], int) else item["cut"]
        )
        assert even == [stop for _, stop in shard.rows]
    assert sum(reported["owned_bytes"]) == reported["nbytes"]


def test_trace_file_contains_every_span(cases: dict[str, Case], pages: dict[str, Path]) -> None:
    run = cases["faulty"].run
    with gzip.open(pages["faulty"].parent / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    reported = [
        (span["pid"], threads[span["pid"], span["tid"]], span["cat"], span["ts"], span["args"]["unit"])
        for span in spans
    ]
    assert reported == [
        (rank, item.stream, item.name, round(item.start_s * 1e6, 3), item.unit or "the root")
        for rank, of_rank in run.spans.items()
        for item in of_rank
    ]


def requested(address: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=30)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_server_serves_only_report_files_and_only_locally(tmp_path: Path) -> None:
    path = write(made_run(), (), tmp_path)
    (tmp_path / "model.safetensors").write_text("secret")
    with serving(tmp_path) as address:
        assert address.startswith("http://127.0.0.1:")
        assert requested(address, "/") == (200, path.read_bytes())
        assert requested(address, f"/{DATA}") == (200, (tmp_path / DATA).read_bytes())
        for other in ("/model.safetensors", "/../secret", "/%2e%2e/secret"):
            assert requested(address, other)[0] == 404
        assert requested(address, "/", host="elsewhere.example:80")[0] == 403
        _, before = requested(address, "/version")
        os.utime(path, ns=(1, 1))
        assert requested(address, "/version") == (200, b"1") != (200, before)


def test_page_is_rewritten_only_when_the_run_has_new_data() -> None:
    states = iter([0, 0, 1, 1, 2])
    is_stored = iter([True, True, True, True, False])
    written: list[int] = []
    follow(lambda: next(states), lambda: written.append(1), lambda: next(is_stored))
    assert len(written) == 2


# ---- in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDE, NARROW = 1280, 390
CPU_S = 1.0  # CPU time of the page's thread until it responds
DRAWN_S = 3.0  # CPU time of the same thread until everything is drawn


@contextmanager
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make venv")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: make browser")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def opened(browser: Any, path: Path | str, width: int, theme: str, complaints: list[str]) -> Any:
    """Return the page when everything is drawn. Add the browser's errors, warnings and requests to `complaints`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, offline=False)
    page = context.new_page()
    page.on("console", lambda item: complaints.append(item.text) if item.type in ("error", "warning") else None)
    page.on("pageerror", lambda item: complaints.append(str(item)))
    page.on("request", lambda item: complaints.append(item.url) if item.url.startswith("http") else None)
    page.goto(path.as_uri() if isinstance(path, Path) else path)
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    return page


OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter(it => {
    const box = it.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1) && !it.closest(".scroll, nav");
}).map(it => it.outerHTML.slice(0, 80))"""
EMPTY_CHARTS = """() => [...document.querySelectorAll(".chart")].filter(it => {
    const canvas = it.querySelector("canvas");
    if (!canvas || !canvas.width || !canvas.height) return true;
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return !pixels.some(value => value);
}).map(it => it.dataset.chart)"""
CUT_OFF = """() => [...document.querySelectorAll("#units .scroll")].filter(it => it.scrollWidth > it.clientWidth + 1)
    .map(it => it.scrollWidth)"""
WITHOUT_TEXT = """() => [...document.querySelectorAll(".chart")].filter(it => {
    const text = it.getAttribute("role") === "img" ? it.getAttribute("aria-label") : "";
    return !/: .*\\d/.test(text);
}).map(it => it.dataset.chart + it.getAttribute("aria-label"))"""
EMPTY_CURVES = """() => [...document.querySelectorAll("[data-chart=curve]")].filter(it => {
    const [series] = echarts.getInstanceByDom(it).getOption().series;
    return series.data.length < 2 || series.data.some(point => point[1] === null);
}).map(it => it.dataset.curve)"""
UNSEEN = """ids => ids.filter(id => { const it = document.getElementById(id); return !it || it.offsetHeight < 40; })"""


def test_browser_renders_all_sections_and_charts(cases: dict[str, Case], pages: dict[str, Path]) -> None:
    """At both widths and in both themes: no error, no request, nothing cut off, every chart drawn, no injection."""
    with chromium() as browser:
        for name, path in pages.items():
            for width, theme in ((WIDE, "light"), (NARROW, "dark")):
                complaints: list[str] = []
                page = opened(browser, path, width, theme, complaints)
                where = f"{name}, {width} pixels, {theme}"
                assert complaints == [], where
                assert page.evaluate("document.documentElement.dataset.theme") == theme
                assert page.evaluate("document.documentElement.scrollWidth") == width, where
                assert page.evaluate(OVERFLOWING) == [], where
                assert width == NARROW or page.evaluate(CUT_OFF) == [], where
                assert page.evaluate(WITHOUT_TEXT) == [], where
                assert page.evaluate(EMPTY_CHARTS) == [], where
                assert page.evaluate(EMPTY_CURVES) == [], where
                assert page.evaluate(UNSEEN, SECTIONS) == [], where
                assert page.evaluate("window.harmed") is None, where
                visited = page.inner_text("body")
                for words in cases[name].says:
                    assert words in visited, (where, words)
                for words in cases[name].leaves_out:
                    assert words not in visited, (where, words)
                page.context.close()


@pytest.mark.slow
def test_plan_page_renders_timeline_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    argv = ["plan", "--size", "nano", "--layers", "6", "--seq", "32", "--hardware", "h100-80", "--per-host", "8"]
    assert main([*argv, "--strategies", "zero3", "--html", str(path), "--json", str(tmp_path / "plan.json")]) == 0
    text = path.read_text()
    drawn = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert {"compute", "gather", "reduce"} <= set(drawn["timeline"]["streams"])
    (streams,) = drawn["timeline"]["ranks"]
    ends = [start + took for start, took in zip(streams["start_us"], streams["took_us"], strict=True)]
    for stream in set(streams["stream"]):  # operations of one stream do not overlap
        places = [place for place, number in enumerate(streams["stream"]) if number == stream]
        assert all(ends[before] <= streams["start_us"][after] + 2 for before, after in pairwise(places))
    memory = drawn["memory"]
    assert memory["at_s"] == sorted(memory["at_s"])
    assert memory["at_s"][-1] <= max(ends) * 1e-6 + 1e-5
    assert sum(memory["peak_by_state"].values()) == memory["peak_bytes"] > 0
    with chromium() as browser:
        complaints: list[str] = []
        page = opened(browser, path, NARROW, "dark", complaints)
        assert complaints == []
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(EMPTY_CHARTS) == []
        assert page.evaluate(UNSEEN, ["plan", "step", "memory", "paste"]) == []


def test_page_responds_within_1s_and_renders_within_3s_of_cpu_time(pages: dict[str, Path]) -> None:
    """Measure the CPU time of the drawing thread, which stops while other threads use the core."""
    with chromium() as browser:
        context = browser.new_context(viewport={"width": WIDE, "height": 900})
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(pages["64 ranks and 500 units"].as_uri())
        for script, most in (("1 + 1", CPU_S), ("", DRAWN_S)):
            if script:
                page.evaluate(script)
            else:
                page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
            spent = {item["name"]: item["value"] for item in session.send("Performance.getMetrics")["metrics"]}
            assert 0 < spent["TaskDuration"] < most, spent


def test_page_controls_respond_to_clicks(pages: dict[str, Path]) -> None:
    with chromium() as browser:
        complaints: list[str] = []
        page = opened(browser, pages["faulty"], WIDE, "light", complaints)

        def theme() -> str:
            return str(page.evaluate("document.documentElement.dataset.theme"))

        page.click("#theme")
        assert theme() == "dark"
        page.reload()
        page.wait_for_selector("html[data-drawn]", state="attached")
        assert theme() == "dark", "the choice is kept"

        def first_unit() -> str:
            return str(page.inner_text("#units tbody tr:first-child td"))

        assert first_unit() == "layers.7"
        page.click("#units th:has-text('Unit')")
        assert first_unit() == "the root"
        page.click("#units th:has-text('Unit')")
        assert first_unit() == "layers.0"

        tall = page.evaluate("document.querySelector('[data-chart=timeline]').offsetHeight")
        page.select_option("#streams-of", "3")
        assert page.evaluate("document.querySelector('[data-chart=timeline]').offsetHeight") < tall
        zoom = "echarts.getInstanceByDom(document.querySelector('[data-chart=timeline]')).getOption().dataZoom[0]"
        page.click("#zoom-in")
        assert page.evaluate(f"{zoom}.end - {zoom}.start") == 50
        page.click("#zoom-all")
        assert page.evaluate(f"{zoom}.end - {zoom}.start") == 100
        page.select_option("#shards-of", label="layers.3")
        page.hover("[data-chart=memory]")
        page.wait_for_selector("[data-chart=memory] .tip")
        page.emulate_media(media="print")
        assert not page.is_visible(".bar")
        page.pdf(path=str(pages["faulty"].parent / "printed.pdf"))
        assert complaints == []


def test_hostile_name_in_a_tooltip_is_rendered_as_text(pages: dict[str, Path]) -> None:
    with chromium() as browser:
        page = opened(browser, pages["hostile names"], WIDE, "light", [])
        for chart in ("timeline", "units", "memory", "ranks", "shards"):
            page.evaluate(
                """name => echarts.getInstanceByDom(document.querySelector(`[data-chart=${name}]`))
                   .dispatchAction({type: "showTip", seriesIndex: name === "shards" ? 1 : 0, dataIndex: 3})""",
                chart,
            )
            page.wait_for_selector(f"[data-chart={chart}] .tip", state="attached")
            assert "<script>" in page.inner_text(f"[data-chart={chart}] .tip"), chart
        assert page.evaluate("window.harmed") is None
        assert page.evaluate("document.images.length") == 0


def test_served_page_updates_when_the_report_is_rewritten(tmp_path: Path) -> None:
    with chromium() as browser, serving(tmp_path) as address:
        write(made_run(steps=10), (), tmp_path)
        page = opened(browser, address, WIDE, "light", [])
        assert "steps 1 to 10" in page.inner_text(".sub")
        page.wait_for_function("performance.getEntriesByName(location.origin + '/version').length > 0")
        write(made_run(steps=20), (), tmp_path)
        os.utime(tmp_path / PAGE, ns=(time.time_ns() + 10**9,) * 2)
        page.wait_for_selector("text=steps 1 to 20", timeout=30_000)


def test_hostile_names_are_written_unchanged(pages: dict[str, Path]) -> None:
    reported = json.loads((pages["hostile names"].parent / DATA).read_text())
    assert reported["name"] == HOSTILE
    assert reported["units"]["rows"][0]["fqn"].endswith(HOSTILE)


# ---- the command


def test_report_command_writes_the_page_and_prints_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {tmp_path / "x": late_run(), tmp_path / "y": made_run(name="runs/other")}
    monkeypatch.setattr(fullshard.cli.report, "read_run", runs.__getitem__)
    assert main(["report", str(tmp_path / "x"), "--against", str(tmp_path / "y")]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith(verdict(runs[tmp_path / "x"], find_causes(runs[tmp_path / "x"])))
    assert reported.endswith(f"written to {tmp_path / 'x' / PAGE}\n")
    for run in runs.values():
        p50, p95, p99 = map(milliseconds, np.quantile(run.step_s[:, 1:].mean(0), [0.5, 0.95, 0.99]))
        assert f"steps of {run.name}: p50 {p50}, p95 {p95}, p99 {p99}" in reported.splitlines()
    other = runs[tmp_path / "y"]
    assert f"compared with runs/other: {verdict(other, find_causes(other))}" in reported.splitlines()
    assert "Compared with runs/other" in (tmp_path / "x" / PAGE).read_text(encoding="utf-8")


def test_page_contains_step_percentiles_overall_and_per_rank(cases: dict[str, Case], pages: dict[str, Path]) -> None:
    run, page = cases["faulty"].run, pages["faulty"]
    reported = json.loads((page.parent / DATA).read_text())
    for row in reported["ranks"]["rows"]:
        place = [rank.rank for rank in run.ranks].index(row["rank"])
        expected = np.quantile(run.step_s[place, 1:], [0.5, 0.95, 0.99])
        assert np.allclose([row[name] for name in ("p50_s", "p95_s", "p99_s")], expected, rtol=1e-4)
    p50, p95, p99 = np.quantile(run.step_s[:, 1:].mean(0), [0.5, 0.95, 0.99])
    assert np.allclose([reported["step"][name] for name in ("p50_s", "p95_s", "p99_s")], [p50, p95, p99], rtol=1e-4)
    assert f"p95 {milliseconds(p95)}" in page.read_text(encoding="utf-8")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_exported_csv_files_match_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = late_run()
    run = replace(run, counters={"CPU of the host": np.where(run.steps % 2, 3.5, np.nan) + 0 * run.step_s})
    monkeypatch.setattr(fullshard.cli.report, "read_run", lambda folder: run)
    folder = tmp_path / "a" / "b"
    assert main(["report", str(tmp_path), "--export", str(folder)]) == 0
    steps = rows_of(folder / "steps.csv")
    assert [(int(row["step"]), int(row["rank"])) for row in steps] == [
        (step, facts.rank) for step in run.steps for facts in run.ranks
    ]
    for row, parts, host in zip(
        steps, run.parts_s.swapaxes(0, 1).reshape(-1, len(PARTS)), run.counters["CPU of the host"].T.flat, strict=True
    ):
        np.testing.assert_array_equal([float(row[f"{part}_s"] or "nan") for part in PARTS], parts)
        assert row["CPU of the host"] == ("" if np.isnan(host) else "3.5")
    assert [row["fqn"] for row in rows_of(folder / "units.csv")] == [unit.fqn for unit in run.units]
    for row, operation in zip(rows_of(folder / "operations.csv"), run.operations, strict=True):
        assert {name: type(getattr(operation, name))(value) for name, value in row.items()} == asdict(operation)
    assert [float(row["lost"]) for row in rows_of(folder / "causes.csv")] == [item.lost for item in find_causes(run)]
    training = rows_of(folder / "training.csv")
    assert {name: [float(row[name]) for row in training] for name in run.training} == {
        name: values.tolist() for name, values in run.training.items()
    }
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--export .*file: no files can be written there"):
        fullshard.cli.report.run([str(tmp_path), "--export", str(tmp_path / "file")])


def test_watch_option_prints_steps_in_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    short, long = made_run(steps=20), made_run(steps=30)
    shown_run = [short]
    remaining = [True, True]

    def step_on() -> bool:
        shown_run[0] = long
        if not remaining:
            raise KeyboardInterrupt
        return remaining.pop()

    monkeypatch.setattr(fullshard.cli.report, "read_run", lambda folder: shown_run[0])
    monkeypatch.setattr(fullshard.cli.report, "_state", lambda folder: len(shown_run[0].steps))
    monkeypatch.setattr(fullshard.cli.report, "_remaining", step_on)
    assert main(["report", str(tmp_path), "--watch", "--terminal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{len(long.steps)} steps of {len(long.ranks)} ranks") for line in lines)
    (backward,) = (line for line in lines if line.split()[:1] == ["backward"])
    last = 1e3 * long.parts_s[:, -1, PARTS.index("backward")].mean()
    assert f"{last:.1f}" in backward.split()
    assert not any("127.0.0.1" in line for line in lines), "nothing is served"


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["x", "--terminal"], "--terminal: there is nothing to follow without --watch"),
        ([], "RUN must be given"),
        (["{empty}"], "no run was recorded there"),
        (["{empty}", "--agianst=x"], "Did you mean against?"),
    ],
)
def test_invalid_report_arguments_print_a_one_line_error(
    words: list[str], stated: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *(word.format(empty=tmp_path) for word in words)]) == 2
    err = capsys.readouterr().err
    assert stated in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
