"""Tokenizer and token streams of the demo model."""

from __future__ import annotations

from pathlib import Path

import corpus
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 4_000_000  # of each domain, what the tokenizer is trained on

# Letters with one leading space; runs of up to three digits; punctuation; newlines; indentation.
_PATTERN = r"[^\S\r\n]?\p{L}+|\p{N}{1,3}|[^\S\r\n]?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def sample(documents: list[corpus.Document], limit: int) -> list[str]:
    """Every n-th document, so that their bytes come to about ``limit``."""
    total = sum(len(text.encode()) for _, text in documents)
    return [text for _, text in documents[:: max(1, round(total / limit))]]


def train_tokenizer(folder: Path, path: Path, size: int) -> Tokenizer:
    """Train a byte-level BPE of ``size`` entries on the training split and store it.

    The first 257 entries are the end-of-text mark and the 256 bytes, so every text can be encoded
    and decoding gives the same bytes back.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for domain in corpus.DOMAINS for text in sample(corpus.load(folder, "train", domain), SAMPLE_BYTES)]
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[corpus.Document]) -> np.ndarray:
    """All documents as one stream, each preceded by the end-of-text token; uint16 [T]."""
    mark = tokenizer.token_to_id(END_OF_TEXT)
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 256):
        texts = [text for _, text in documents[start : start + 256]]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        parts += [np.array([mark, *encoding.ids], dtype=np.uint16) for encoding in encodings]
    return np.concatenate(parts)


class Stream:
    """Training windows of one domain in a fixed order that depends on the seed alone."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int) -> None:
        self.tokens = tokens
        self.length = length
        self.seed = seed
        self.windows = (len(tokens) - 1 - length) // length
        if self.windows < 1:
            raise ValueError(f"a stream of {len(tokens)} tokens is shorter than one window")
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._shift = 0

    def window(self, index: int) -> np.ndarray:
        """Window number ``index`` (any epoch), int64 [S + 1]."""
        epoch, place = divmod(index, self.windows)
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._order = random.permutation(self.windows)
            self._shift = int(random.integers(self.length))
            self._epoch = epoch
        start = int(self._order[place]) * self.length + self._shift
        return self.tokens[start : start + self.length + 1].astype(np.int64)
