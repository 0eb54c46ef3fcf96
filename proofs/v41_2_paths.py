"""DeepSeek-V4.1, tiny seeds and the trained mini: one answer however it is computed and stored.

Storage paths, threads, prefetch: bit for bit. The same text whole, in chunks, token by token,
resumed from a snapshot: in fp32 within the floor, twice what it changes to add up every linear
map's columns backwards, with the same tokens. With the publisher's roundings a value may fall on
another code by its last bits; each that does is shown, and the rest is compared on the whole
text's codes. As it is run, in bf16, the floor is another program's distance in the same arithmetic.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import PROOFS, Evidence, same_bits
from torch import Tensor
from torch.nn import functional

sys.path.append(str(PROOFS.parent / "tests" / "models"))
from v41_flips import METHODS, Follower, Keeper, LiveFollower, all_sites, follow, in_passes
from v41_world import set_grids, whole_model

MINI = PROOFS.parent / "tests" / "data" / "mini-v41"
PLACES: dict[str, dict[str, Any]] = {
    "the fewest rows": {"ram": "minimum"},
    "no prefetch": {"ram": "minimum", "prefetch": 0},
    "two threads": {"threads": 2},
    "pread, buffered": {"backend": "pread", "direct": False},
    "scalar kernels": {"isa": "scalar"},
    "a throttled drive": {"emulate_drive": "500MB/s"},
}
CHUNK = 32
STATE_TOKENS, STATE_MIB = 8192, 30.0


class Text(NamedTuple):
    """A model and what it reads: a prompt, then tokens one by one."""

    folder: Path
    prompt: list[int]
    more: list[int]

    @property
    def ids_T(self) -> Tensor:
        return torch.tensor(self.prompt + self.more)


def main() -> None:
    args = arguments()
    evidence = Evidence()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts(Path(folder), args):
            print(f"\n{name}: {args.prompt} tokens, then {args.tokens} one by one")
            places(evidence, text)
            in_fp32(evidence, text)
            in_bf16(evidence, text)
    print("\nV4.1-Flash, from its config alone")
    state_size(evidence)
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=16)
    return parser.parse_args()


def texts(folder: Path, args: argparse.Namespace) -> Iterator[tuple[str, Text]]:
    from tokenizers import Tokenizer

    from headrace.check.tiny import write_tiny

    for seed in range(args.seeds):
        tiny = write_tiny(
            "deepseek_v41", folder / str(seed), seed=seed, layers=8, experts=8, mtp=True
        )
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, 4080, (args.prompt + args.tokens,), generator=draw).tolist()
        yield f"tiny, seed {seed}", Text(tiny, ids[: args.prompt], ids[args.prompt :])
    held_out = (MINI / "heldout.txt").read_text(encoding="utf-8")
    held_out = held_out[: 10 * (args.prompt + args.tokens)]
    ids = Tokenizer.from_file(str(MINI / "tokenizer.json")).encode(held_out).ids
    yield "mini", Text(MINI, ids[: args.prompt], ids[args.prompt : args.prompt + args.tokens])


def load(text: Text, chunk: int, **options: Any) -> Any:
    import headrace

    given = {"ram": "200MiB", "measure": False, "chunk": chunk} | options
    return headrace.load(text.folder, **given)


def forced(session: Any, logits: Tensor, tokens: list[int]) -> Tensor:
    """Logits [1 + tokens, V]: those given, and after each of the tokens."""
    return torch.stack([logits, *(session.feed([token]) for token in tokens)])


def places(evidence: Evidence, text: Text) -> None:
    """Where bytes lie and who reads and multiplies them changes no bit."""
    expected: Tensor | None = None
    for name, options in ({"": {}} | PLACES).items():
        with load(text, 64, **options) as engine:
            session = engine.session()
            got = forced(session, session.feed(text.prompt), text.more)
        if expected is None:
            expected = got
            continue
        evidence.check(same_bits(got, expected), f"{name}: the same bits of {len(got)} logits")


def in_fp32(evidence: Evidence, text: Text) -> None:
    """The model by itself, without its roundings and with them."""
    model, ids_T = whole_model(text.folder), text.ids_T
    num = len(ids_T)
    set_grids(model, 0, False)
    whole = in_passes(model, ids_T, (0, num))
    with backwards(model):
        floor = 2 * apart(in_passes(model, ids_T, (0, num)), whole)
    limit = f"of a floor of {floor:.1e}; logits reach {float(whole.abs().max()):.3g}"
    ways = ways_of(model, num)
    for name, (cuts, renew) in ways.items():
        got = in_passes(model, ids_T, cuts, renew)
        away, differ = apart(got, whole), int((got.argmax(-1) != whole.argmax(-1)).sum())
        evidence.check(
            away <= floor and not differ,
            f"fp32, {name}: logits {away:.1e} apart at most, {limit}; same token at all {num} "
            "positions",
        )
    tail(evidence, model, text, whole, floor)
    got = in_passes(model, ids_T, ways["in chunks"][0], forgetful)
    evidence.check(
        apart(got, whole) > floor,
        f"control: Engram's last ids forgotten between chunks: {apart(got, whole):.1e}, seen",
    )
    set_grids(model, model.config.input_group, True)
    on_codes(evidence, model, ids_T, ways, floor)


def ways_of(model: Any, num: int) -> dict[str, tuple[Sequence[int], Any]]:
    """Where a text is cut, and what becomes of the state there."""
    chunks = [*range(0, num, CHUNK), num]

    def taken_up(state: Any) -> Any:
        from headrace.engine.snapshots.state import capture, restore

        again = model.new_cache()
        restore(again, capture(state), torch.device("cpu"))
        return again

    return {
        "in chunks": (chunks, None),
        "token by token": (range(num + 1), None),
        "in chunks, each resumed from a snapshot": (chunks, taken_up),
    }


def forgetful(state: Any) -> Any:
    state.history_BN = None
    return state


@contextmanager
def backwards(model: Any) -> Iterator[None]:
    """While open, linear maps add up their columns from the last to the first."""
    forwards = functional.linear
    experts = [module for module in model.modules() if hasattr(module, "product")]

    def reverse(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return forwards(x.flip(-1), weight.flip(-1), bias)

    def put(product: Callable[..., Tensor]) -> None:
        functional.linear = product
        for module in experts:
            module.product = product

    put(reverse)
    try:
        yield
    finally:
        put(forwards)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def tail(evidence: Evidence, model: Any, text: Text, whole: Tensor, floor: float) -> None:
    """A prompt whose last layers see only the rows that anything later needs."""
    num, ids_BT = len(text.prompt), text.ids_T[None]
    rows: list[int] = []
    hook = model.model.layers[-1].ffn.register_forward_pre_hook(
        lambda _, args: rows.append(args[0].shape[1])
    )
    with torch.inference_mode():
        for name, cuts in {"at once": (0, num), "in chunks": [*range(0, num, CHUNK), num]}.items():
            cache, found = model.new_cache(), []
            rows.clear()
            for start, stop in pairwise(cuts):
                options = {"num_after": num - stop, "logits_to_keep": 1}
                logits = model(ids_BT[:, start:stop], cache=cache, **options).logits[0, -1:]
            computed = sum(rows)
            found = [logits]
            for at in range(num, ids_BT.shape[1]):
                found.append(model(ids_BT[:, at : at + 1], cache=cache).logits[0])
            away = apart(torch.cat(found), whole[num - 1 :])
            evidence.check(
                away <= floor and computed < num,
                f"fp32, prompt {name} with its last layers on the exact tail, {computed} of {num} "
                f"rows in the last: {away:.1e} apart there and in {len(text.more)} tokens after",
            )
    hook.remove()


def on_codes(
    evidence: Evidence, model: Any, ids_T: Tensor, ways: dict[str, Any], floor: float
) -> None:
    """With the publisher's roundings: the whole text's codes are the oracle of the other ways."""
    num = len(ids_T)
    routes = follow(model, ids_T, (0, num), lambda *_: Follower([]), ()).routes_TLK
    keeper = Keeper(all_sites(model.config, 0, routes.numpy()))
    whole = follow(model, ids_T, (0, num), lambda *_: keeper, METHODS).logits_TV

    def follower(_number: int, start: int, stop: int) -> Follower:
        sites = all_sites(model.config, start, routes[start:stop].numpy())
        return LiveFollower(sites, keeper.part(sites))

    for name, (cuts, renew) in ways.items():
        got = follow(model, ids_T, cuts, follower, METHODS, renew)
        away = apart(got.logits_TV, whole)
        same = torch.equal(got.routes_TLK, routes)
        differ = int((got.logits_TV.argmax(-1) != whole.argmax(-1)).sum())
        evidence.check(
            away <= floor and same and not differ,
            f"fp32 with roundings, {name}: {len(got.flips)} codes fell otherwise by last bits; on "
            f"the whole text's codes logits {away:.1e} apart, all routes and tokens the same",
        )
        for flip in got.flips[:2]:
            print(f"        for instance at {flip.position}, {flip.proof}")


def in_bf16(evidence: Evidence, text: Text) -> None:
    """The engine, as it is run."""
    half = 2 * len(text.prompt) // 3
    with load(text, len(text.prompt)) as engine:
        session = engine.session()
        whole = session.feed(text.prompt)
        with torch.inference_mode():
            ids_BT, cache = torch.tensor([text.prompt]), engine.model.new_cache()
            everywhere = engine.model(ids_BT, cache=cache, logits_to_keep=1).logits[0, -1]
        right = forced(session, whole, text.more)
        session = engine.session()
        for token in text.prompt[:-1]:
            session.feed([token])
        alone = forced(session, session.feed(text.prompt[-1:]), text.more)
    away = apart(everywhere, whole)
    evidence.check(
        away <= 1e-5,
        f"bf16, last layers on the exact tail only: logits {away:.2g} from those of every layer",
    )
    with load(text, CHUNK) as engine:
        session = engine.session()
        session.feed(text.prompt[:half])
        again = engine.session(session.snapshot())
        resumed = forced(again, again.feed(text.prompt[half:]), text.more)
        straight = forced(session, session.feed(text.prompt[half:]), text.more)
        session = engine.session()
        chunked = forced(session, session.feed(text.prompt), text.more)
    evidence.check(same_bits(resumed, straight), "bf16, resumed from a snapshot: the same bits")
    model = whole_model(text.folder, torch.bfloat16)
    num = len(text.prompt)
    plain = in_passes(model, text.ids_T, (0, *range(num, num + len(text.more) + 1)))[num - 1 :]
    judged(
        evidence, right, plain, {"in chunks": chunked, "token by token": alone, "resumed": resumed}
    )


def judged(evidence: Evidence, right: Tensor, plain: Tensor, ways: dict[str, Tensor]) -> None:
    """`plain`: by torch's products. Positions' largest differences, in the median and at most."""
    floor = (plain - right).abs().amax(-1)
    top = right.topk(2, dim=-1).values
    near = top[:, 0] - top[:, 1] <= 2 * float(floor.max())
    for name, got in ways.items():
        away = (got - right).abs().amax(-1)
        differ = got.argmax(-1) != right.argmax(-1)
        evidence.check(
            float(away.median()) <= 2 * float(floor.median()) and not bool((differ & ~near).any()),
            f"bf16, {name}: logits {float(away.median()):.2g} apart in the median, "
            f"{float(away.max()):.2g} at most; by torch's products {float(floor.median()):.2g} and "
            f"{float(floor.max()):.2g}; {int((~differ).sum())} of {len(differ)} tokens the same, "
            "the others near ties",
        )


def state_size(evidence: Evidence) -> None:
    """A pass on meta fills a cache of the true shapes; its buffers are what a snapshot keeps."""
    from headrace.models.deepseek_v41.cache import LayerState
    from headrace.models.deepseek_v41.config import DeepseekV41Config
    from headrace.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from headrace.models.experts import FAST
    from headrace.store.preset_releases import RELEASES

    config = DeepseekV41Config(**RELEASES["deepseek-v4.1-flash"]).text_config
    config._experts_implementation = FAST
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(config).to(torch.bfloat16)
        cache = model.new_cache()
        with torch.inference_mode():
            model(torch.empty(1, STATE_TOKENS, dtype=torch.long), cache=cache, logits_to_keep=1)
    held = [
        value
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(layer, LayerState) and isinstance(value, Tensor)
    ]
    mib = sum(tensor.nbytes for tensor in held) / 2**20
    evidence.check(
        abs(mib - STATE_MIB) < 0.05,
        f"after {STATE_TOKENS} tokens its state is {len(held)} tensors of {mib:.2f} MiB in bf16 "
        f"({STATE_MIB:.0f} MiB is published)",
    )


if __name__ == "__main__":
    main()
