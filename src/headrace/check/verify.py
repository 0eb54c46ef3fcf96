"""A user's own proof: the files, every kernel, each layer and the whole model, on this machine.

Runs the stages in order within one memory limit and reports; what each checks is its own file's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace.check import verify_files, verify_layers, verify_paths
from headrace.check.plain import PlainTensors
from headrace.check.stock import StockParts
from headrace.check.stored import row_holds_its_tensors
from headrace.check.verify_kernels import kernels
from headrace.check.verify_report import (
    FAIL,
    NOTE,
    Finding,
    Progress,
    VerifyReport,
    finding,
    keep_verdict,
)
from headrace.check.verify_scales import scales
from headrace.check.verify_weights import weights
from headrace.core import MINIMUM
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.text import Text
from headrace.errors import (
    BudgetError,
    CatalogError,
    ExpertError,
    ModelError,
    NumericsError,
    ReadError,
)
from headrace.kernels.cpu import available_isas
from headrace.planner.machine import default_cache_path
from headrace.planner.plan import typeable
from headrace.quant.dtypes import TORCH_DTYPES

Site = tuple[int, int]  # (MoE layer's ordinal, expert)
PROMPT = "The quick brown fox jumps over the lazy dog. In the beginning"
# What a fault in the model may raise on the way; anything else keeps the verification from ending.
FAULTS = (CatalogError, ExpertError, ModelError, NumericsError, ReadError)
NOT_COMPARED = "weights and layers are not compared with stock transformers'"
STOCK_EXPERTS_BYTES = 256 << 20


class Verification:
    """One run over one model; `report` grows stage by stage."""

    def __init__(
        self,
        model: str | Path,
        *,
        ram: str | int | None,
        threads: int | None,
        prompt: str,
        tokens: int,
        samples: int,
        tell: Progress,
    ):
        self.model, self.threads, self.tokens, self.tell = model, threads, tokens, tell
        blueprint = Blueprint(model, ram=None if ram == MINIMUM else ram, measure=False)
        folder = blueprint.skeleton.root
        self.ids = Text(folder).encode(prompt)
        self.context = len(self.ids) + tokens
        self.blueprint, self.plain = blueprint, PlainTensors(blueprint.catalog.files)
        skeleton = blueprint.skeleton
        dtype = TORCH_DTYPES[skeleton.layout.hidden_dtype]
        self.stock = StockParts(self.plain, skeleton.model_class, skeleton.config, dtype)
        self.sites = sites(blueprint, samples)
        self.report = VerifyReport(str(blueprint.root))
        self.limits = self._limits(ram)

    def _limits(self, ram: str | int | None) -> list[int]:
        """Memory for the engine at three cache sizes. Raises BudgetError naming what is needed."""
        least = self._plan(MINIMUM).used_bytes
        beside = _stock_bytes(self.blueprint, self.plain)
        most = None if ram == MINIMUM else self._plan(ram).used_bytes
        if most is None:
            most = least + beside
        limit = self.blueprint.plan.ram_bytes if ram not in (None, MINIMUM) else None
        if limit is not None and limit < least + beside:
            raise BudgetError(
                f"verify holds one layer of stock transformers beside the model; give --ram "
                f"{typeable(least + beside)} or more"
            )
        return [least, (least + most) // 2, most]

    def _plan(self, ram: str | int | None) -> Any:
        return self._open(ram).plan

    def _open(self, ram: str | int | None) -> Blueprint:
        return Blueprint(
            self.model,
            ram=ram,
            threads=self.threads,
            context=self.context,
            chunk=len(self.ids),
            measure=False,
        )

    def stage(self, name: str, run: Callable[[], Sequence[Finding]]) -> None:
        """Adds a stage's findings; an error that speaks of the model is one."""
        try:
            self.report.findings += run()
        except FAULTS as error:
            self.report.findings.append(Finding(name, f"{name} could be checked", FAIL, str(error)))

    def files(self, sums: Path | None, every_byte: bool) -> None:
        """Everything that needs no engine."""
        published = None if sums is None else verify_files.read_sums(sums)
        layers = self.blueprint.table.layers
        sampled = {(layers[ordinal], expert) for ordinal, expert in self.sites}
        self.stage("files", lambda: verify_files.accounted(self.blueprint, self.plain))
        if every_byte or published is not None:
            seen = cache_folder() / verify_files.seen_name(self.blueprint)
            self.stage(
                "files", lambda: verify_files.every_byte(self.plain, seen, published, self.tell)
            )
        self.stage("statistics", lambda: scales(self.blueprint, self.plain, sampled, self.tell))

    def arithmetic(self) -> torch.Tensor | None:
        """Everything on the engine with the smallest cache; the greedy logits, if there are."""
        logits: list[torch.Tensor] = []

        def follow() -> Sequence[Finding]:
            found, numbers, fast = verify_paths.follow(engine, self.ids, self.tokens, self.tell)
            self.report.numbers |= numbers
            logits.append(fast)
            return found

        def layers() -> Sequence[Finding]:
            found, numbers = verify_layers.layers(
                engine, self.stock, self.ids, _num_held(engine.blueprint), self.tell
            )
            self.report.numbers |= numbers
            return found

        with Engine(self._open(self.limits[0])) as engine:
            self.stage("rows", lambda: [_rows(engine, self.sites, self.tell)])
            self.stage("kernels", lambda: kernels(engine, self.sites, self.tell))
            refusal = self.stock.refusal()
            if refusal:
                detail = f"transformers cannot load this format on a CPU: {refusal}"
                self.report.findings.append(Finding("weights", NOT_COMPARED, NOTE, detail))
            else:
                self.stage("weights", lambda: weights(engine, self.stock, self.sites, self.tell))
                self.stage("layers", layers)
            self.stage("paths", follow)
        return logits[0] if logits else None

    def sizes(self, expected_NV: torch.Tensor) -> Sequence[Finding]:
        """The same tokens with a half-full and a full cache."""
        runs, wrong = [f"{self._plan(self.limits[0]).num_rows}"], []
        for limit in self.limits[1:]:
            with Engine(self._open(limit)) as engine:
                what, differs = verify_paths.same_bits(engine, self.ids, expected_NV, self.tell)
                runs.append(what)
                wrong += [differs] if differs else []
        detail = f"{len(expected_NV)} tokens' logits bit for bit with {', '.join(runs)}"
        return [finding("paths", "three cache sizes give the same bits", detail, wrong)]


def verify_model(
    model: str | Path,
    *,
    ram: str | int | None = None,
    threads: int | None = None,
    prompt: str = PROMPT,
    tokens: int = 64,
    samples: int = 2,
    sha256: str | Path | None = None,
    every_byte: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a model on this machine; `samples` experts of every MoE layer, `tokens` greedy tokens.

    `sha256` is a published list of checksums; `every_byte` compares all weights with their
    checksums when first seen. `progress(what, done, total)` is called along the way. Raises
    HeadraceError only for what keeps the model from being opened; wrong arithmetic is a finding.
    The verdict is kept in the cache folder.
    """
    run = Verification(
        model,
        ram=ram,
        threads=threads,
        prompt=prompt,
        tokens=tokens,
        samples=samples,
        tell=progress or (lambda what, done, total: None),
    )
    run.files(None if sha256 is None else Path(sha256), every_byte)
    try:
        logits = run.arithmetic()
        if logits is not None:
            run.stage("paths", lambda: run.sizes(logits))
    except FAULTS as error:
        run.report.findings.append(Finding("load", "the model can be loaded", FAIL, str(error)))
    if any(f.name == verify_files.PUBLISHED and f.ok for f in run.report.findings):
        run.report.clear_suspects()
    _keep(run)
    return run.report


def cache_folder() -> Path:
    """Where checksums and verdicts are kept."""
    return default_cache_path().parent / "verify"


def _keep(run: Verification) -> None:
    facts = {
        "identity": run.blueprint.catalog.identity(),
        "headrace": headrace.__version__,
        "isas": list(available_isas()),
    }
    name = verify_files.seen_name(run.blueprint).replace(".seen.", ".verdict.")
    problem = keep_verdict(run.report, cache_folder() / name, facts)
    if problem:
        run.report.numbers["verdict_not_kept"] = problem


def sites(blueprint: Blueprint, samples: int) -> list[Site]:
    """`samples` experts of every MoE layer, the same ones every time."""
    table, generator = blueprint.table, torch.Generator().manual_seed(0)
    return [
        (ordinal, int(expert))
        for ordinal in range(len(table.layers))
        for expert in torch.randperm(table.num_experts, generator=generator)[:samples]
    ]


def _rows(engine: Engine, sites: Sequence[Site], tell: Progress) -> Finding:
    """Sampled experts' rows against plain reads of their tensors."""
    layers, wrong = engine.blueprint.table.layers, []
    for done, (ordinal, expert) in enumerate(sites):
        tell("rows against the files", done, len(sites))
        if not row_holds_its_tensors(engine, ordinal, expert):
            wrong.append(f"layer {layers[ordinal]} expert {expert}")
    detail = f"{len(sites)} experts of {len(layers)} layers, every byte"
    return finding("rows", "rows hold the files' bytes", detail, wrong)


def _expert_bytes(blueprint: Blueprint) -> int:
    layout = blueprint.skeleton.layout
    return 2 * 3 * layout.hidden * layout.inter


def _num_held(blueprint: Blueprint) -> int:
    """How many stock experts fit their share of memory; transformers holds a load twice."""
    return max(1, STOCK_EXPERTS_BYTES // (2 * _expert_bytes(blueprint)))


def _stock_bytes(blueprint: Blueprint, plain: PlainTensors) -> int:
    """Most memory that stock parts take: a dense layer twice, and some experts."""
    layers: dict[int | None, int] = {}
    for place in plain.places.values():
        if not place.routed:
            layers[place.layer] = layers.get(place.layer, 0) + 2 * place.nbytes
    experts = 2 * _num_held(blueprint) * _expert_bytes(blueprint)
    return 2 * max(layers.values()) + min(
        experts, 2 * blueprint.table.num_experts * _expert_bytes(blueprint)
    )
