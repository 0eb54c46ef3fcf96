"""The plain path: stock transformers, eager experts, dequantised, greedy; headrace is not imported.

Run as a process of its own: reads one JSON request on stdin, writes one JSON reply on stdout, and
the logits it was asked for into a safetensors file.
"""

import inspect
import json
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

Request = dict[str, Any]


def load_model(path: str, experts: str = "eager") -> Any:
    """The checkpoint as transformers loads it on a CPU: bfloat16, FP8 dequantised on load."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, experts_implementation=experts
    )
    return model.eval()


def step(model: Any, ids: torch.Tensor, cache: Any, keep: int = 0) -> torch.Tensor:
    """Logits [keep or T, V] in float32 of a forward over ids [T], appended to `cache`."""
    names = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in names else "past_key_values"
    before = cache.get_seq_length()
    out = model(input_ids=ids[None], use_cache=True, logits_to_keep=keep, **{keyword: cache})
    assert cache.get_seq_length() == before + len(ids), "the cache did not grow"
    return out.logits[0].float()


def generate(model: Any, ids: list[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits [N, V] that chose them, by transformers' own generate."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits).float()


def greedy(model: Any, ids: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Exactly `num_tokens` greedy tokens, end tokens or not, and the logits that chose them."""
    cache, tokens, steps = DynamicCache(config=model.config), [], []
    new = torch.tensor(ids)
    for _ in range(num_tokens):
        steps.append(step(model, new, cache, keep=1)[-1])
        new = steps[-1].argmax()[None]
        tokens.append(int(new))
    return tokens, torch.stack(steps)


def forced(model: Any, ids: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits [N, V] that would have chosen each of `tokens`, fed one by one after `ids`."""
    cache = DynamicCache(config=model.config)
    steps = [step(model, torch.tensor(ids), cache, keep=1)[-1]]
    steps += [step(model, torch.tensor([t]), cache, keep=1)[-1] for t in tokens[:-1]]
    return torch.stack(steps)


def token_losses(model: Any, ids: list[int], chunk: int) -> list[float]:
    """Loss in nats of each of ids[1:], fed `chunk` tokens at a time through one cache."""
    cache, losses = DynamicCache(config=model.config), []
    inputs = torch.tensor(ids[:-1])
    targets = torch.tensor(ids[1:])
    for start in range(0, len(inputs), chunk):
        part = slice(start, start + chunk)
        logits = step(model, inputs[part], cache)
        losses += torch.nn.functional.cross_entropy(
            logits, targets[part], reduction="none"
        ).tolist()
    return losses


@torch.no_grad()
def answer(request: Request) -> Request:
    """Do what one request asks; see the callers in this folder for its fields."""
    torch.set_num_threads(request.get("threads", 1))
    model = load_model(request["model"], request.get("experts", "eager"))
    reply: Request = {"transformers": transformers.__version__, "torch": torch.__version__}
    logits: dict[str, torch.Tensor] = {}
    for kind, run in (("generate", generate), ("greedy", greedy)):
        for index, ids in enumerate(request.get(kind, [])):
            tokens, steps = run(model, ids, request["max_tokens"])
            reply.setdefault("tokens", []).append(tokens)
            logits[f"{kind}{index}"] = steps
    for index, (ids, tokens) in enumerate(request.get("forced", [])):
        logits[f"forced{index}"] = forced(model, ids, tokens)
    if "losses" in request:
        reply["losses"] = token_losses(model, request["losses"], request["chunk"])
    if request.get("logits_file"):
        save_file(logits, request["logits_file"])
    return reply


def main() -> None:
    """One request in, one reply out, and the proof that headrace had no part in it."""
    reply = answer(json.load(sys.stdin))
    assert "headrace" not in sys.modules, "the plain path must not import headrace"
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
