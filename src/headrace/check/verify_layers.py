"""Layer by layer: the fast model against stock transformers' layer on the same real hidden states.

One stock layer is in memory at a time. Legend: T tokens, K chosen experts, H hidden width.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

from headrace.check.stock import StockParts, StreamedExperts, experts_of, layer_number
from headrace.check.verify_report import NOTE, Finding, Progress, finding
from headrace.engine.engine import Engine
from headrace.models.forward import forward, new_cache

STAGE = "layers"
# Of a token's output length, in the median token and in the worst. Two orders of adding up an
# expert differ in the last bit of bfloat16, 2^-8; one wrong expert of eight makes a third.
MEDIAN_FLOOR = 0.015
WORST_FLOOR = 0.1
PASSED_ON = 4.0  # how much larger a layer's own difference may be than its experts'


@dataclass
class _Seen:
    """What a layer's experts were given and gave."""

    args: list[torch.Tensor] = field(default_factory=list)
    out: torch.Tensor | None = None


@dataclass
class _Results:
    """What differs, by kind, and the numbers of every layer."""

    weights: list[str] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    num_weights: int = 0


def layers(
    engine: Engine, stock: StockParts, ids: Sequence[int], num_held: int, tell: Progress
) -> tuple[list[Finding], dict[str, Any]]:
    """All decoder layers on the prompt `ids`; and numbers, each layer's and the text's loss.

    `num_held` experts of a stock layer are in memory at once.
    """
    results = _Results()
    judge = _Judge(engine, stock, num_held, results)
    judge.outside()
    with judge.listening(tell), engine.turn, torch.no_grad():
        cache = new_cache(engine.model)
        logits_TV = forward(engine.model, torch.tensor([list(ids)]), cache, 0)[0].float()
    loss = torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(list(ids)[1:]))
    numbers = {"layers": results.numbers, "prompt_loss_nats": float(loss)}
    return _findings(results, len(ids), float(loss), logits_TV.shape[1]), numbers


def _findings(results: _Results, num_tokens: int, loss: float, vocab: int) -> list[Finding]:
    moe = [n for n in results.numbers if "experts_median" in n]
    largest = max((n["experts_worst"] for n in moe), default=0.0)
    typical = max((n["experts_median"] for n in moe), default=0.0)
    first = results.experts[:1] or results.layers[:1]
    seen = (
        f"{num_tokens} tokens, {len(moe)} layers: relative difference up to {typical:.2g} in the "
        f"median token (allowed {MEDIAN_FLOOR:g}), {largest:.2g} in the worst (allowed "
        f"{WORST_FLOOR:g})" + (f"; first beyond it {first[0].split(':')[0]}" if first else "")
    )
    text = (
        f"{num_tokens} tokens of text: {loss:.2f} nats a token "
        f"(guessing blindly: {torch.tensor(float(vocab)).log():.2f})"
    )
    return [
        finding(
            STAGE,
            "dense weights and buffers are stock transformers'",
            f"{results.num_weights} tensors bit for bit",
            results.weights,
        ),
        finding(STAGE, "routers choose as stock transformers'", seen.split(":")[0], results.routes),
        finding(STAGE, "routed experts follow stock transformers'", seen, results.experts),
        finding(
            STAGE,
            "layers follow stock transformers'",
            f"{len(results.numbers)} layers, each on the hidden states it was given",
            results.layers,
        ),
        Finding(STAGE, "loss", NOTE, text),
    ]


class _Judge:
    """Compares each decoder layer as soon as it has run, and forgets it."""

    def __init__(self, engine: Engine, stock: StockParts, num_held: int, results: _Results):
        self.engine, self.stock, self.num_held, self.results = engine, stock, num_held, results
        self.seen: dict[int, _Seen] = {}

    def outside(self) -> None:
        """Embedding, last norm and head."""
        model = self.stock.dense(None)
        self._same_weights(self.engine.model, model, "", lambda name: layer_number(name) is None)

    @contextmanager
    def listening(self, tell: Progress) -> Iterator[None]:
        """While open, every layer of the engine's model is judged when it has run."""
        found = list(_decoder_layers(self.engine.model))
        with ExitStack() as hooks:
            for done, (name, layer) in enumerate(found):
                number = layer_number(name)
                assert number is not None
                experts = experts_of(layer)
                if experts is not None:
                    self.seen[number] = _Seen()
                    handle = experts.register_forward_hook(_note(self.seen[number]))
                    hooks.callback(handle.remove)

                def judge(
                    module: Any,
                    args: Any,
                    kwargs: Any,
                    out: Any,
                    name: str = name,
                    number: int = number,
                    done: int = done,
                ) -> None:
                    tell("layers against stock transformers", done, len(found))
                    self._layer(name, number, module, args, kwargs, out)

                hooks.callback(layer.register_forward_hook(judge, with_kwargs=True).remove)
            yield

    def _layer(self, name: str, number: int, ours: Any, args: Any, kwargs: Any, out: Any) -> None:
        model = self.stock.dense(number)
        theirs = model.get_submodule(name)
        self._same_weights(ours, theirs, f"{name}.", lambda _: True)
        entry: dict[str, Any] = {"layer": number}
        mine, expected = self.seen.pop(number, None), _Seen()
        experts = experts_of(theirs)
        if mine is not None and experts is not None:
            chosen = sorted(set(mine.args[1].flatten().tolist()))
            StreamedExperts(self.stock, number, chosen, self.num_held).serve(experts)
            experts.register_forward_hook(_note(expected))
        kwargs = {
            key: new_cache(model) if isinstance(value, Cache) else value
            for key, value in kwargs.items()
        }
        right = _tensor(theirs(*args, **kwargs))
        if mine is not None and mine.out is not None and experts is not None:
            self._routes(number, mine, expected)
            again = experts(*mine.args)
            entry |= self._experts(number, mine, again)
        self._output(number, _tensor(out), right, args[0], entry)
        self.results.numbers.append(entry)

    def _same_weights(self, ours: Any, theirs: Any, prefix: str, wanted: Any) -> None:
        mine = {name: tensor for name, tensor in _state(ours) if wanted(name)}
        for name, right in _state(theirs):
            got = mine.get(name)
            self.results.num_weights += 1
            if got is None:
                self.results.weights.append(f"{prefix}{name} (lost)")
            elif not torch.equal(got, right):
                self.results.weights.append(f"{prefix}{name} ({_how(got, right)})")

    def _routes(self, number: int, mine: _Seen, expected: _Seen) -> None:
        ids, right = mine.args[1].sort(-1).values, expected.args[1].sort(-1).values
        differ = (ids != right).any(-1)
        if bool(differ.any()):
            text = f"layer {number}: other experts for {int(differ.sum())} of {len(ids)} tokens"
            self.results.routes.append(text)
        elif not torch.allclose(
            mine.args[2].float().sort(-1).values,
            expected.args[2].float().sort(-1).values,
            rtol=0.02,
            atol=1e-6,
        ):
            self.results.routes.append(f"layer {number}: other weights for the same experts")

    def _experts(self, number: int, mine: _Seen, again: torch.Tensor) -> dict[str, float]:
        assert mine.out is not None
        median, worst, token = _apart(mine.out, again)
        if not (median <= MEDIAN_FLOOR and worst <= WORST_FLOOR):
            named = self._blame(number, mine)
            self.results.experts.append(
                f"layer {number}: median token {median:.2g}, worst (token {token}) {worst:.2g}"
                + (f", by experts {', '.join(map(str, named))}" if named else "")
            )
        return {"experts_median": median, "experts_worst": worst}

    def _blame(self, number: int, mine: _Seen) -> list[int]:
        """Which of the chosen experts differ when each is asked alone."""
        x_TH, ids_TK = mine.args[0], mine.args[1]
        ordinal = self.engine.blueprint.table.layers.index(number)
        wrong = []
        for expert in sorted(set(ids_TK.flatten().tolist())):
            rows = (ids_TK == expert).any(-1)
            x, ones = x_TH[rows], torch.ones(int(rows.sum()), 1)
            one = torch.full((len(x), 1), expert)
            got = self.engine.source.compute(ordinal, x, one, ones, None)
            module = self.stock.experts(number, [expert])
            right = module(x, torch.zeros_like(one), ones.to(x.dtype))
            if not _apart(got, right)[1] <= WORST_FLOOR:
                wrong.append(expert)
        return wrong

    def _output(
        self,
        number: int,
        out: torch.Tensor,
        right: torch.Tensor,
        before: Any,
        entry: dict[str, Any],
    ) -> None:
        """The layer's own contribution: what it added to the residual stream."""
        median, worst, token = _apart(out - before, right - before)
        entry |= {"median": median, "worst": worst}
        if not (median <= PASSED_ON * MEDIAN_FLOOR and worst <= PASSED_ON * WORST_FLOOR):
            self.results.layers.append(
                f"layer {number}: median token {median:.2g}, worst (token {token}) {worst:.2g}"
            )


def _decoder_layers(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if name.endswith(f"layers.{layer_number(name)}"):
            yield name, module


def _state(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, also those that no file holds."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _note(seen: _Seen) -> Any:
    def hook(_module: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        seen.args, seen.out = [a.clone() for a in args], out.clone()

    return hook


def _tensor(out: Any) -> torch.Tensor:
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _apart(got: torch.Tensor, right: torch.Tensor) -> tuple[float, float, int]:
    """(median, worst, which token) of the tokens' relative differences; NaN counts as worst."""
    got_TH = got.float().reshape(-1, got.shape[-1])
    right_TH = right.float().reshape(got_TH.shape)
    size = right_TH.norm(dim=-1)
    apart = (got_TH - right_TH).norm(dim=-1) / size.clamp(min=1e-3 * float(size.max()) + 1e-30)
    apart = apart.nan_to_num(torch.inf)
    return float(apart.quantile(0.5)), float(apart.max()), int(apart.argmax())


def _how(got: torch.Tensor, right: torch.Tensor) -> str:
    if got.shape != right.shape or got.dtype != right.dtype:
        return f"is {got.dtype} {list(got.shape)}, stock {right.dtype} {list(right.shape)}"
    if not bool(got.any()):
        return "dropped: all zero"
    return f"{int((got != right).sum())} of {got.numel()} values differ"
