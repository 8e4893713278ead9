"""Tables and prose fit a terminal of 80 columns, whatever the numbers are."""

import json
import random
from pathlib import Path

import pytest

from zero_minimal.paper import formulas
from zero_minimal.programs import bench, compare, configs, report, reproduce, tables

RECORDED = Path(__file__).parents[2] / "lessons/pictures"


def assert_fits(text):
    wide = [line for line in text.splitlines() if len(line) > report.COLUMNS]
    assert not wide, f"more than {report.COLUMNS} columns:\n" + "\n".join(wide)


@pytest.mark.parametrize("seed", range(20))
def test_a_table_of_any_size_fits_and_keeps_every_cell(seed):
    draw = random.Random(seed)
    columns = draw.randint(2, 14)
    heads = [" ".join("head"[:draw.randint(1, 4)] for _ in range(draw.randint(0, 4))) for _ in range(columns)]
    rows = [[f"row {row}", *(f"{draw.randrange(10 ** draw.randint(1, 15)):,}" for _ in range(columns - 1))]
            for row in range(5)]
    text = report.table([heads, *rows])
    assert_fits(text)
    for name, *cells in rows:
        own = [line[len(name):].split() for line in text.splitlines() if line.startswith(name)]
        assert sum(own, []) == cells, "its cells, in their order"


def test_a_table_that_fits_is_one_and_its_head_is_one_line():
    text = report.table([["name", "a long head of it"], ["one", "1"], ["two", "22"]])
    assert text.splitlines() == ["name  a long head of it", "─" * 23, "one                   1",
                                 "two                  22"]


def test_heads_are_broken_before_a_table_is_cut():
    head = ["", *["some words of it"] * 6]
    lines = report.table([head, ["row", *["1,000,000"] * 6]]).splitlines()
    assert len([line for line in lines if "─" in line]) == 1 and lines[-1].count("1,000,000") == 6
    lines = report.table([head, ["row", *["1,000,000,000,000"] * 6]]).splitlines()
    assert len([line for line in lines if "─" in line]) == 2


def test_prose_is_broken_and_tables_are_not(capsys):
    table = report.table([["", "x" * 60], ["row", "1"]])
    report.say("word " * 40 + "\n\n" + table + "\n- " + "note " * 40)
    out = capsys.readouterr().out
    assert_fits(out)
    assert table in out and "\n  note" in out and out.split() == ["word"] * 40 + table.split() + ["-"] + ["note"] * 40


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())["rows"]


def test_what_runs_have_reported_fits():
    for row in recorded("compare"):
        assert_fits(report.fitted(report.describe(row)))
    assert_fits(report.fitted(compare.describe(recorded("compare"))))
    assert_fits(report.fitted(configs.describe(recorded("configs"))))
    models = {row["model"] for row in recorded("bench")}
    for model in models:
        assert_fits(report.fitted(bench.describe([row for row in recorded("bench") if row["model"] == model])))


def test_a_large_model_fits_too():
    row = json.loads(json.dumps(recorded("compare")[3]), parse_int=lambda text: int(text) * 1000)
    row["ranks"] = 2
    text = report.fitted(report.describe(row))
    assert_fits(text)
    for state in formulas.STATES:
        assert f"{row['memory'][state]:,}" in text


def test_the_tables_of_the_paper_fit():
    def cell(**more):
        return {"model": "7.5B", "ranks": 1024, "paper": "15.7", "formula_gb": 4011.72, "code_gb": 4011.7,
                "agrees": False} | more

    bar = {"model": "100B", "config": "C4", "paper_cached_gb": 26.1, "cached_gb": 126.1, "allocated_gb": 123.4,
           "by_category_gb": dict.fromkeys((*formulas.STATES, "activations", "buffers"), 100.25), "host_gb": 33.31}
    states = dict.fromkeys(formulas.STATES, 1e12)
    results = {
        tables.table1: {"cells": [cell(stage=stage) for stage in (1, 2, 3)]},
        tables.figure1: {"bars": [{"stage": 0, "states": states, "formula": states, "paper": "120"}]},
        tables.table2: {"cells": [{"model_parallel": 16, "stage": 3, "ranks": 1024, "paper": 2048, "formula": 2.048e12,
                                   "code": 2.0471e12, "runs": 12, "agrees": False, "paper_measured": 121.6}]},
        tables.figure7: {"bars": [bar, bar | {"paper_cached_gb": None}]},
    }
    for tell, result in results.items():
        assert_fits(report.fitted(tables.describe(tell, result | {"notes": ["note " * 40]})))
    assert_fits(report.fitted(tables.describe(tables.figure2, reproduce.figure2())))
