"""One process of bench_disk_tier.py: load by hotset or by Accelerate, decode, report. Job and answer are JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.models.qwen3_moe.modeling_qwen3_moe  # before the base is taken: it is the process, not the model

import hotset
import hotset.policies.demand
import hotset.runtime.runtime
from hotset.runtime.memory import peak_bytes, resident_bytes


class Clock:
    """A streamer that times decoding: put 0 is the prompt, put 1 ends the prefill."""

    def __init__(self) -> None:
        self.seconds, self.puts, self.since = 0.0, 0, 0.0
        self.read, self.read_before = 0, 0

    def put(self, _tokens: torch.Tensor) -> None:
        now = time.perf_counter()
        if self.puts >= 2:
            self.seconds += now - self.since
            self.read += disk_bytes_read() - self.read_before
        self.puts += 1
        self.read_before = disk_bytes_read()
        self.since = time.perf_counter()

    def end(self) -> None:
        pass


def disk_bytes_read() -> int:
    """Bytes that this process had fetched from the device so far, read-ahead for its mappings included."""
    return int(next(x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("read_bytes")).split()[1])


def load(job: dict[str, Any], base: int) -> Any:
    """The model, by hotset or Accelerate, told to stay within job["budget"] bytes. base: bytes of the libraries."""
    if job["how"] == "hotset":
        budget, policy = job["budget"], job["policy"]
        return hotset.load(job["folder"], device="cpu", host_memory_bytes=budget, host_cache_policy=policy)
    room = job["budget"] - base - hotset.runtime.runtime.RESERVE_BYTES - job["outer_bytes"]
    kept = max(0, room // job["layer_bytes"])  # the rest is read from disk when its turn comes
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{n}": "cpu" if n < kept else "disk" for n in range(job["layers"])}
    return transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"],
        dtype="auto",
        experts_implementation="eager",
        device_map=places,
        offload_folder=job["offload"],
    )


def limit_private_memory(budget: int, base: int) -> None:
    """Without a cgroup: the kernel refuses this process more memory of its own than the budget and thread stacks."""
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + budget - base + 64 * 2**20,) * 2)


def main(job: dict[str, Any]) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    base = resident_bytes()
    if job["limit_private"]:
        limit_private_memory(job["budget"], base)
    model = load(job, base)
    loaded_peak = peak_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    texts, seconds, count, read = [], 0.0, 0, 0
    for prompt in job["prompts"]:
        ids, clock = torch.tensor([prompt]), Clock()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job["tokens"],
            min_new_tokens=job["tokens"],
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        texts.append(out[0].tolist())
        seconds += clock.seconds
        count += clock.puts - 2
        read += clock.read
    report = model.hotset_report() if job["how"] == "hotset" else None
    places = [] if report else [str(place) for place in model.hf_device_map.values()]
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0, -1].tolist() for prompt in job["prompts"][: job["logits"]]]
    answer = {
        "texts": texts,
        "logits": logits,
        "rate": count / seconds,
        "read_per_token": read / count,
        "peak": max(loaded_peak, peak_bytes()),
        "decode_peak": peak_bytes(),
        "report": report,
        "device_map": {place: places.count(place) for place in set(places)},
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
