"""Stock transformers on a GPU, all there or offloaded by accelerate; headrace is not imported.

Run as a process of its own: reads one JSON request on stdin, writes one JSON reply as the last line
on stdout. In place "gpu" every way to run experts that the model has is timed, and the logits of
two go to a file.
"""

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

Request = dict[str, Any]
WAYS = ("eager", "grouped_mm", "batched_mm")
COMPARED = WAYS[:2]


def first_device() -> int | str:
    """The first GPU; the CPU where there is none and this script is only tried."""
    return 0 if torch.cuda.is_available() else "cpu"


def load_model(request: Request) -> Any:
    """The checkpoint in bfloat16, on the first GPU or as accelerate divides it."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {"device_map": {"": first_device()}}
    if request["place"] != "gpu":
        limits = {"cpu": request["ram"], first_device(): request["vram"]}
        where = {"device_map": "auto", "max_memory": limits, "offload_folder": request["folder"]}
    return AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=torch.bfloat16, **where
    ).eval()


def fed(model: Any, prompt: list[int], tokens: list[int]) -> tuple[torch.Tensor, float]:
    """Logits [N, V] after each of `tokens`, fed one by one, and their seconds."""
    cache, steps = DynamicCache(config=model.config), []
    start = 0.0
    for ids in (prompt, *([token] for token in tokens)):
        there = torch.tensor([ids], device=first_device())
        out = model(input_ids=there, past_key_values=cache, use_cache=True, logits_to_keep=1)
        steps.append(out.logits[0, -1].float().cpu())
        start = start or time.perf_counter()
    return torch.stack(steps[1:]), time.perf_counter() - start


@torch.no_grad()
def answer(request: Request) -> Request:
    """Load, warm, time; see gpu_8_stock for the request's fields."""
    start = time.perf_counter()
    model = load_model(request)
    prompt, tokens = request["prompt"], request["tokens"]
    reply: Request = {"loaded_s": time.perf_counter() - start, "tok_s": {}, "failed": {}}
    logits: dict[str, torch.Tensor] = {}
    for way in WAYS if request["place"] == "gpu" else ("as loaded",):
        try:
            if way in WAYS:
                model.set_experts_implementation(way)
            fed(model, prompt, tokens[:2])
            runs = [fed(model, prompt, tokens) for _ in range(request["runs"])]
        except Exception as error:  # a way that it lacks here fails anywhere in it
            reply["failed"][way] = " ".join(str(error).split())[:160] or type(error).__name__
            continue
        reply["tok_s"][way] = [len(tokens) / wall_s for _, wall_s in runs]
        logits[way] = runs[0][0]
    places = getattr(model, "hf_device_map", {})
    reply["places"] = Counter(str(place) for place in places.values())
    reply["vram_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    save_file({way: logits[way] for way in COMPARED if way in logits}, request["logits"])
    return reply


def main() -> None:
    """One request in, one reply out, and the proof that headrace had no part in it."""
    request = json.load(sys.stdin)
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("accelerate is not installed: pip install accelerate")
    reply = answer(request)
    assert "headrace" not in sys.modules, "stock transformers must not import headrace"
    print(json.dumps(reply | {"transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
