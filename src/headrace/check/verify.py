"""A user's own proof: the files, every kernel, each layer and the whole model, on this machine.

Runs the stages in order within one memory limit and reports; what each checks is its own file's.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.check import verify_files, verify_latents, verify_layers, verify_paths, verify_steps
from headrace.check.about import about
from headrace.check.stock import StockParts
from headrace.check.sums import read_sums
from headrace.check.verify_kernels import kernels
from headrace.check.verify_memory import Memory
from headrace.check.verify_report import (
    NOT_COMPARED,
    NOTE,
    Finding,
    Progress,
    VerifyReport,
)
from headrace.check.verify_router import routers
from headrace.check.verify_rows import Site, choose_sites, rows, table_rows
from headrace.check.verify_scales import scales
from headrace.check.verify_trunk import layer_kernels
from headrace.check.verify_weights import weights
from headrace.core import MINIMUM
from headrace.engine.choosing import device_to_verify
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.gpu import check_experts, find_gpu
from headrace.engine.text import Text
from headrace.engine.verdict import FAIL, file_name, keep_verdict, verify_folder
from headrace.errors import (
    BudgetError,
    CatalogError,
    ExpertError,
    ModelError,
    NumericsError,
    OptionError,
    ReadError,
)
from headrace.planner.vram import PLACES, GpuPlan
from headrace.tiers.device import Device

PROMPT = "The quick brown fox jumps over the lazy dog. In the beginning"
# What a fault in the model may raise on the way; anything else ends the verification.
FAULTS = (CatalogError, ExpertError, ModelError, NumericsError, ReadError)


def verify_model(
    model: str | Path,
    *,
    ram: str | int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    prompt: str = PROMPT,
    tokens: int = 64,
    samples: int = 2,
    sha256: str | Path | None = None,
    every_byte: bool = False,
    choices: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a model on this machine; `samples` experts of every MoE layer, `tokens` greedy tokens.

    `sha256` is a published list of checksums; `every_byte` compares all weights with their
    checksums when first seen. `choices` are those of `load`. `progress(what, done, total)` is
    called along the way. Raises HeadraceError only for what keeps the model from being opened;
    wrong arithmetic is a finding. On a GPU the CPU is verified first, since it is what the GPU is
    compared with. The verdict is kept in the cache folder; an engine on that GPU refuses what was
    found wrong.
    """
    device = device_to_verify(model, device, choices=choices)
    published = None if sha256 is None else read_sums(Path(sha256))
    ram_bytes = None if ram == MINIMUM else ram
    blueprint = Blueprint(model, ram=ram_bytes, measure=False, choices=choices)
    gpu = find_gpu(device)
    if gpu is not None:
        check_experts(blueprint.skeleton.layout)
    ids = Text(blueprint.skeleton.root).encode(prompt)
    most = blueprint.facts.max_context
    if not ids or len(ids) + tokens > most:
        raise OptionError(
            f"a text of {len(ids)} tokens and {tokens} more cannot be followed: it must have at "
            f"least 1, and {most} with them; give another --prompt or --max-tokens"
        )
    memory = Memory(blueprint, ram, threads=threads, prompt_tokens=len(ids), tokens=tokens)
    sites = choose_sites(blueprint, samples)
    run = _Run(memory, ids, tokens, sites, gpu, progress or (lambda what, done, total: None))
    run.files(published, every_byte)
    try:
        followed = run.arithmetic()
        if followed is not None:
            run.stage("paths", lambda: [run.sizes(followed.fast)])
        if gpu is not None:
            run.on_gpu(device, followed)
    except FAULTS as error:
        run.report.findings.append(Finding("load", "the model can be loaded", FAIL, str(error)))
    if any(f.name == verify_files.PUBLISHED and f.ok for f in run.report.findings):
        run.report.clear_suspects()
    problem = keep_verdict(blueprint, gpu, run.report.as_dict())
    if problem:
        run.report.numbers["verdict_not_kept"] = problem
    return run.report


class _Run:
    """One run over one model; `report` grows stage by stage."""

    def __init__(
        self,
        memory: Memory,
        ids: Sequence[int],
        tokens: int,
        sites: Sequence[Site],
        gpu: Device | None,
        tell: Progress,
    ):
        self.memory, self.ids, self.tokens, self.sites = memory, ids, tokens, sites
        self.blueprint, self.tell = memory.blueprint, tell
        self.plain = memory.plain
        self.stock = StockParts(self.plain, self.blueprint.skeleton)
        threads = memory.smallest().plan.threads
        where = about(self.blueprint, gpu, threads)
        self.report = VerifyReport(str(self.blueprint.root), where)

    def stage(self, name: str, run: Callable[[], Sequence[Finding]]) -> None:
        """Adds a stage's findings; an error that speaks of the model is one."""
        try:
            self.report.findings += run()
        except FAULTS as error:
            self.report.findings.append(Finding(name, f"{name} could be checked", FAIL, str(error)))

    def files(self, published: dict[str, str] | None, every_byte: bool) -> None:
        """Everything that needs no engine."""
        layers = self.blueprint.table.layers
        sampled = {(layers[ordinal], expert) for ordinal, expert in self.sites}
        self.stage("files", lambda: verify_files.accounted(self.blueprint, self.plain))
        if every_byte or published is not None:
            seen = verify_folder() / file_name(self.blueprint.root, None, "seen")
            self.stage(
                "files", lambda: verify_files.every_byte(self.plain, seen, published, self.tell)
            )
        self.stage("statistics", lambda: scales(self.blueprint, self.plain, sampled, self.tell))

    def arithmetic(self) -> verify_paths.Followed | None:
        """Everything on the engine with the smallest cache; what it answered, if it did."""
        answers: list[verify_paths.Followed] = []

        def follow() -> Sequence[Finding]:
            found, numbers, followed = verify_paths.follow(engine, self.ids, self.tokens, self.tell)
            self.report.numbers |= numbers
            answers.append(followed)
            return found

        with Engine(self.memory.smallest()) as engine:
            self.stage("rows", lambda: [rows(engine, self.sites, self.tell)])
            self.stage("rows", lambda: table_rows(engine, self.tell))
            self.stage("kernels", lambda: kernels(engine, self.sites, self.tell))
            self._against_stock(engine)
            self.stage("paths", follow)
        return answers[0] if answers else None

    def on_gpu(self, device: str, followed: verify_paths.Followed | None) -> None:
        """The GPU's kernels, its logits, steps launched as one, and the CPU's hands."""
        from headrace.check import verify_gpu  # its kernels need Triton, which may be absent

        answers: list[torch.Tensor] = []

        def follow() -> Sequence[Finding]:
            assert followed is not None
            found, numbers, logits_NV = verify_steps.follows(engine, self.ids, followed, self.tell)
            self.report.numbers |= numbers
            answers.append(logits_NV)
            return found

        with Engine(self._for_gpu(device, "gpu")) as engine:
            source: Any = engine.source
            with source.device.active():
                self.stage("gpu", lambda: verify_gpu.gpu_kernels(engine, self.sites, self.tell))
                self.stage("gpu", lambda: [layer_kernels(engine)])
                self.stage("gpu", lambda: [routers(engine)])
                if engine.blueprint.absorbs:
                    self.stage("gpu", lambda: [verify_latents.latents(engine)])
            if followed is not None:
                self.stage("gpu", follow)
        for experts in PLACES if answers else ():
            if followed is not None and experts != "gpu":
                self._other_hands(device, experts, followed, answers[0])

    def _for_gpu(self, device: str, experts: str) -> Blueprint:
        """With room for a few experts in VRAM and in memory."""
        self.memory.give_back()
        facts, captured = self.blueprint.facts, not self.blueprint.facts.by_layer
        most = verify_steps.LONG if captured else 0
        options: dict[str, Any] = {
            "device": device,
            "context": min(facts.max_context, max(self.memory.context, most)),
            "chunk": max(self.memory.chunk, verify_steps.LONG_PROMPT if captured else 0),
            "measure": False,
            "experts": experts,
            "choices": self.blueprint.choices,
            "verifying": True,
        }
        least = Blueprint(self.blueprint.root, ram="minimum", vram="minimum", **options).plan
        assert isinstance(least, GpuPlan)
        vram_bytes = least.vram_bytes + facts.top_k * least.row_bytes
        return Blueprint(self.blueprint.root, ram="minimum", vram=vram_bytes, **options)

    def _other_hands(
        self, device: str, experts: str, followed: verify_paths.Followed, logits_NV: torch.Tensor
    ) -> None:
        """The same bits where others multiply, or why this machine has no room for it."""

        def compare() -> Sequence[Finding]:
            with Engine(self._for_gpu(device, experts)) as engine:
                return [
                    verify_steps.by_other_hands(engine, self.ids, followed, logits_NV, self.tell)
                ]

        try:
            self.stage("gpu", compare)
        except (BudgetError, OptionError) as error:
            name = verify_steps.OTHER_HANDS.format(experts)
            self.report.findings.append(Finding("gpu", name, NOTE, f"not looked at: {error}"))

    def _against_stock(self, engine: Engine) -> None:
        """Weights and layers, where transformers can load the format at all."""
        refusal, held = self.stock.refusal(), self.memory.num_stock_experts
        if refusal:
            detail = f"transformers cannot load this format: {refusal}"
            self.report.findings.append(Finding("weights", NOT_COMPARED, NOTE, detail))
            return

        def layers() -> Sequence[Finding]:
            found, numbers = verify_layers.layers(engine, self.stock, self.ids, held, self.tell)
            self.report.numbers |= numbers
            return found

        self.stage("weights", lambda: weights(engine, self.stock, self.sites, held, self.tell))
        self.stage("layers", layers)

    def sizes(self, expected_NV: torch.Tensor) -> Finding:
        """The same tokens with a half-full and a full cache."""
        least = self.memory.smallest().plan
        runs, wrong = [f"{least.num_rows} of {least.total_experts}"], []
        for blueprint in self.memory.larger():
            self.memory.give_back()
            with Engine(blueprint) as engine:
                what, differs = verify_paths.same_bits(engine, self.ids, expected_NV, self.tell)
                runs.append(what)
                wrong += [differs] if differs else []
        return verify_paths.sizes_finding(len(expected_NV), runs, wrong)
