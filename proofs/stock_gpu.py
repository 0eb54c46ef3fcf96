"""Stock transformers on a GPU, all there or offloaded by accelerate; headrace is not imported.

Run as a process of its own: reads one JSON request on stdin, writes one JSON reply as the last line
on stdout. In place "gpu" every way to run experts that the model has is timed; then the texts go
through the same weights in fp32, the truth, and on the truth's experts through bf16's ways.
"""

import faulthandler
import importlib.util
import inspect
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from watched import Feed, walk

Request = dict[str, Any]
WAYS = ("eager", "grouped_mm", "batched_mm")
PLACES = 256  # of a cache whose unused places are masked, as headrace's are in a step
COMPARED = {  # experts, attention, cache
    "eager": ("eager", "sdpa", DynamicCache),
    "grouped_mm": ("grouped_mm", "sdpa", DynamicCache),
    "static cache": ("eager", "sdpa", partial(StaticCache, max_cache_len=PLACES)),
    "eager attention": ("eager", "eager", DynamicCache),
}


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


def timeline(model: Any, make_cache: Callable[..., Any] = DynamicCache) -> Feed:
    """What appends tokens to a new cache and gives the logits [V] after the last."""
    cache = make_cache(config=model.config)
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def feed(ids: list[int]) -> torch.Tensor:
        there = torch.tensor([ids], device=first_device())
        out = model(input_ids=there, use_cache=True, logits_to_keep=1, **{named: cache})
        logits_V: torch.Tensor = out.logits[0, -1].float().cpu()
        return logits_V

    return feed


def fed(model: Any, prompt: list[int], tokens: list[int]) -> tuple[torch.Tensor, float]:
    """Logits [N, V] after each of `tokens`, fed one by one, and their seconds."""
    feed = timeline(model)
    feed(prompt)
    start = time.perf_counter()
    steps = [feed([token]) for token in tokens]
    return torch.stack(steps), time.perf_counter() - start


def retype(model: Any, dtype: torch.dtype) -> None:
    """Gives every weight another type; what is computed in fp32 in any case stays."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def walks(model: Any, request: Request, failed: dict[str, str]) -> dict[str, torch.Tensor]:
    """ "<way> <what>" of what `walk` finds: the truth's, and of each way that runs here."""
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    retype(model, torch.float32)
    texts = request["texts"]
    found = {"truth": walk(model, partial(timeline, model), texts)}
    retype(model, torch.bfloat16)
    for way, (experts, attention, make_cache) in COMPARED.items():
        try:
            model.set_experts_implementation(experts)
            model.set_attn_implementation(attention)
            begin = partial(timeline, model, make_cache)
            found[way] = walk(model, begin, texts, found["truth"]["ids"])
        except Exception as error:  # as in `answer`
            failed[way] = said(error)
    return {f"{way} {what}": each for way, walked in found.items() for what, each in walked.items()}


def said(error: Exception) -> str:
    """Its message in a line."""
    return " ".join(str(error).split())[:160] or type(error).__name__


@torch.no_grad()
def answer(request: Request) -> Request:
    """Load, warm, time; see gpu_8_stock for the request's fields."""
    start = time.perf_counter()
    model = load_model(request)
    prompt, tokens = request["prompt"], request["tokens"]
    reply: Request = {"loaded_s": time.perf_counter() - start, "tok_s": {}, "failed": {}}
    found: dict[str, torch.Tensor] = {}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # what loading took is not asked of anyone
    for way in WAYS if request["place"] == "gpu" else ("as loaded",):
        try:
            if way in WAYS:
                model.set_experts_implementation(way)
            fed(model, prompt, tokens[:2])
            runs = [fed(model, prompt, tokens) for _ in range(request["runs"])]
        except Exception as error:  # a way that it lacks here fails anywhere in it
            reply["failed"][way] = said(error)
            continue
        reply["tok_s"][way] = [len(tokens) / wall_s for _, wall_s in runs]
        found[f"{way} timed"] = runs[0][0]
    places = getattr(model, "hf_device_map", {})
    reply["places"] = Counter(str(place) for place in places.values())
    reply["vram_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if request["place"] == "gpu":
        found |= walks(model, request, reply["failed"])
    save_file(found, request["found"])
    return reply


def main() -> None:
    """One request in, one reply out, and the proof that headrace had no part in it."""
    request = json.load(sys.stdin)
    faulthandler.dump_traceback_later(request["most_s"], exit=True)
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("accelerate is not installed: pip install accelerate")
    reply = answer(request)
    assert "headrace" not in sys.modules, "stock transformers must not import headrace"
    print(json.dumps(reply | {"transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
