"""Keeps the output shown in the documentation real: runs each shown command and rewrites (or checks) what it printed.

In a Markdown file, a block

    <!-- run: hotset plan trace --fraction 50% -->
    ```text
    ...
    ```

holds the stdout of that command, run from one scratch folder in which `demo` is the source tree's. A block
`<!-- sample: ... -->` holds stdout and stderr of a command whose text another processor's rounding may change: it must
run. A block `<!-- hidden: ... -->` runs a command and shows nothing. `--check` runs them all again and compares: the
words must be the same, and numbers within 10 % or 1 of each other, except those that a machine's speed decides
(tokens/s, seconds, peak memory), text that a model wrote, and the cells of heat maps, which rounding may shift.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- (run|sample|hidden): (.+?) -->\n(?:```text\n(.*?)```\n)?", re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
SPEED = re.compile(r"tokens/s|second|peak| ms| us|GB/s|steps/s")
HEAT_ROW = re.compile(r"^\s*\d+\s+[0-9A-J]{8,}(\s+\d+/\d+)?$")
MODEL_TEXT = re.compile(r"""^ {4}['"]""")
TOLERANCE = 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a block is stale")
    options = parser.parse_args()
    stale = []
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "demo").symlink_to(ROOT / "demo")
        for name in PAGES:
            path = ROOT / name
            before = path.read_text(encoding="utf-8")
            after = BLOCK.sub(lambda match: render(match, Path(scratch)), before)
            shown = zip(BLOCK.finditer(before), BLOCK.finditer(after), strict=True)
            if options.check:
                shown = (pair for pair in shown if pair[0].group(1) == "run")
                differing = [old.group(2) for old, new in shown if not alike(old.group(3) or "", new.group(3) or "")]
            else:
                differing = [old.group(2) for old, new in shown if old.group(3) != new.group(3)]
            if options.check:
                stale += [f"{name}: {command}" for command in differing]
            elif differing:
                path.write_text(after, encoding="utf-8")
                print(f"{name}: rewrote the output of {len(differing)} commands")
    if stale:
        sys.exit("these blocks no longer show what their command prints (run `make docs`):\n" + "\n".join(stale))
    print("documentation is current" if options.check else "done")


def render(match: re.Match[str], folder: Path) -> str:
    """The block with the command's output of now."""
    kind, command = match.group(1), match.group(2)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    environment |= {"TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command!r} failed with exit code {done.returncode}:\n{done.stderr}")
    if kind == "hidden":
        return f"<!-- hidden: {command} -->\n"
    text = done.stdout + (done.stderr if kind == "sample" else "")
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return f"<!-- {kind}: {command} -->\n```text\n" + "\n".join(lines) + "\n```\n"


def alike(old: str, new: str) -> bool:
    """Whether two outputs say the same, up to speed and to rounding."""
    old_lines, new_lines = old.strip("\n").splitlines(), new.strip("\n").splitlines()
    if len(old_lines) != len(new_lines):
        return False
    is_speed = False  # a line that names a speed, and the table rows under it
    for old_line, new_line in zip(old_lines, new_lines, strict=True):
        is_speed = bool(SPEED.search(old_line)) or (is_speed and bool(old_line.strip()))
        if not lines_alike(old_line, new_line, is_speed):
            return False
    return True


def lines_alike(old: str, new: str, is_speed: bool) -> bool:
    if HEAT_ROW.match(old) and HEAT_ROW.match(new):
        return len(old) == len(new)
    if MODEL_TEXT.match(old) and MODEL_TEXT.match(new):
        return True
    words = [re.sub(r"[\s─]+", " ", NUMBER.sub("#", line)).strip() for line in (old, new)]
    if words[0] != words[1]:
        return False
    if is_speed:
        return True
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return all(close(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs)


def close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) or abs(a - b) <= 1


if __name__ == "__main__":
    main()
