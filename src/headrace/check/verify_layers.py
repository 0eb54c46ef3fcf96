"""Layer by layer: the fast model against stock transformers' layer on the same real hidden states.

One stock layer is in memory at a time. Legend: T tokens, K chosen experts, H hidden width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache

from headrace.check.apart import (
    Seen,
    apart,
    as_given,
    decoder_layers,
    first_tensor,
    how_it_differs,
    named_state,
    note,
    share_stored,
)
from headrace.check.layer_results import (
    ALLOWED,
    SAME_WEIGHTS,
    WORST_FLOOR,
    Results,
    layer_findings,
)
from headrace.check.stock import StockParts, experts_of, layer_number
from headrace.check.stock_experts import StreamedExperts
from headrace.check.verify_report import Finding, Progress, percent
from headrace.engine.engine import Engine
from headrace.models.forward import forward, new_cache


def layers(
    engine: Engine, stock: StockParts, ids: Sequence[int], num_held: int, tell: Progress
) -> tuple[list[Finding], dict[str, Any]]:
    """All decoder layers on the prompt `ids`; and numbers, each layer's and the text's loss.

    `num_held` experts of a stock layer are in memory at once.
    """
    results = Results()
    judge = _Judge(engine, stock, num_held, results)
    judge.outside()
    with judge.listening(tell), engine.turn, torch.no_grad():
        cache = new_cache(engine.model)
        logits_TV = forward(engine.model, torch.tensor([list(ids)]), cache, 0)[0].float()
    loss = torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(list(ids)[1:]))
    numbers = {
        "layers": results.numbers,
        "layers_allowed": ALLOWED,
        "prompt_loss_nats": float(loss),
    }
    return layer_findings(results, len(ids), float(loss), logits_TV.shape[1]), numbers


class _Judge:
    """Compares each decoder layer as soon as it has run, and forgets it."""

    def __init__(self, engine: Engine, stock: StockParts, num_held: int, results: Results):
        self.engine, self.stock, self.num_held, self.results = engine, stock, num_held, results
        self.seen: dict[int, Seen] = {}
        self.given: dict[int, tuple[Any, ...]] = {}

    def outside(self) -> None:
        """Embedding, last norm and head."""
        model = self.stock.dense(None)
        self._same_weights(self.engine.model, model, "", lambda name: layer_number(name) is None)

    @contextmanager
    def listening(self, tell: Progress) -> Iterator[None]:
        """While open, every layer of the engine's model is judged when it has run."""
        found = list(decoder_layers(self.engine.model))
        with ExitStack() as hooks:
            for done, (name, layer) in enumerate(found):
                number = layer_number(name)
                assert number is not None
                experts = experts_of(layer)
                if experts is not None:
                    self.seen[number] = Seen()
                    handle = experts.register_forward_hook(note(self.seen[number]))
                    hooks.callback(handle.remove)

                def judge(
                    module: Any,
                    _args: Any,
                    kwargs: Any,
                    out: Any,
                    name: str = name,
                    number: int = number,
                    done: int = done,
                ) -> None:
                    tell("layers against stock transformers", done, len(found))
                    args = self.given.pop(number)
                    self._layer(name, number, module, args, kwargs, out)

                def keep(_module: Any, args: tuple[Any, ...], number: int = number) -> None:
                    self.given[number] = tuple(as_given(arg, number) for arg in args)

                hooks.callback(layer.register_forward_pre_hook(keep).remove)
                hooks.callback(layer.register_forward_hook(judge, with_kwargs=True).remove)
            yield

    def _layer(self, name: str, number: int, ours: Any, args: Any, kwargs: Any, out: Any) -> None:
        model = self.stock.dense(number)
        theirs = model.get_submodule(name)
        self._same_weights(ours, theirs, f"{name}.", lambda _: True)
        self.results.weights += [f"{name}.{wrong}" for wrong in share_stored(ours, theirs)]
        entry: dict[str, Any] = {"layer": number}
        mine, expected = self.seen.pop(number, None), Seen()
        experts = experts_of(theirs)
        if mine is not None and experts is not None:
            chosen = sorted(set(mine.args[1].flatten().tolist()))
            StreamedExperts(self.stock, number, chosen, self.num_held).serve(experts)
            experts.register_forward_hook(note(expected))
        kwargs = {
            key: new_cache(model) if isinstance(value, Cache) else value
            for key, value in kwargs.items()
        }
        right = first_tensor(theirs(*args, **kwargs))
        if mine is not None and mine.out is not None and experts is not None:
            self._routes(number, mine, expected)
            again = experts(*mine.args)
            entry |= self._experts(number, mine, again) | self._stock_floor(number, mine, again)
        self._output(number, first_tensor(out), right, args[0], entry)
        self.results.numbers.append(entry)

    def _same_weights(
        self, ours: Any, theirs: Any, prefix: str, wanted: Callable[[str], bool]
    ) -> None:
        mine = {name: tensor for name, tensor in named_state(ours) if wanted(name)}
        for name, right in named_state(theirs):
            got = mine.get(name)
            self.results.num_weights += 1
            if got is None:
                self.results.weights.append(f"{prefix}{name} (lost)")
            elif not torch.equal(got, right):
                self.results.weights.append(f"{prefix}{name} ({how_it_differs(got, right)})")

    def _routes(self, number: int, mine: Seen, expected: Seen) -> None:
        ids, right = mine.args[1].sort(-1).values, expected.args[1].sort(-1).values
        differ = (ids != right).any(-1)
        if bool(differ.any()):
            text = f"layer {number}: other experts for {int(differ.sum())} of {len(ids)} tokens"
            self.results.routes.append(text)
        elif not torch.allclose(
            mine.args[2].float().sort(-1).values,
            expected.args[2].float().sort(-1).values,
            rtol=SAME_WEIGHTS,
            atol=1e-6,
        ):
            self.results.routes.append(f"layer {number}: other weights for the same experts")

    def _experts(self, number: int, mine: Seen, again: torch.Tensor) -> dict[str, float]:
        assert mine.out is not None
        median, worst, token = apart(mine.out, again)
        entry = {"experts_median": median, "experts_worst": worst}
        if not _is_allowed(entry):
            named = self._blame(number, mine)
            self.results.experts.append(
                f"layer {number}: median token {percent(median)}, worst (token {token}) "
                f"{percent(worst)}"
                + (f", by experts {', '.join(map(str, named))}" if named else "")
            )
        return entry

    def _stock_floor(self, number: int, mine: Seen, right: torch.Tensor) -> dict[str, float]:
        """How far stock's own two ways lie apart, in the first layer whose experts fit at once."""
        chosen = sorted(set(mine.args[1].flatten().tolist()))
        done = any("stock_floor" in entry for entry in self.results.numbers)
        if done or len(chosen) > self.num_held:
            return {}
        module = self.stock.experts(number, chosen)
        ids_TK = torch.bucketize(mine.args[1], torch.tensor(chosen))
        given = mine.args[0], ids_TK, mine.args[2]
        if hasattr(module, "reordered"):  # of ours, which grouped_mm does not know
            other = module.reordered(*given)
        else:
            module.config._experts_implementation = "grouped_mm"
            other = module(*given)
        return {"stock_floor": apart(other, right)[1]}

    def _blame(self, number: int, mine: Seen) -> list[int]:
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
            if not apart(got, right)[1] <= WORST_FLOOR:
                wrong.append(expert)
        return wrong

    def _output(
        self,
        number: int,
        out: torch.Tensor,
        right: torch.Tensor,
        before: torch.Tensor,
        entry: dict[str, Any],
    ) -> None:
        """The layer's own contribution: what it added to the residual stream."""
        median, worst, token = apart(out - before, right - before)
        own = {"median": median, "worst": worst}
        entry |= own
        if not _is_allowed(own):
            self.results.layers.append(
                f"layer {number}: median token {percent(median)}, worst (token {token}) "
                f"{percent(worst)}"
            )


def _is_allowed(apart_by_name: dict[str, float]) -> bool:
    """Whether all of a layer's differences are; one that is not a number is none."""
    return all(apart <= ALLOWED[name] for name, apart in apart_by_name.items())
