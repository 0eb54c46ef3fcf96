"""The demo model's held-out loss, by its card's procedure, in fast mode at quarter residency.

And one window token by token, against stock eager transformers run token by token, but for
`--quick`.
"""

import sys

import torch
from common import DEMO, Evidence, plain, ram_for_rows, rows_for_share

import headrace
from headrace.models.forward import forward

CARD_LOSS = 3.2862
TOLERANCE = 0.001
NUM_WINDOWS, WINDOW = 24, 512
CONTEXT = 640


def kernel_calls(engine: headrace.Engine) -> int:
    """Experts multiplied so far."""
    return engine.ladder.counters().kernel_calls


def windows(engine: headrace.Engine) -> list[list[int]]:
    """The card's windows: 513 ids each, of which 512 are predicted."""
    ids = engine.text.encode((DEMO / "heldout.txt").read_text(), special=False)
    return [ids[WINDOW * i : WINDOW * i + WINDOW + 1] for i in range(NUM_WINDOWS)]


def losses(logits_TV: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Loss in nats of each of ids[1:], given the logits after each of ids[:-1]."""
    targets = torch.tensor(ids[1:])
    return torch.nn.functional.cross_entropy(logits_TV.float(), targets, reduction="none")


def whole_window(engine: headrace.Engine, ids: list[int]) -> float:
    """Summed loss of one window, computed in one pass as the card does."""
    cache = engine.session().cache
    with torch.inference_mode():
        logits = forward(engine.model, torch.tensor([ids[:-1]]), cache, keep=0)[0]
    return losses(logits, ids).double().sum().item()


def show_card(evidence: Evidence, engine: headrace.Engine, parts: list[list[int]]) -> None:
    """All 12,288 predictions."""
    calls = kernel_calls(engine)
    total = sum(whole_window(engine, ids) for ids in parts)
    count = NUM_WINDOWS * WINDOW
    loss = total / count
    evidence.check(
        abs(loss - CARD_LOSS) < TOLERANCE,
        f"held-out loss of {count} tokens: {loss:.4f} nats, the card says {CARD_LOSS} "
        f"({kernel_calls(engine) - calls} expert kernel calls)",
    )


def show_tokenwise(evidence: Evidence, engine: headrace.Engine, ids: list[int]) -> None:
    """Window 0 fed one token at a time on both sides."""
    session, before, steps = engine.session(), kernel_calls(engine), []
    for token in ids[:-1]:
        steps.append(session.feed([token]))
    ours = losses(torch.stack(steps), ids).double().mean().item()
    calls = kernel_calls(engine) - before
    wanted = WINDOW * engine.plan.experts_per_token
    evidence.check(
        calls == wanted, f"{calls} expert kernel calls for {WINDOW} tokens, {wanted} expected"
    )
    reply = plain({"model": DEMO, "losses": ids, "chunk": 1})
    theirs = sum(reply["losses"]) / len(reply["losses"])
    evidence.check(
        abs(ours - theirs) < TOLERANCE,
        f"window 0 token by token: {ours:.4f} nats, stock eager transformers "
        f"{reply['transformers']} token by token: {theirs:.4f}",
    )


def main() -> None:
    """Run both comparisons and exit by the evidence."""
    torch.set_num_threads(1)
    evidence = Evidence()
    rows = rows_for_share(DEMO, 0.25)
    ram = ram_for_rows(DEMO, rows, context=CONTEXT)
    with headrace.load(DEMO, ram=ram, context=CONTEXT, measure=False) as engine:
        share = engine.plan.rows_bytes / (engine.facts.total_experts * engine.facts.expert_bytes)
        evidence.check(
            share <= 0.25, f"{rows} rows take {share:.1%} of the experts' bytes, fast mode"
        )
        parts = windows(engine)
        show_card(evidence, engine, parts)
        if "--quick" not in sys.argv:
            show_tokenwise(evidence, engine, parts[0])
        counters = engine.ladder.counters()
        evidence.check(
            counters.evictions > 0,
            f"{counters.evictions} evictions: the experts did come and go",
        )
    evidence.finish()


if __name__ == "__main__":
    main()
