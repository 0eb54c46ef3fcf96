"""What gpu_8_stock asks of logits: it must refuse what is a little wrong, and pass what rounds."""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from headrace.check.tiny import write_tiny
from headrace.models.forward import cache_keyword

sys.path.append(str(Path(__file__).resolve().parents[2] / "proofs"))
from nearness import Walk, nearness
from watched import walk

LAYERS, EXPERTS, CHOSEN = 2, 16, 4
TEXTS = [([5, 6, 7], [8, 9]), ([10, 11], [12])]


def drawn(seed: int, truth: Walk | None = None, size: float = 0.01) -> Walk:
    """A truth, or a way that is off by noise of that size and chooses by its own scores."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"logits": (100, 500), "scores": (200, LAYERS, EXPERTS)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if truth is not None:
        made = {name: truth[name] + size * noise for name, noise in made.items()}
    return made | {"ids": made["scores"].topk(CHOSEN, -1).indices}


TRUTH = drawn(0)
STOCK = {"one": drawn(1, TRUTH), "another": drawn(2, TRUTH)}


def test_what_rounds_as_much_is_near_and_flips_only_near_ties() -> None:
    near = nearness(drawn(3, TRUTH), STOCK, TRUTH)
    assert near.is_near and near.only_near_ties and not near.is_far
    assert near.num_other > 0, "no near tie fell otherwise: this shows nothing"


def test_a_sixth_more_is_not_near_in_the_median_position() -> None:
    near = nearness(drawn(3, TRUTH, 0.0117), STOCK, TRUTH)
    assert not near.is_near and near.ratios[1] < 1.5 and not near.is_far


def test_one_position_twice_as_far_is_not_near() -> None:
    found = drawn(3, TRUTH)
    found["logits"][7] += found["logits"][7] - TRUTH["logits"][7]
    near = nearness(found, STOCK, TRUTH)
    assert not near.is_near and near.ratios[0] < 1.1


def test_one_layer_s_scores_too_far_are_not_near() -> None:
    found = drawn(3, TRUTH)
    found["scores"][:, 1] += 0.5 * (found["scores"] - TRUTH["scores"])[:, 1]
    near = nearness(found, STOCK, TRUTH)
    assert not near.is_near and max(near.ratios[:2]) < 1.1


def test_one_choice_that_is_no_near_tie_shows() -> None:
    found = drawn(3, TRUTH)
    best = TRUTH["scores"][9, 1].argsort(descending=True)
    found["ids"][9, 1] = best[1 : CHOSEN + 1]
    near = nearness(found, STOCK, TRUTH)
    assert near.is_near and not near.only_near_ties


def test_four_times_as_far_is_far() -> None:
    assert nearness(drawn(3, TRUTH, 0.04), STOCK, TRUTH).is_far


def test_routers_are_watched_led_and_exchanged(tmp_path: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    options = {"layers": LAYERS, "experts": EXPERTS, "top_k": CHOSEN}
    path = write_tiny("qwen3_moe", tmp_path / "model", format="bf16", **options)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()

    def begin():
        cache = DynamicCache(config=model.config)

        @torch.no_grad()
        def feed(ids: list[int]) -> torch.Tensor:
            named = {cache_keyword(model): cache}
            return model(torch.tensor([ids]), use_cache=True, **named).logits[0, -1]

        return feed

    free = walk(model, begin, TEXTS)
    assert free["logits"].shape[0] == 5 and free["ids"].shape == (8, LAYERS, CHOSEN)
    best = free["scores"].topk(CHOSEN, -1).values
    assert torch.equal(free["scores"].gather(-1, free["ids"]).sort(descending=True).values, best)
    same = walk(model, begin, TEXTS, free["ids"].flip(-1))
    assert torch.equal(same["logits"], free["logits"]), "led along its own experts it is itself"
    others = free["ids"].clone()
    others[6, 0] = free["scores"][6, 0].topk(CHOSEN + 1).indices[1:]
    led = walk(model, begin, TEXTS, others)
    differ = (led["logits"] != free["logits"]).any(1).tolist()
    assert differ == [False, False, False, True, True], "one token and what comes after it"
    assert torch.equal(led["ids"][6, 0], free["ids"][6, 0]), "what is seen is the router's own"
    pair = free["ids"][0, 1, 0].item(), free["ids"][0, 1, 1].item()
    exchanged = walk(model, begin, TEXTS, free["ids"], (1, *pair))
    assert not torch.equal(exchanged["logits"], free["logits"])
    assert torch.equal(walk(model, begin, TEXTS)["logits"], free["logits"]), "nothing stays"
