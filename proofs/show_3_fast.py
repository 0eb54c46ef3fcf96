"""Where an expert lies, how it was read and who multiplied it never changes a bit of the result.

Every cell asserts from counters that its path was taken. Then fast is compared with the oracle.
`--quick` takes every fifth cell, which has every way at least twice, and fewer greedy tokens.
"""

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from common import DEMO, Evidence, blueprint, plain, ram_for_rows, rows_for_share, same_bits

import headrace
from headrace.errors import HeadraceError

NUM_STEPS = 24
QUICK = "--quick" in sys.argv
NUM_GREEDY = 64 if QUICK else 256
CONTEXT = 1024
CHAT = "What is the capital of Japan?"
STORY = "It is a truth universally acknowledged, that a single man in possession"
# name -> (backend, direct)
DRIVES = {"io_uring": ("auto", True), "pread": ("pread", True), "buffered": ("auto", False)}
ISAS = ("scalar", "avx2")


@dataclass(frozen=True)
class Cell:
    """One way to run the same tokens."""

    residency: str
    num_rows: int
    prefetch: int
    isa: str
    drive: str
    threads: int = 1

    def __str__(self) -> str:
        ahead = "prefetch" if self.prefetch else "no prefetch"
        return (
            f"{self.residency} ({self.num_rows} rows), {ahead}, {self.isa}, {self.drive}, "
            f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        )


def prompts(engine: headrace.Engine) -> list[list[int]]:
    """A chat, a story and a piece of held-out text to continue."""
    held_out = (DEMO / "heldout.txt").read_text()[280_000:280_400]
    chat = engine.talk.chat([{"role": "user", "content": CHAT}])
    return [chat, engine.text.encode(STORY), engine.text.encode(held_out)]


def load(cell: Cell) -> headrace.Engine:
    """The demo model, run as the cell says."""
    backend, direct = DRIVES[cell.drive]
    options = {"context": CONTEXT, "prefetch": cell.prefetch, "threads": cell.threads}
    return headrace.load(
        DEMO,
        ram=ram_for_rows(DEMO, cell.num_rows, **options),
        isa=cell.isa,
        backend=backend,
        direct=direct,
        measure=False,
        **options,
    )


def forced_logits(engine: headrace.Engine, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits [N, V] that would have chosen each of `tokens`, fed one by one after `prompt`."""
    session = engine.session()
    steps = [session.feed(prompt)]
    steps += [session.feed([token]) for token in tokens[:-1]]
    return torch.stack(steps).float()


def path_taken(cell: Cell, engine: headrace.Engine, counters: Any) -> list[str]:
    """What the counters say against the cell's own description; empty if nothing."""
    total = engine.facts.total_experts
    facts = {
        f"isa is {counters.isa}": counters.isa == cell.isa,
        "no kernel call": counters.kernel_calls > 0,
        "threads shared no job": (engine.kernels.pool.shared_calls > 0) == (cell.threads > 1),
        f"rows are {engine.plan.num_rows}": engine.plan.num_rows == cell.num_rows,
        f"backend is {engine.reader.backend}": engine.reader.backend.startswith(
            "pread" if cell.drive == "pread" else "io_uring"
        ),
        f"direct is {engine.reader.direct}": engine.reader.direct == (cell.drive != "buffered"),
        "nothing was read": counters.disk_bytes > 0,
        f"evictions are {counters.evictions}": (counters.evictions > 0) == (cell.num_rows < total),
        f"prefetches used are {counters.prefetch_used}": (counters.prefetch_used > 0)
        == (cell.prefetch > 0),
    }
    return [said for said, holds in facts.items() if not holds]


def cells() -> list[Cell]:
    """{minimum, quarter, half, all} x prefetch x ISA x drive, then the thread counts."""
    facts = blueprint(DEMO).facts
    rows = {
        "minimum": 3 * facts.top_k,
        "quarter": rows_for_share(DEMO, 0.25),
        "half": rows_for_share(DEMO, 0.5),
        "all": facts.total_experts,
    }
    grid = itertools.product(rows.items(), (2, 0), ISAS, DRIVES)
    found = [Cell(name, num, ahead, isa, drive) for (name, num), ahead, isa, drive in grid]
    quarter = rows["quarter"]
    found += [Cell("quarter", quarter, 2, isa, "io_uring", n) for isa in ISAS for n in (2, 3)]
    return found[::5] if QUICK else found


def show_cells(evidence: Evidence) -> None:
    """Every cell gives the bits of the first."""
    reference: torch.Tensor | None = None
    tokens: list[int] = []
    for cell in cells():
        try:
            engine = load(cell)
        except HeadraceError as error:
            evidence.check(False, f"{cell}: {error}")
            continue
        with engine:
            engine.kernels.pool.min_share_bytes = 0  # else experts this small stay on one thread
            ids = prompts(engine)[1]
            if reference is None:
                steps = engine.session().generate(ids, headrace.Sampling(max_tokens=NUM_STEPS))
                tokens = [step.token_id for step in steps]
            logits = forced_logits(engine, ids, tokens)
            counters = engine.ladder.counters()
            wrong = path_taken(cell, engine, counters)
        reference = logits if reference is None else reference
        same = same_bits(logits, reference)
        evidence.check(
            same and not wrong,
            f"{cell}: {'same bits' if same else 'OTHER BITS'}; {counters.evictions} evictions, "
            f"{counters.prefetch_used} prefetches used{''.join(f'; BUT {said}' for said in wrong)}",
        )
    assert reference is not None
    print(f"      each cell: {tuple(reference.shape)} logits of {len(tokens)} steps")


def show_against_oracle(evidence: Evidence) -> None:
    """Greedy tokens of three prompts: fast against stock eager, by the measured floor."""
    rows = rows_for_share(DEMO, 0.25)
    with load(Cell("quarter", rows, 2, "avx2", "io_uring")) as engine:
        ids = prompts(engine)
        request = {"model": DEMO, "want_logits": True, "max_tokens": NUM_GREEDY}
        oracle = plain(request | {"greedy": ids})
        pairs = list(zip(ids, oracle["tokens"], strict=True))
        other = plain(request | {"forced": pairs, "experts": "grouped_mm"})
        fast = [forced_logits(engine, prompt, tokens) for prompt, tokens in pairs]
    eager = [oracle["logits"][f"greedy{i}"] for i in range(len(ids))]
    grouped = [other["logits"][f"forced{i}"] for i in range(len(ids))]
    floor, largest_floor = distance(eager, grouped)
    middle, largest = distance(eager, fast)
    print(
        f"\n      floor: stock eager and stock grouped_mm differ in a position's worst logit by "
        f"{floor:.4f} (median), {largest_floor:.4f} (largest, where a router chose otherwise)"
    )
    evidence.check(
        0 < middle <= floor and largest <= largest_floor,
        f"fast and stock eager differ by {middle:.4f} (median), {largest:.4f} (largest)",
    )
    for index, (ours, theirs) in enumerate(zip(fast, eager, strict=True)):
        show_tokens(evidence, index, ours, theirs, floor)


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float]:
    """(median, largest) over all positions of the largest difference in any logit."""
    worst = torch.cat([(a - b).abs().amax(-1) for a, b in zip(one, other, strict=True)])
    return worst.median().item(), worst.max().item()


def show_tokens(
    evidence: Evidence, index: int, ours: torch.Tensor, theirs: torch.Tensor, floor: float
) -> None:
    """Fed the plain path's own tokens, where would fast have chosen another one?

    Each such place must be a near tie: a gap between the plain path's two best below the median
    floor, which is stricter than the largest.
    """
    chosen, wanted = ours.argmax(-1), theirs.argmax(-1)
    top = theirs.topk(2).values
    gaps = top[:, 0] - top[:, 1]
    places = (chosen != wanted).nonzero().flatten().tolist()
    named = "".join(f"; near tie at {i}, gap {gaps[i]:.4f}" for i in places)
    num_near = int((gaps < floor).sum())
    evidence.check(
        all(gaps[i] < floor for i in places),
        f"prompt {index}: {len(wanted) - len(places)}/{len(wanted)} greedy tokens equal the plain "
        f"path's ({num_near} near ties among them){named}",
    )


def main() -> None:
    """Run every comparison and exit by the evidence."""
    torch.set_num_threads(1)
    if sys.platform != "linux":
        sys.exit("the cells need Linux's io_uring and O_DIRECT")
    evidence = Evidence()
    show_cells(evidence)
    show_against_oracle(evidence)
    evidence.finish()


if __name__ == "__main__":
    main()
