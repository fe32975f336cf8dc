"""Text out of a model, streamed: what `hotset run` and the demo do with a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotset.errors import ModelError


@dataclass(frozen=True)
class Generated:
    """One answer."""

    prompt: str
    text: str
    """The new text only."""
    prompt_tokens: int
    new_tokens: int


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer. Raises ModelError where it has none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"{folder}: no tokenizer that loads: {str(problem).strip().splitlines()[0]}") from None


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Continue `prompt`, greedily, or sampled where a temperature is given (seeded).

    model: any Transformers model, loaded by hotset or not. chat: wrap the prompt in the model's chat template.
    on_text: called with each piece of new text as it is known. Raises ModelError (no chat template, empty prompt).
    """
    inputs = _encode(tokenizer, prompt, chat).to(model.device)
    arguments: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        torch.manual_seed(seed)
        arguments = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    if on_text is not None:
        arguments["streamer"] = _streamer(tokenizer, on_text)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        **arguments,
    )
    new = output[0, inputs.shape[1] :]
    return Generated(prompt, tokenizer.decode(new, skip_special_tokens=True), inputs.shape[1], len(new))


def _encode(tokenizer: Any, prompt: str, chat: bool) -> torch.Tensor:
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the model's tokenizer has no chat template: run without --chat")
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    inputs: torch.Tensor = encoded["input_ids"]
    if inputs.shape[1] == 0:
        raise ModelError("the prompt holds no token: give some text")
    return inputs


def _streamer(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            on_text(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
