"""Tests that pages have the numbers of the records, and that plots are readable."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from benchmarks import quotes, records_by_topic, tables
from benchmarks.harness import results_file


def test_the_pages_say_what_the_records_say(capsys):
    assert tables.main(["--check"]) == 0
    assert capsys.readouterr().out == "nothing differs\n"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_no_region_within_a_sentence_begins_a_line(page):
    """A region comment that begins a line would end the paragraph."""
    assert not re.findall(r"^<!-- records: \w+ -->\S.*", page.read_text(), re.MULTILINE)


def test_a_difference_is_found_and_mended(tmp_path, monkeypatch, capsys):
    page, index = tmp_path / "README.md", tmp_path / "index.md"
    stale = "before <!-- records: loop_shortfall -->99 %<!-- end of records --> after\n"
    page.write_text(stale)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr(tables, "INDEX", index)
    assert tables.main(["--check"]) == 1 and page.read_text() == stale
    assert "-before" in capsys.readouterr().out
    assert tables.main([]) == 0
    assert page.read_text() == stale.replace("99 %", quotes.loop_shortfall())
    assert tables.main(["--check"]) == 0


def test_regions_of_one_and_of_several_lines():
    end = "<!-- end of records -->"
    page = f"a <!-- records: one -->x{end}\n<!-- records: two -->\n{end}"
    texts = {"one": lambda: "1", "two": lambda: "2\n3"}
    filled = tables.filled(page, texts)
    assert "-->1<!--" in filled and "-->\n2\n3\n<!--" in filled
    assert tables.filled(filled, texts) == filled
    with pytest.raises(KeyError):
        tables.filled(page, {})


def test_a_quoted_table_has_the_numbers_of_its_record():
    path = quotes.RESULTS / f"{quotes.RECORDS['ragged'][0]}.json"
    (case,) = [
        case
        for case in json.loads(path.read_text())["cases"]
        if case["case"] == "dsv3_up/forward/random"
    ]
    (row,) = [line for line in quotes.ragged().splitlines() if "`dsv3_up`" in line]
    time, best, floor = (cell.strip() for cell in row.split("|")[2:5])
    assert time.split()[0] == f"{case['peers']['ours']['median_us']:.0f}"
    assert (
        best.split()[0]
        == f"{min(case['ratios'][x] for x in quotes.PEERS if x in case['ratios']):.2f}"
    )
    assert floor == f"{case['ratios']['floor']:.2f}"


def test_what_was_not_measured_is_a_dash(monkeypatch):
    known = quotes.cases

    def fewer(topic):
        """Returns all cases except the first, with no peers except ours and a copy."""
        found = {}
        for name, case in list(known(topic).items())[1:]:
            kept = {n: p for n, p in case["peers"].items() if n in ("ours", "copy")}
            found[name] = case | {"peers": kept, "ratios": {}}
        return found

    for module in (quotes, records_by_topic):
        monkeypatch.setattr(module, "cases", fewer)
    tables_of = (quotes.ragged, quotes.float32, quotes.fp8, quotes.lists, quotes.updates)
    for text in (*tables_of, quotes.wide_updates, quotes.ragged_peers):
        header, rule, *rows = text().splitlines()
        assert rows and all(row.count("|") == header.count("|") for row in (rule, *rows))
        assert any(
            "| - |" in row or "- (-)" in row or "-, -" in row or ", -" in row for row in rows
        )


def test_every_record_is_in_the_index_and_has_the_format():
    index = tables.INDEX.read_text()
    for path in tables.INDEX.parent.glob("h200*.json"):
        results = json.loads(path.read_text())
        assert {"command", "device", "commit", "seed", "cases", "summary"} <= set(results), path
        assert f"`{path.name}`" in index
        for case in results["cases"]:
            assert {"case", "shape", "op", "peers", "ratios"} <= set(case), path


SKEWED = "h200_skew"


@pytest.mark.parametrize(
    "name",
    [
        "beside_stock",
        "relative_speed",
        "roofline",
        "updates",
        "layer",
        "losses",
        SKEWED,
    ],
)
def test_labels_of_pictures_do_not_overlap(name):
    pytest.importorskip("matplotlib")
    from benchmarks import pictures

    if name == SKEWED:
        # These cases differ only in their sizes. Give each of them a peer with a long name.
        results = results_file.load([quotes.RESULTS / f"{SKEWED}.json"])
        for case in results["cases"]:
            if "bytes" in case:
                case["peers"]["torch_grouped_mm"] = {"role": "grouped", "tflops": 1.0}
                case["ratios"]["torch_grouped_mm"] = 1.0
        figure = pictures.relative_speed(results)
    else:
        figure = pictures.PICTURES[name]()
    figure.set_dpi(pictures.DPI)
    figure.canvas.draw()
    texts = [(legend, legend) for legend in figure.legends]
    if figure._suptitle:
        texts.append(("title of all", figure._suptitle))
    for axes in figure.axes:
        if axes.axison:
            # Leave out ticks beyond the axes' limits, because their labels are not drawn.
            low, high = sorted(axes.get_ylim())
            ticks = [
                each for each in axes.get_yticklabels() if low <= each.get_position()[1] <= high
            ]
            labels = (axes.title, axes.xaxis.label, axes.yaxis.label, *ticks, *axes.texts)
            texts += [(each.get_text(), each) for each in labels]
    boxes = [(text, each.get_window_extent()) for text, each in texts if text]
    for (one, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not box.overlaps(other_box), (one, other)
    width, height = figure.get_size_inches() * pictures.DPI
    assert width <= 900
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import pictures
    from examples import records

    pictures.main(["beside_stock", "--folder", str(tmp_path)])
    assert (tmp_path / "beside_stock.png").stat().st_size > 5000
    assert {f"{name}.png" for name in (*pictures.PICTURES, *records.PICTURES)} == {
        path.name for path in pictures.IMAGES.glob("*.png")
    }
