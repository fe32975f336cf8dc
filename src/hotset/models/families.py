"""The Mixture-of-Experts families of the installed Transformers, and the table of which of them hotset runs.

A family is a model type with a class that gives logits for tokens and whose module uses the experts interface; it is
found by reading the model files, without importing them. The table itself (`families.json` beside this file) is
measured by `tools/families.py`, which loads a tiny random model of each. Knows nothing of weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hotset.errors import ModelError
from hotset.storage import write_json

TABLE_FILE = Path(__file__).with_name("families.json")
TABLE_VERSION = 1
_DECORATOR = "@use_experts_implementation"
_OWN_EXPERTS = re.compile(r"^class \w*(?:Experts|MoE)\w*\(nn\.Module(?:Dict|List)?\)", re.MULTILINE)


@dataclass(frozen=True)
class Family:
    """One model type of Transformers that has experts."""

    model_type: str
    class_name: str
    """The class that `hotset.load` makes, e.g. "MixtralForCausalLM"."""
    module: str
    """Folder under transformers/models that the class is in."""
    on_interface: bool
    """Whether its experts use the experts interface; hotset refuses a family whose do not."""


@dataclass(frozen=True)
class FamilyStatus:
    """One row of the table: what a run of the family's tiny random model showed."""

    model_type: str
    class_name: str
    status: str
    """"bit-identical" or "within 1e-5" of Transformers' eager logits, "differs", or "refused" with a typed error."""
    reason: str
    """Why it is refused or not bit-identical; "" otherwise."""
    experts_class: str
    """The class that holds the experts, e.g. "MixtralExperts"; "" where refused."""
    experts: tuple[str, ...]
    """How its experts differ from the usual gate, up and down matrices [out, in]: "no-gate", "own-gate" (a class with
    an `_apply_gate` of its own: clamps and the like), "interleaved" (gate and up rows alternate), "transposed",
    "bias", "post-norm". Empty where refused or usual."""
    stored: str
    """How its checkpoint holds them: "one by one", "fused", or "by layer" (converted a layer at a time)."""
    note: str
    """What else to know, such as experts of another tower that stay with Transformers."""


def find_families() -> list[Family]:
    """Every family of the installed Transformers with experts, by model type.

    Where a model type has several classes, the one for text and images is taken, which is what its checkpoints name;
    the model type of its text part alone, where there is one, is a family of its own.
    """
    from transformers.models.auto import modeling_auto as auto

    on_interface, off_interface = _modules()
    found: dict[str, Family] = {}
    for mapping in (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ):
        for model_type, names in mapping.items():
            class_name = names if isinstance(names, str) else names[0]
            for modules, yes in ((on_interface, True), (off_interface, False)):
                module = next((m for m, source in modules.items() if f"\nclass {class_name}(" in source), None)
                if module is not None:
                    found.setdefault(model_type, Family(model_type, class_name, module, yes))
    return sorted(found.values(), key=lambda family: (not family.on_interface, family.model_type))


def decorated_classes() -> dict[str, list[str]]:
    """Module -> names of its classes that carry the interface's decorator."""
    pattern = re.compile(rf"^{_DECORATOR}.*\nclass (\w+)\(", re.MULTILINE)
    return {module: pattern.findall(source) for module, source in _modules()[0].items()}


def _modules() -> tuple[dict[str, str], dict[str, str]]:
    """(module -> source of those on the interface, of those with experts of their own)."""
    on, off = {}, {}
    for module, source in _sources():
        if re.search(rf"^{_DECORATOR}", source, re.MULTILINE):
            on[module] = source
        elif _OWN_EXPERTS.search(source):
            off[module] = source
    return on, off


def _sources() -> Iterator[tuple[str, str]]:
    import transformers

    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        yield path.parent.name, path.read_text(encoding="utf-8")


def read_table() -> tuple[str, list[FamilyStatus]]:
    """(Transformers version that it was measured with, a row per family), from the data file in the package."""
    content: dict[str, Any] = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    if content["version"] != TABLE_VERSION:
        raise ModelError(f"{TABLE_FILE}: version {content['version']}, wanted {TABLE_VERSION}: run tools/families.py")
    rows = [FamilyStatus(**{**row, "experts": tuple(row["experts"])}) for row in content["families"]]
    return content["transformers"], rows


def write_table(transformers_version: str, rows: list[FamilyStatus]) -> None:
    """Replace the data file in the package."""
    families = [asdict(row) for row in rows]
    write_json(TABLE_FILE, {"version": TABLE_VERSION, "transformers": transformers_version, "families": families})


def installed_transformers() -> str | None:
    """The installed Transformers' version, without importing it; None where it is absent."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
