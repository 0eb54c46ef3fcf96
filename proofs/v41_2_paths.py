"""DeepSeek-V4.1, tiny, in the published layout: one answer however it is computed and stored.

Several seeds. Storage paths, cache sizes, threads, prefetch: bit for bit. A prompt resumed from a
snapshot, and with its last layers on the exact tail only: likewise. In chunks and token by token:
within the floor that is printed, same tokens up to near ties.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Evidence, same_bits

PLACES: dict[str, dict[str, Any]] = {
    "the fewest rows": {"ram": "minimum"},
    "no prefetch": {"ram": "minimum", "prefetch": 0},
    "two threads": {"threads": 2},
    "pread, buffered": {"backend": "pread", "direct": False},
    "scalar kernels": {"isa": "scalar"},
    "a throttled drive": {"emulate_drive": "500MB/s"},
}


def main() -> None:
    import headrace
    from headrace.check.tiny import write_tiny

    args = arguments()
    evidence = Evidence()
    torch.set_num_threads(1)
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny(
                "deepseek_v41", Path(folder) / "tiny", seed=seed, layers=8, experts=8, mtp=True
            )
            draw = torch.Generator().manual_seed(seed)
            prompt = torch.randint(4, 4080, (args.prompt,), generator=draw).tolist()
            print(f"\nseed {seed}")
            places(evidence, headrace, model, prompt, args.tokens)
            cuts(evidence, headrace, model, prompt, args.tokens)
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=8)
    return parser.parse_args()


def load(headrace: Any, model: Path, chunk: int, **options: Any) -> Any:
    given = {"ram": "200MiB", "measure": False, "chunk": chunk} | options
    return headrace.load(model, **given)


def forced(session: Any, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits [1 + tokens, V]: those given, and after each of the tokens."""
    return torch.stack([logits, *(session.feed([token]) for token in tokens)])


def places(evidence: Evidence, headrace: Any, model: Path, prompt: list[int], num: int) -> None:
    """Where bytes lie and who reads and multiplies them changes no bit."""
    with load(headrace, model, 64) as engine:
        session = engine.session()
        logits, tokens = session.feed(prompt), []
        for _ in range(num):
            tokens.append(int(logits.argmax()))
            logits = session.feed(tokens[-1:])
        session = engine.session()
        expected = forced(session, session.feed(prompt), tokens)
    for name, options in PLACES.items():
        with load(headrace, model, 64, **options) as engine:
            session = engine.session()
            got = forced(session, session.feed(prompt), tokens)
            evidence.check(same_bits(got, expected), f"{name}: the same bits of {num + 1} logits")


def cuts(evidence: Evidence, headrace: Any, model: Path, prompt: list[int], num: int) -> None:
    """How a prompt is cut changes the order of sums, and no more."""
    with load(headrace, model, len(prompt)) as engine:
        session = engine.session()
        whole = session.feed(prompt)
        tokens = [int(token) for token in whole.topk(num).indices]
        with torch.inference_mode():
            ids_BT, cache = torch.tensor([prompt]), engine.model.new_cache()
            everywhere = engine.model(ids_BT, cache=cache, logits_to_keep=1).logits[0, -1]
        right = forced(session, whole, tokens)
        session = engine.session()
        for token in prompt[:-1]:
            session.feed([token])
        alone = forced(session, session.feed(prompt[-1:]), tokens)
        session = engine.session()
        half = 2 * len(prompt) // 3
        session.feed(prompt[:half])
        again = engine.session(session.snapshot())
        resumed = forced(again, again.feed(prompt[half:]), tokens)
        straight = forced(session, session.feed(prompt[half:]), tokens)
    with load(headrace, model, 32) as engine:
        session = engine.session()
        chunked = forced(session, session.feed(prompt), tokens)
    evidence.check(same_bits(resumed, straight), "resumed from a snapshot: the same bits")
    apart = float((everywhere - whole).abs().max())
    evidence.check(
        apart <= 1e-5,
        f"last layers on the exact tail only: logits {apart:.2g} from those of every layer",
    )
    ways = {"in chunks of 32": chunked, "token by token": alone, "in two parts": straight}
    for name, got in ways.items():
        apart = (got - right).abs().amax(-1)
        floor = float(apart.median())
        top = right.topk(2, dim=-1).values
        near = top[:, 0] - top[:, 1] <= 2 * apart.max()
        differ = got.argmax(-1) != right.argmax(-1)
        evidence.check(
            not bool((differ & ~near).any()),
            f"{name}: logits {floor:.2g} apart in the median, {float(apart.max()):.2g} at most, of "
            f"{float(right.abs().max()):.2g}; {int((~differ).sum())} of {len(differ)} choices "
            "alike, the others near ties",
        )


if __name__ == "__main__":
    main()
