"""The documentation names what is there, and all that is there."""

from __future__ import annotations

import re
from pathlib import Path

import hotset

ROOT = Path(__file__).parents[1]
PACKAGE = Path(hotset.__file__).parent


def tree_names() -> set[str]:
    """Names at the left of the README's annotated tree, folders with a slash."""
    block = re.search(r"```text\n(src/hotset/\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    lines = block.group(1).splitlines()[1:]
    return {line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("      ")}


def test_the_readmes_tree_is_the_tree() -> None:
    on_disk = {p.name + "/" for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    on_disk |= {p.name for p in PACKAGE.glob("*.py") if not p.name.startswith("__")}
    assert tree_names() == on_disk


def test_every_public_name_is_importable_and_documented() -> None:
    for name in hotset.__all__:
        value = getattr(hotset, name)
        assert value.__doc__, name


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_project_speaks_of_itself_alone() -> None:
    text = "\n".join(p.read_text() for p in [*ROOT.glob("*.md"), *PACKAGE.rglob("*.py"), *(ROOT / "docs").glob("*.md")])
    assert "/work/" not in text
