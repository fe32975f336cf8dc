"""The documentation's check: words must stay, numbers may move a little, speeds may move at will."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tool", Path(__file__).parents[1] / "tools" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_must_stay_and_numbers_may_move_a_little(docs: ModuleType) -> None:
    assert docs.alike("hit rate 50.0 %", "hit rate 51.0 %")
    assert not docs.alike("hit rate 50.0 %", "hit rate 70.0 %")
    assert not docs.alike("hit rate 50.0 %", "miss rate 50.0 %")
    assert not docs.alike("one line", "one line\nand another")


def test_speeds_and_the_rows_under_them_may_move_at_will(docs: ModuleType) -> None:
    table = "prompt  tokens/s\n────\nenglish  {}\n\nexperts  {}"
    assert docs.alike(table.format(10, 5), table.format(99, 5))
    assert not docs.alike(table.format(10, 5), table.format(10, 99))


def test_model_text_and_heat_maps_may_differ_by_rounding(docs: ModuleType) -> None:
    assert docs.alike("    'one text'", "    'another'")
    assert docs.alike("    5  45643455FF  2/8", "    5  45643456FE  2/8")
    assert not docs.alike("    5  45643455FF  2/8", "    5  45643456  2/8")
