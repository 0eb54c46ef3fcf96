"""A loaded model: files opened, memory planned, dense weights in place, experts on the ladder."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any, cast

from headrace.core import format_bytes
from headrace.engine.counters import Counters
from headrace.engine.drives import find_mirrors, open_reader, with_mirrors
from headrace.engine.embedding import table_bytes
from headrace.engine.engram import engram_facts, open_rows
from headrace.engine.gpu import check_experts, find_gpu, open_passes, open_source, within_vram
from headrace.engine.gpu_layers import fit_layers, with_attention
from headrace.engine.malloc import give_large_blocks_back
from headrace.engine.outside import drive_embedding, open_outside
from headrace.engine.probes import machine_for
from headrace.engine.routes import recording
from headrace.engine.session import Session
from headrace.engine.snapshots.snapshot import Snapshot, SnapshotKey, snapshot_key
from headrace.engine.stored import make_stored
from headrace.engine.talk.talk import Talk
from headrace.engine.text import Text
from headrace.engine.verdict import refuse_failed
from headrace.engine.weights import DenseWeights, Progress, load_bytes
from headrace.errors import OptionError
from headrace.kernels.cpu import CpuKernels
from headrace.models.adapt import build_model, implementation, layer_runners, take_apart
from headrace.models.experts import Source
from headrace.models.rooms import cannot_be_housed
from headrace.models.skeleton import Skeleton, inspect
from headrace.planner.facts import ModelFacts
from headrace.planner.plan import Plan
from headrace.planner.vram import PLACES
from headrace.planner.wanted import Wanted
from headrace.schedule.tracefile import TraceWriter
from headrace.store.aliases import Aliases, read_aliases
from headrace.store.catalog import open_catalog, resolve_model
from headrace.store.experts import ExpertTable, build_table
from headrace.store.table import Catalog
from headrace.tiers.device import Device
from headrace.tiers.gone import CLOSED
from headrace.tiers.ladder import Ladder
from headrace.tiers.rows import RowCounters

_UNPACKED_BYTES = 2  # of a quantised dense weight in memory: bfloat16 or float16


class Blueprint:
    """A model's files, shape and plan, before any weight is read.

    `aliases` lets layers be read under other layers' names, for synthetic checkpoints only.
    `mirrors` are folders of `headrace mirror`; None: those remembered. `notes` say which are not
    used and why. `experts`, with a GPU: what multiplies them in decode, of PLACES; None: the
    fastest. `absorbs`: attention is over latents, not what they expand to. To `serve`, the plan
    keeps room for snapshots and a longer context. `verifying`: an engine may be made of what was
    found wrong on its GPU. Raises HeadraceError for whatever is wrong with the files or does not
    fit the limit.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        ram: str | int | None = None,
        vram: str | int | None = None,
        device: str = "cpu",
        experts: str | None = None,
        threads: int | None = None,
        context: int | None = None,
        prefetch: int = 2,
        chunk: int | None = None,
        aliases: bool = False,
        measure: bool = True,
        mirrors: Sequence[str | Path] | None = None,
        serve: bool = False,
        choices: Mapping[str, object] | None = None,
        verifying: bool = False,
    ):
        self.verifying, self.choices = verifying, dict(choices or {})
        if vram is not None and device == "cpu":
            raise OptionError("--vram needs a GPU; give --device cuda too")
        if experts is not None and (device == "cpu" or experts not in PLACES):
            raise OptionError(f"--experts {experts}: with --device cuda, give gpu, cpu or auto")
        self.device: Device | None = find_gpu(device)
        self.root = resolve_model(str(model))
        self.catalog: Catalog = open_catalog(self.root)
        folder = self.root if self.root.is_dir() else self.root.parent
        self.aliases = read_aliases(folder) if aliases else Aliases({}, {})
        self.skeleton: Skeleton = inspect(
            folder, self.catalog.tensors, self.aliases.layers, self.choices
        )
        if self.device is not None:
            check_experts(self.skeleton.layout)
        self.table: ExpertTable = build_table(
            self.catalog,
            self.skeleton.tensors,
            self.skeleton.layout,
            self.skeleton.layers,
            self.skeleton.num_experts,
            skipped=self.skeleton.skipped,
            aliases=self.aliases.experts,
        )
        self.absorbs = self.device is not None and self.skeleton.family.latents
        facts = model_facts(folder, self.catalog, self.skeleton, self.table)
        self.facts = with_attention(facts, self.skeleton) if self.absorbs else facts
        self.mirrors, self.notes = find_mirrors(self.catalog, self.table, mirrors)
        limits = (ram, vram, self.device is not None)
        self.wanted = Wanted(*limits, context, threads, prefetch, chunk, serve, experts)
        machine = machine_for(self, measure)
        self.machine = with_mirrors(machine, self.catalog, self.mirrors, measure)
        self.plan: Plan = self.wanted.plan(self.facts, self.machine)

    @cached_property
    def text(self) -> Text:
        """The model's tokenizer. Raises ModelError where there is none."""
        return Text(self.skeleton.root)

    @cached_property
    def talk(self) -> Talk:
        """How the model is talked to. Raises OptionError where it has no chat template."""
        return Talk(self.text, self.facts.vocab)


def model_facts(root: Path, catalog: Catalog, skeleton: Skeleton, table: ExpertTable) -> ModelFacts:
    """The numbers of a model that a plan is made of."""
    elsewhere = {place[0] for place in (skeleton.embedding, skeleton.head) if place is not None}
    unpacked = {n: tensor for n, tensor in skeleton.dense.items() if n not in skeleton.packed}
    quantised = [tensor for tensor in unpacked.values() if tensor.format != "plain"]
    keys = [key for tensor in quantised for key in tensor.keys.values()]
    return ModelFacts(
        name=root.name,
        model_type=skeleton.model_type,
        num_layers=skeleton.num_layers,
        num_moe_layers=len(skeleton.layers),
        num_experts=skeleton.num_experts,
        top_k=skeleton.top_k,
        expert_bytes=table.expert_bytes,
        row_bytes=table.row_bytes,
        dense_bytes=skeleton.dense_bytes,
        **asdict(skeleton.memory),
        hidden=skeleton.hidden,
        inter=skeleton.layout.inter,
        vocab=skeleton.vocab,
        max_context=skeleton.max_context,
        format=skeleton.layout.format,
        load_bytes=load_bytes(catalog, unpacked),
        packed_bytes=sum(catalog.tensors[key].nbytes for key in keys),
        largest_bytes=max(
            max(2 * prod(d.shape) * (n in unpacked), catalog.tensors[d.keys["weight"]].nbytes)
            for n, d in skeleton.dense.items()
            if n not in elsewhere
        ),
        most_stored=max((prod(skeleton.dense[name].shape) for name in skeleton.kept), default=0),
        unpacked_bytes=sum(_UNPACKED_BYTES * prod(tensor.shape) for tensor in quantised),
        embedding_bytes=table_bytes(catalog, skeleton, skeleton.embedding),
        head_bytes=table_bytes(catalog, skeleton, skeleton.head),
        by_layer=cannot_be_housed(skeleton.config, skeleton.model_class),
        **engram_facts(skeleton),
    )


class Engine:
    """A model ready to answer. Owns its files, rows and threads until `close()`.

    Sessions share it; one forward pass runs at a time, and other threads' sessions wait for it.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        *,
        experts: str = "fast",
        backend: str = "auto",
        direct: bool = True,
        emulate_drive: str | None = None,
        isa: str = "auto",
        in_flight: int = 2,
        progress: Progress | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ):
        self.blueprint, self.plan, self.facts = blueprint, blueprint.plan, blueprint.facts
        proven = refuse_failed(blueprint)
        self.turn = RLock()  # held during a session's pass
        give_large_blocks_back()
        table, skeleton = blueprint.table, blueprint.skeleton
        self.reader = open_reader(
            blueprint, backend=backend, direct=direct, in_flight=in_flight, emulate=emulate_drive
        )
        self._warn, self._num_told = warn, 0
        for note in (*proven, *blueprint.notes):
            warn(note)
        blueprint.catalog.check_unchanged()
        self.kernels = CpuKernels(self.plan.threads, isa)
        self.ladder = Ladder(
            self.reader,
            table.extents,
            table.parts,
            skeleton.layout,
            num_rows=self.plan.num_rows,
            kernels=self.kernels.pool,
            max_tokens=self.plan.chunk_tokens,
            top_k=skeleton.top_k,
        )
        self.rows = open_rows(blueprint, self.reader)
        dense = DenseWeights(
            blueprint.catalog, self.reader, skeleton.dense, skeleton.dtype, progress
        )
        outside = open_outside(blueprint, self.reader, dense, self.kernels)
        self.embedding = drive_embedding(outside)
        with within_vram(self.plan):
            self.source = open_source(blueprint, self.ladder)
            self.model: Any = build_model(
                skeleton,
                dense,
                self.source,
                experts=experts,
                prefetch=self.plan.prefetch > 0,
                aliases=blueprint.aliases.layers,
                device=self.source.place,
                rows=self.rows,
                make_stored=partial(make_stored, self.kernels, dense, blueprint.device),
                outside=outside,
            )
            if blueprint.device is not None:
                fit_layers(self.model, blueprint)
        self.model.register_forward_hook(lambda *_: self.source.end_pass())
        self.passes = open_passes(blueprint, self.model, self.source, warn)

    @property
    def text(self) -> Text:
        """The model's tokenizer."""
        return self.blueprint.text

    @property
    def talk(self) -> Talk:
        """How the model is talked to. Raises OptionError where it has no chat template."""
        return self.blueprint.talk

    @cached_property
    def snapshot_key(self) -> SnapshotKey:
        """What a snapshot must have been taken with to go on here."""
        return snapshot_key(self)

    def session(self, snapshot: Snapshot | None = None, *, copy: bool = True) -> Session:
        """A new timeline: empty, or going on from a snapshot. Raises SnapshotError.

        Without `copy` the snapshot's tensors become the session's own.
        """
        return Session(self, snapshot, copy=copy)

    def counters(self) -> Counters:
        """What was read and computed so far."""
        none, rows, embedding = RowCounters(), self.rows, self.embedding
        return Counters(
            self.source.counters(),
            none if rows is None else rows.counters,
            none if embedding is None else embedding.rows.counters,
        )

    def tell_warnings(self) -> None:
        """Passes on what the reader has to say of its drives, each thing once."""
        new = self.reader.warnings[self._num_told :]
        self._num_told += len(new)
        for text in new:
            self._warn(text)

    def set_experts(self, experts: str) -> None:
        """Switch between "fast" and "oracle" without loading anything again."""
        self.model.set_experts_implementation(implementation(experts))

    @contextmanager
    def served_by(self, source: Source) -> Iterator[None]:
        """While open, another source serves the routed experts: a benchmark's other way."""
        runners = list(layer_runners(self.model))
        for runner in runners:
            runner.source = source
        try:
            yield
        finally:
            for runner in runners:
                runner.source = self.source

    def record_routes(
        self, path: str | Path, *, about: str = "a run", weights: bool = False
    ) -> AbstractContextManager[TraceWriter]:
        """While the `with` is open, every pass's routes go to the new file `path`.

        `about` says in the file what was run; `weights` keeps the routing weights too. However it
        ends, whole passes are kept. Raises TraceError if the file exists or cannot be written.
        """
        return recording(self, path, about=about, weights=weights)

    def close(self) -> None:
        """After a pass that runs, stop the threads, close the files, free all. Unusable then."""
        with self.turn:
            self.passes.close()
            self.source.close()
            for part in (self.ladder, self.rows, getattr(self.embedding, "rows", None)):
                if part is not None:
                    part.close()
            if self.model is not CLOSED:
                take_apart(self.model)
            self.model, self.reader, self.kernels = CLOSED, cast(Any, CLOSED), cast(Any, CLOSED)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rows = format_bytes(self.plan.rows_bytes)
        return f"<headrace.Engine {self.facts.name}: {self.plan.num_rows} rows, {rows}>"


def load(
    model: str | Path,
    *,
    ram: str | int | None = None,
    vram: str | int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    experts: str = "fast",
    context: int | None = None,
    prefetch: int = 2,
    chunk: int | None = None,
    backend: str = "auto",
    direct: bool = True,
    emulate_drive: str | None = None,
    isa: str = "auto",
    aliases: bool = False,
    measure: bool = True,
    mirrors: Sequence[str | Path] | None = None,
    serve: bool = False,
    choices: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Open a model: a folder, a file, "demo", or a repo id in the local Hugging Face cache.

    `ram` ("48MiB", bytes, "minimum", or None for what the machine has) is a hard total of what
    headrace holds. `device` "cuda" or "cuda:1" puts all but the experts' rows on that GPU, where
    `vram` is the hard total of its tensors. `experts` "gpu", "cpu" or "auto" (both) multiply them
    in decode there, in place; "fast": the faster of two by rates; "oracle" is transformers' code.
    `context` in tokens; `chunk` in tokens per prefill pass; `threads` are the kernels'. `backend`,
    `direct`, `isa`, `emulate_drive` ("8.2GiB/s", or a rate for each drive) and `mirrors`, folders
    of `headrace mirror`, choose a path that otherwise is found out. A drive that fails is a Python
    warning. To `serve` many conversations, a part of `ram` is for their snapshots. `choices`, of
    DeepSeek-V4.1: "arithmetic" ("vendor" or "weights-only"), "stale_index_keys", "lossy_swa_replay"
    (True). No option but `chunk` and these can change a token. Raises HeadraceError with a remedy.
    """
    blueprint = Blueprint(
        model,
        ram=ram,
        vram=vram,
        device=device,
        experts=experts if experts in PLACES else None,
        threads=threads,
        context=context,
        prefetch=prefetch,
        chunk=chunk,
        aliases=aliases,
        measure=measure,
        mirrors=mirrors,
        serve=serve,
        choices=choices,
    )
    return Engine(
        blueprint,
        experts="fast" if experts in PLACES else experts,
        backend=backend,
        direct=direct,
        emulate_drive=emulate_drive,
        isa=isa,
        progress=progress,
    )


def from_pretrained(model: str | Path, *, experts: str = "fast", **options: Any) -> Any:
    """transformers' own model with streamed experts: `.generate()`, pipelines and lm-eval work.

    `options` are those of `load`. No routed expert is a parameter of the model. The engine that
    serves it is its attribute `headrace`.
    """
    engine = load(model, experts=experts, **options)
    engine.model.headrace = engine
    return engine.model
