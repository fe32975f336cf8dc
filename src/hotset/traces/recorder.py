"""Records which experts a Transformers model routes each token to, by wrapping its experts interface.

Works on every model whose experts use that interface, whatever implementation runs behind it. Padding is never
counted. Knows nothing of files (see writer) and of where experts live. Needs torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hotset.core import DECODE, PREFILL, Trace
from hotset.errors import ModelError, TraceError
from hotset.models.checkpoint import Checkpoint, resolve_model_folder
from hotset.models.experts import find_expert_layers, interface_implementation, model_class_of
from hotset.traces.documents import Document
from hotset.traces.writer import DEFAULT_SHARD_BYTES, TraceWriter, prepare_folder

IMPLEMENTATION = "hotset-record"


@dataclass(frozen=True)
class Generation:
    """How `record` decodes after each prompt: greedy, or sampled where a temperature is given."""

    max_new_tokens: int
    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of Transformers' generate."""
        if self.temperature is None:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }


@dataclass(frozen=True)
class Progress:
    """How far a recording is."""

    documents: int
    """Documents begun."""
    sequences: int
    tokens: int
    seconds: float


def record(
    model: Any,
    documents: Iterable[Document | str],
    output: str | Path,
    *,
    tokenizer: Any = None,
    generate: Generation | None = None,
    batch_size: int = 4,
    max_tokens: int = 1024,
    keep_weights: bool = True,
    keep_tokens: bool = False,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Trace:
    """Run the documents through the model and write the routing of every token to the folder `output`.

    model: a folder or hub name, or a loaded Transformers model (then give its tokenizer too). documents: texts, or
    what `read_documents` makes of files. Without `generate` each
    document is teacher-forced, in windows of max_tokens, each a sequence of its own; with it, the document (its last
    max_tokens tokens) is the prompt of a decode, and both phases are recorded. Ctrl-C keeps what is complete.

    Returns the trace, memory-mapped. Raises ModelError, UnsupportedModelError, TraceError.
    """
    if batch_size < 1 or max_tokens < 1:
        raise TraceError(f"batch_size {batch_size} and max_tokens {max_tokens} must be at least 1")
    prepare_folder(Path(output), overwrite=overwrite)  # before minutes go into loading a model
    fingerprint, name = None, type(model).__name__
    if isinstance(model, str | Path):
        folder = resolve_model_folder(model)
        checkpoint = Checkpoint.open(folder)
        fingerprint, name = checkpoint.fingerprint, folder.name
        model, tokenizer = load_plain(folder, device=device, dtype=dtype)
    elif tokenizer is None:
        raise ModelError("a loaded model needs its tokenizer: record(model, documents, output, tokenizer=...)")
    with RoutingRecorder(model) as recorder:
        session = _Session(model, tokenizer, recorder, generate, keep_weights, keep_tokens)
        writer = TraceWriter(
            output,
            num_experts=recorder.num_experts,
            layer_ids=recorder.layer_ids,
            expert_bytes=recorder.expert_bytes,
            model_fingerprint=fingerprint,
            metadata=_metadata(model, name, recorder, generate),
            shard_bytes=shard_bytes,
        )
        started = time.perf_counter()
        with writer:
            texts = (Document("text", text=d) if isinstance(d, str) else d for d in documents)
            for batch in _batched(session.windows(texts, max_tokens), batch_size):
                session.run(batch, writer)
                if progress is not None:
                    seconds = time.perf_counter() - started
                    progress(Progress(batch[-1].document + 1, writer.num_sequences, writer.num_tokens, seconds))
    if writer.num_sequences == 0:
        raise TraceError("nothing recorded: the documents hold no token")
    return Trace.open(output)


def load_plain(folder: Path, *, device: str = "auto", dtype: str | torch.dtype = "auto") -> tuple[Any, Any]:
    """(model, tokenizer) by Transformers' own loading, experts and all on one device."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        # by the class that the checkpoint names: a multimodal model has no causal language model class
        model: Any = model_class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"{folder}: Transformers cannot load it: {str(problem).strip().splitlines()[0]}") from None
    find_expert_layers(model)  # refuse a dense model before anything runs
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return model.to(target).eval(), tokenizer


class RoutingRecorder:
    """While entered, keeps the routing of the model's last forward pass; `take` hands it over.

    layer_ids: [L] the model's own layer numbers; expert_bytes: [L, E] as the model holds them.
    """

    def __init__(self, model: Any) -> None:
        # a model that hotset loaded has its experts elsewhere, and says which layers they are of
        layers = model.hotset.layers if hasattr(model, "hotset") else find_expert_layers(model)
        if not model._can_set_experts_implementation():
            raise ModelError(f"{type(model).__name__} does not let its experts implementation be set")
        self.model = model
        self.num_experts = layers[0].num_experts
        self.layer_ids = np.array([layer.layer_id for layer in layers], np.int32)
        sizes = np.array([layer.bytes_per_expert for layer in layers], np.int64)
        self.expert_bytes: NDArray[np.int64] = np.repeat(sizes[:, None], self.num_experts, axis=1)
        self._rows = {id(layer.module): row for row, layer in enumerate(layers)}
        self._modules = [layer.module for layer in layers]
        self._previous: list[str] = []
        self._routed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> RoutingRecorder:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        configs: list[Any] = [module.config for module in self._modules]
        self._previous = [config._experts_implementation or "eager" for config in configs]
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _recording_forward)
        for module in self._modules:
            module.hotset_recorder = self
        self.model.set_experts_implementation(IMPLEMENTATION)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.model.set_experts_implementation(self._previous[0])
        for module in self._modules:
            del module.hotset_recorder

    def routed(self, module: nn.Module, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Keep one layer's routing: ids [n, K], weights [n, K]."""
        self._routed[self._rows[id(module)]] = (ids.detach(), weights.detach())

    def implementation_of(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """What runs the experts while this recorder listens."""
        return interface_implementation(self._previous[self._rows[id(module)]], module)

    def take(self, num_tokens: int) -> tuple[NDArray[np.int16], NDArray[np.float16]]:
        """(ids [L, n, K], weights [L, n, K]) of the last forward pass; -1 where a layer did not route a token.

        Raises ModelError where a layer routed none or another number of tokens than went in.
        """
        routed, self._routed = self._routed, {}
        for row, layer_id in enumerate(self.layer_ids):
            if row not in routed:
                raise ModelError(f"layer {layer_id} did not call the experts interface: it cannot be recorded")
            if len(routed[row][0]) != num_tokens:
                raise ModelError(f"layer {layer_id} routed {len(routed[row][0])} tokens of {num_tokens} that went in")
        ids = np.stack([routed[row][0].to("cpu", torch.int16).numpy() for row in range(len(self.layer_ids))])
        ids[ids >= self.num_experts] = -1
        weights = np.stack([routed[row][1].to("cpu", torch.float16).numpy() for row in range(len(self.layer_ids))])
        return ids, weights


def _recording_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **rest: Any
) -> torch.Tensor:
    recorder: RoutingRecorder | None = module.__dict__.get("hotset_recorder")
    if recorder is None:  # of a tower that is not recorded, such as the experts for images beside those for text
        return interface_implementation("eager", module)(module, hidden_states, top_k_index, top_k_weights, **rest)
    recorder.routed(module, top_k_index, top_k_weights)
    return recorder.implementation_of(module)(module, hidden_states, top_k_index, top_k_weights, **rest)


@dataclass(frozen=True)
class _Window:
    document: int
    source: str
    tokens: list[int]


class _Session:
    """One recording: tokenises, runs batches, hands sequences to the writer."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        recorder: RoutingRecorder,
        generation: Generation | None,
        keep_weights: bool,
        keep_tokens: bool,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.recorder = recorder
        self.generation = generation
        self.keep_weights = keep_weights
        self.keep_tokens = keep_tokens
        pad = tokenizer.pad_token_id
        self.pad = int(pad if pad is not None else (tokenizer.eos_token_id or 0))
        if generation is not None:
            torch.manual_seed(generation.seed)

    def windows(self, documents: Iterable[Document], max_tokens: int) -> Iterator[_Window]:
        for index, document in enumerate(documents):
            tokens = self._tokens(document)
            if self.generation is not None:
                yield _Window(index, document.source, tokens[-max_tokens:])
            else:
                for start in range(0, len(tokens), max_tokens):
                    yield _Window(index, document.source, tokens[start : start + max_tokens])

    def _tokens(self, document: Document) -> list[int]:
        if document.messages is None:
            tokens: list[int] = self.tokenizer(document.text)["input_ids"]
            return tokens
        if not getattr(self.tokenizer, "chat_template", None):
            raise TraceError(f"{document.source}: chat messages given, but the model's tokenizer has no chat template")
        encoded = self.tokenizer.apply_chat_template(
            list(document.messages), add_generation_prompt=self.generation is not None, return_dict=True
        )
        return list(encoded["input_ids"])

    def run(self, windows: Sequence[_Window], writer: TraceWriter) -> None:
        windows = [window for window in windows if window.tokens]
        if not windows:
            return
        if self.generation is None:
            self._prefill(windows, writer)
        else:
            self._decode(windows, writer)

    @torch.inference_mode()
    def _prefill(self, windows: Sequence[_Window], writer: TraceWriter) -> None:
        ids, mask = self._padded(windows, left=False)
        # the inner model: no logits of every position are made only to be thrown away
        self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        routed, weights = self.recorder.take(ids.numel())
        width = ids.shape[1]
        for index, window in enumerate(windows):
            span = slice(index * width, index * width + len(window.tokens))
            self._add(writer, window.source, routed[:, span], weights[:, span], window.tokens, 0)

    @torch.inference_mode()
    def _decode(self, windows: Sequence[_Window], writer: TraceWriter) -> None:
        assert self.generation is not None
        ids, mask = self._padded(windows, left=True)
        steps = _Steps(self.model, self.recorder)
        try:
            with steps:
                self.model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    pad_token_id=self.pad,
                    stopping_criteria=[steps.see],
                    **self.generation.arguments(),
                )
        finally:  # Ctrl-C in the middle of a batch keeps the tokens decoded so far
            self._add_decoded(windows, ids.shape[1], steps, writer)

    def _add_decoded(self, windows: Sequence[_Window], width: int, steps: _Steps, writer: TraceWriter) -> None:
        if not steps.routed:
            return
        (prompt_ids, prompt_weights), *decoded = steps.routed
        fed = np.zeros((len(windows), 0), np.int64)
        if decoded:
            fed = steps.sequences[:, width : width + len(decoded)].cpu().numpy()
        eos = np.isin(fed, steps.eos)
        for index, window in enumerate(windows):
            start = (index + 1) * width - len(window.tokens)
            # steps after this sequence's end are padding that only the batch's other sequences needed
            alive = int(np.argmax(eos[index])) if eos[index].any() else len(decoded)
            routed = [
                prompt_ids[:, start : (index + 1) * width],
                *(r[:, index : index + 1] for r, _ in decoded[:alive]),
            ]
            mass = [
                prompt_weights[:, start : (index + 1) * width],
                *(w[:, index : index + 1] for _, w in decoded[:alive]),
            ]
            tokens = [*window.tokens, *fed[index, :alive].tolist()]
            self._add(
                writer, window.source, np.concatenate(routed, axis=1), np.concatenate(mass, axis=1), tokens, alive
            )

    def _add(
        self,
        writer: TraceWriter,
        source: str,
        routed: NDArray[np.int16],
        weights: NDArray[np.float16],
        tokens: list[int],
        decoded: int,
    ) -> None:
        phase = np.full(len(tokens), PREFILL, np.uint8)
        phase[len(tokens) - decoded :] = DECODE
        writer.add_sequence(
            routed,
            phase=phase,
            source=source,
            weights=weights if self.keep_weights else None,
            token_ids=np.array(tokens, np.int32) if self.keep_tokens else None,
        )

    def _padded(self, windows: Sequence[_Window], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(window.tokens) for window in windows)
        ids = torch.full((len(windows), width), self.pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, window in enumerate(windows):
            n = len(window.tokens)
            span = slice(width - n, width) if left else slice(0, n)
            ids[index, span] = torch.tensor(window.tokens)
            mask[index, span] = 1
        device = self.model.device
        return ids.to(device), mask.to(device)


class _Steps:
    """Collects the routing of each forward pass of one `generate`, and the sequences as they grow."""

    def __init__(self, model: Any, recorder: RoutingRecorder) -> None:
        self.model = model
        self.recorder = recorder
        self.routed: list[tuple[NDArray[np.int16], NDArray[np.float16]]] = []
        self.sequences = torch.zeros((0, 0), dtype=torch.long)
        eos = model.generation_config.eos_token_id
        self.eos = [eos] if isinstance(eos, int) else list(eos or [])
        self._hook: Any = None

    def __enter__(self) -> _Steps:
        self._hook = self.model.register_forward_hook(self._after_forward, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def see(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        """A stopping criterion that stops nothing and remembers the sequences."""
        self.sequences = input_ids
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def _after_forward(self, _module: nn.Module, _args: Any, kwargs: Mapping[str, Any], _output: Any) -> None:
        self.routed.append(self.recorder.take(kwargs["input_ids"].numel()))


def _metadata(model: Any, name: str, recorder: RoutingRecorder, generate: Generation | None) -> dict[str, Any]:
    parameters = {p.data_ptr(): p for p in model.parameters()}
    total = sum(p.numel() * p.element_size() for p in parameters.values())
    metadata: dict[str, Any] = {
        "model": name,
        "model_type": model.config.model_type,
        "mode": "prefill" if generate is None else f"generate {generate.max_new_tokens}",
    }
    if recorder.expert_bytes is not None:
        metadata["non_expert_bytes"] = int(total - recorder.expert_bytes.sum())
    kv = _kv_cache_bytes_per_token(model, recorder)
    if kv is not None:
        metadata["kv_bytes_per_token"] = kv
    return metadata


@torch.inference_mode()
def _kv_cache_bytes_per_token(model: Any, recorder: RoutingRecorder, tokens: int = 4) -> int | None:
    """Measured on a few tokens, so that it holds for any attention; None where the model keeps no plain cache."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device=model.device)
    output = model.base_model(input_ids=ids, use_cache=True)
    recorder.take(tokens)
    layers = getattr(getattr(output, "past_key_values", None), "layers", None)
    if not layers or not all(isinstance(getattr(layer, "keys", None), torch.Tensor) for layer in layers):
        return None
    return sum(int(t.numel() * t.element_size()) for layer in layers for t in (layer.keys, layer.values)) // tokens


def _batched(windows: Iterator[_Window], size: int) -> Iterator[list[_Window]]:
    while batch := list(islice(windows, size)):
        yield batch
