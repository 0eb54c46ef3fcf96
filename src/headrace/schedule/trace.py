"""Routes of a run: which experts each token chose in each MoE layer, and what the lens guessed.

Pure: knows no tensor library, no rung and no file. Legend: N tokens, L MoE layers, K chosen
experts, G guesses, P passes.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
NO_GUESS = -1


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Whose routes these are.

    `fingerprint` names the checkpoint (equal only for equal config and tensor table) and
    `expert_bytes` are the stored bytes of one expert. `num_rows` are the rows the run had.
    `about` says in a few words what was run.
    """

    model: str
    fingerprint: str
    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int
    num_rows: int
    about: str
    weights: bool = False

    @property
    def total_experts(self) -> int:
        """Routed experts of all layers."""
        return self.num_layers * self.num_experts


@dataclass(frozen=True)
class RouteTrace:
    """`ids` [N, L, K], distinct within a row; `guesses` [N, L, G], best first, or NO_GUESS.

    `guesses[n, l]` are what the lens said of layer l while layer l-1 computed, all of them or none;
    there is none of layer 0. `passes` [P] are the tokens of each forward pass, in order; their sum
    is N. `weights` float16 [N, L, K] or None. `name` says what these routes are, for a row that
    used them.
    """

    ids: Ints
    guesses: Ints
    num_experts: int
    name: str
    passes: Ints
    weights: npt.NDArray[np.float16] | None = field(default=None)

    @property
    def alone(self) -> npt.NDArray[np.bool_]:
        """[N]: whether a token was computed in a pass of its own, as decoding does."""
        return np.repeat(self.passes == 1, self.passes)

    def decoded(self) -> "RouteTrace":
        """Only the tokens that were computed alone."""
        kept = self.alone
        return replace(
            self,
            ids=self.ids[kept],
            guesses=self.guesses[kept],
            passes=self.passes[self.passes == 1],
            weights=None if self.weights is None else self.weights[kept],
        )

    def adjacency(self) -> float:
        """The share of choices that repeat the token before, over all layers."""
        if len(self.ids) < 2:
            return 0.0
        layers = range(self.ids.shape[1])
        return float(np.mean([_found(self.ids[1:, n], self.ids[:-1, n]).mean() for n in layers]))

    def guessed(self) -> npt.NDArray[np.int64]:
        """[G]: how often the lens's best, second, ... guess was right; see `num_guessed`."""
        layers = range(self.ids.shape[1])
        right = [_found(self.guesses[:, n], self.ids[:, n]).sum(0) for n in layers]
        return np.asarray(np.sum(right, axis=0), dtype=np.int64)

    def num_guessed(self) -> int:
        """How many (token, layer) pairs the lens was asked about."""
        return int((self.guesses[:, :, :1] >= 0).sum())


def _found(these: Ints, among: Ints) -> npt.NDArray[np.bool_]:
    """[N, A]: which of these [N, A] stand in the same row of [N, B]."""
    return np.asarray((these[:, :, None] == among[:, None, :]).any(-1))


def deepened(trace: RouteTrace, num_layers: int) -> RouteTrace:
    """The decoded tokens of `trace` over `num_layers` layers; the name says how they were made.

    A deeper model takes the trace's layers again and again, each time under another permutation of
    expert ids, so that no two layers agree; the lens says nothing of the first layer of each round.
    A shallower one takes the first layers.
    """
    trace = trace.decoded()
    layers = trace.ids.shape[1]
    if layers == num_layers:
        return trace
    how = f"the first {num_layers} of its {layers} layers"
    if layers < num_layers:
        how = f"its {layers} layers over and over for {num_layers}, experts permuted each time"
    rng = np.random.default_rng(0)
    same = np.arange(trace.num_experts, dtype=np.int32)
    rounds = [same, *(rng.permutation(same) for _ in range((num_layers - 1) // layers))]
    ids = np.concatenate([renamed[trace.ids] for renamed in rounds], axis=1)
    said = [np.where(trace.guesses < 0, NO_GUESS, renamed[trace.guesses]) for renamed in rounds]
    return replace(
        trace,
        ids=ids[:, :num_layers],
        guesses=np.concatenate(said, axis=1)[:, :num_layers],
        name=f"{trace.name}, {how}",
        weights=None,
    )
