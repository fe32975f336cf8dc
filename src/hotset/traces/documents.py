"""What to record on: text files, and JSON lines of prompts, texts or chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.errors import TraceError


@dataclass(frozen=True)
class Document:
    """One text or one conversation."""

    source: str
    """Where it is from, kept in the trace: the file's name without ending, or the line's own "source"."""
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


def read_documents(paths: Iterable[str | Path]) -> Iterator[Document]:
    """Documents of the files, in order: a .jsonl file gives one per line, any other file is one text.

    A line is an object with "prompt" or "text" (a string) or "messages" (a list of {"role", "content"}), and maybe
    "source"; or just a string. Raises TraceError naming file and line; an empty file is refused too.
    """
    for name in paths:
        path = Path(name)
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as problem:
            raise TraceError(f"{path}: not UTF-8 text (byte {problem.start}): convert it first") from None
        except OSError as problem:
            raise TraceError(f"{path}: {problem.strerror}") from None
        if not content.strip():
            raise TraceError(f"{path}: the file is empty: nothing to record")
        if path.suffix == ".jsonl":
            for number, line in enumerate(content.splitlines(), start=1):
                if line.strip():
                    yield _from_line(line, f"{path}:{number}", path.stem)
        else:
            yield Document(source=path.stem, text=content)


def _from_line(line: str, where: str, default_source: str) -> Document:
    try:
        value = json.loads(line)
    except ValueError:
        raise TraceError(f"{where}: not JSON: wanted one object or string per line") from None
    if isinstance(value, str):
        return Document(default_source, text=value)
    if not isinstance(value, dict):
        raise TraceError(f"{where}: a {type(value).__name__}: wanted an object with prompt, text or messages")
    source = str(value.get("source", default_source))
    found = [key for key in ("prompt", "text", "messages") if key in value]
    if len(found) != 1:
        raise TraceError(f"{where}: has {found or 'none'} of prompt, text, messages: wanted exactly one")
    given = value[found[0]]
    if found[0] != "messages":
        if not isinstance(given, str) or not given:
            raise TraceError(f"{where}: {found[0]} is not a non-empty string")
        return Document(source, text=given)
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in given)
    ):
        raise TraceError(f"{where}: messages is not a list of objects with role and content")
    return Document(source, messages=tuple(given))
