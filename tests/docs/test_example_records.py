"""The table and the picture of the recorded training runs are those of the records."""

from __future__ import annotations

import json

import pytest

from examples import records


def test_the_page_has_what_the_records_say(capsys):
    assert records.main(["--check"]) == 0
    assert capsys.readouterr().out == "nothing differs\n"


def test_a_row_has_the_numbers_of_its_record():
    record = json.loads((records.RESULTS / "h100_pretrain_bf16.json").read_text())
    ours = record["cases"][0]["peers"]["ours"]
    (row,) = [line for line in records.speeds().splitlines() if line.startswith("| bfloat16 | 1 ")]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == [
        "1 H100 80GB HBM3",
        f"{ours['median_us'] / 1000:.0f}",
        f"{ours['tflops']:.0f}",
        f"{100 * ours['tflops'] / 989:.0f} %",
        record["machine"]["packages"]["jax"],
        record["commit"],
    ]


def test_a_difference_is_found(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    page.write_text(records.PAGE.read_text().replace("| bfloat16 | 1 H100", "| bfloat16 | 9 H100"))
    stale = page.read_text()
    assert stale != records.PAGE.read_text()
    monkeypatch.setattr(records, "PAGE", page)
    monkeypatch.setattr(records.tables, "ROOT", tmp_path)
    assert records.main(["--check"]) == 1 and page.read_text() == stale
    assert "-| bfloat16 | 9 H100" in capsys.readouterr().out


def test_page_and_picture_are_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from benchmarks import pictures

    page, wanted = tmp_path / "README.md", records.PAGE.read_text()
    page.write_text(wanted.replace("| bfloat16 | 1 H100", "| bfloat16 | 9 H100"))
    monkeypatch.setattr(records, "PAGE", page)
    monkeypatch.setattr(records.tables, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    assert records.main([]) == 0 and page.read_text() == wanted
    assert (tmp_path / "pretraining.png").stat().st_size > 5000


def test_the_picture_has_every_loss_of_whole_runs():
    pytest.importorskip("matplotlib")
    (axes,) = records.losses().axes
    curves = [list(line.get_ydata()) for line in axes.lines]
    trained = [
        case
        for _, case in records.runs()
        if "--balanced" not in case["case"] and "--layers" not in case["case"]
    ]
    assert curves == [case["peers"]["ours"]["losses"] for case in trained]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(labels) == len(set(labels)) == len(curves)
