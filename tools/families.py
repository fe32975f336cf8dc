"""Measures the table that `hotset models` prints: loads a tiny random model of every family and compares its logits.

Rewrites src/hotset/models/families.json for the installed Transformers; takes a minute or two on two cores.
`--check` compares with the file instead.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a row is stale")
    options = parser.parse_args()
    import torch
    import transformers
    from tests.tiny_families import measure

    from hotset.cli.common import quiet_transformers
    from hotset.models.families import find_families, read_table, write_table

    quiet_transformers()
    torch.set_num_threads(1)
    rows = []
    for family in find_families():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(family, Path(folder)))
        print(f"{family.model_type}: {rows[-1].status} {rows[-1].reason}".rstrip(), flush=True)
    if not options.check:
        write_table(transformers.__version__, rows)
    elif read_table() != (transformers.__version__, rows):
        sys.exit("src/hotset/models/families.json is stale: run tools/families.py")


if __name__ == "__main__":
    main()
