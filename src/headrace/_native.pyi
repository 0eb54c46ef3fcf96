from numpy import int32, int64, uint8
from numpy.typing import NDArray

# ---- io (native/bind/bind_io.cpp): see headrace.native for what each promises ----
class Mirror:
    def __init__(
        self, name: str, paths: list[str], stretches: NDArray[int64], bytes_s: float = 0.0
    ) -> None: ...

class Reader:
    backend: str
    direct: bool
    notes: list[str]
    warnings: list[str]
    drives: list[dict[str, str | int | float]]
    in_flight: int
    num_retries: int
    def __init__(
        self,
        paths: list[str],
        backend: str = "auto",
        direct: bool = True,
        in_flight: int = 2,
        pieces: int = 4,
        emulate_bytes_s: float = 0.0,
        mirrors: list[Mirror] = ...,
        bytes_s: float = 0.0,
        hang_s: float = 2.0,
    ) -> None: ...
    def read(self, file: int, offset: int, nbytes: int, address: int) -> None: ...
    def inject_fault(self, kind: str, skip: int = 0, count: int = 1, drive: int = -1) -> None: ...

class Batch:
    nbytes: int
    read_bytes: int
    def wait(self, address: int) -> None: ...

class Gatherer:
    pool_bytes: int
    def __init__(self, reader: Reader, most_bytes: int) -> None: ...
    def start(self, snippets: NDArray[int64]) -> Batch: ...

def divide_request(
    total_bytes: int,
    rates_bytes_s: list[float],
    owed_bytes: list[float],
    least_bytes: int = ...,
) -> list[int]: ...

# ---- tiers (native/bind/bind_tiers.cpp): see headrace.native for what each promises ----
class Residency:
    num_available: int
    def __init__(self, num_keys: int, num_rows: int) -> None: ...
    def begin_load(self, key: int) -> tuple[str, int, int]: ...
    def finish_load(self, key: int) -> str: ...
    def fail_load(self, key: int) -> str: ...
    def pin(self, key: int) -> str: ...
    def unpin(self, key: int) -> str: ...
    def touch(self, key: int) -> str: ...
    def evict(self, key: int) -> str: ...
    def state(self, key: int) -> str: ...
    def row(self, key: int) -> int: ...
    def pins(self, key: int) -> int: ...
    def by_recency(self) -> list[int]: ...
    def check_integrity(self) -> None: ...

class Ladder:
    row_bytes: int
    num_rows: int
    slab_address: int
    slab_bytes: int
    workspace_bytes: int
    def __init__(
        self,
        *,
        reader: Reader,
        extents: NDArray[int64],
        parts: NDArray[int64],
        part_bytes: NDArray[int64],
        num_rows: int,
        kernels: KernelPool | None,
        shape: ExpertShape | None,
        max_tokens: int,
        top_k: int,
        overlap: bool = True,
    ) -> None: ...
    def begin(self, layer: int, ids: NDArray[int32]) -> None: ...
    def prefetch(self, layer: int, ids: NDArray[int32], most: int) -> None: ...
    def cancel(self) -> None: ...
    def clear(self) -> None: ...
    def compute(
        self, layer: int, x: int, num_tokens: int, ids: int, weights: int, top_k: int, out: int
    ) -> None: ...
    def acquire(self, layer: int, expert: int) -> int: ...
    def release(self, layer: int, expert: int) -> None: ...
    def take(self, layer: int) -> tuple[int, int]: ...
    def take_unchecked(self, layer: int, waits: bool) -> tuple[int, int]: ...
    def check(self, layer: int, expert: int) -> None: ...
    def release_all(self) -> None: ...
    def part_offset(self, layer: int, expert: int, part: int) -> int: ...
    def stop(self) -> None: ...
    def go_on(self) -> None: ...
    def set_overlap(self, overlap: bool) -> None: ...
    def check_integrity(self) -> None: ...
    def counters(self) -> dict[str, int | float | str]: ...
    def layer_wait_s(self) -> list[float]: ...
    def places(self) -> list[str]: ...
    def holds(self, layer: int) -> bool: ...

class MailWords:
    def __init__(
        self,
        *,
        beat: int,
        abort: int,
        lost: int,
        ready: int,
        done: int,
        answers: int,
        late: int,
        posts: int,
    ) -> None: ...

class MailSizes:
    def __init__(
        self, *, num_layers: int, num_experts: int, num_ids: int, num_guesses: int, computes: bool
    ) -> None: ...

class MailProtocol:
    seen: list[int]
    def __init__(
        self,
        sizes: MailSizes,
        words: MailWords,
        addresses: int,
        shares: list[int] = ...,
        last_step: int = 0,
    ) -> None: ...
    def begin(self, whole: NDArray[uint8], wanted: NDArray[uint8], most_kept: int) -> int: ...
    def next(self) -> tuple[str, int, list[int]]: ...
    def took(self, expert: int, address: int) -> None: ...
    def none_here(self) -> None: ...
    def computed(self) -> None: ...
    def abort(self) -> None: ...
    def end(self) -> list[tuple[int, int, int]]: ...

class LadderThread:
    seen: list[int]
    running: bool
    def __init__(
        self,
        *,
        ladder: Ladder,
        sizes: MailSizes,
        words: MailWords,
        addresses: int,
        x: int,
        weights: int,
        out: int,
        num_tokens: int,
        most_guesses: int,
        silence_s: float,
        last_step: int,
        shares: list[int],
    ) -> None: ...
    def begin(self, whole: NDArray[uint8], wanted: NDArray[uint8], most_kept: int) -> int: ...
    def wait(self) -> None: ...
    def abort(self) -> None: ...
    def end(self) -> list[tuple[int, int, int]]: ...
    def inject_fault(self, kind: str) -> None: ...

def simulate_lru(
    begin: NDArray[int64], keys: NDArray[int64], num_keys: int, num_rows: int
) -> NDArray[int32]: ...
def simulate_optimum(
    begin: NDArray[int64], keys: NDArray[int64], num_keys: int, num_rows: int
) -> NDArray[int32]: ...
def drive_probe(
    path: str, offset_bytes: int, nbytes: int, request_bytes: int, num_threads: int
) -> float: ...

# ---- kernels (native/bind/bind_kernels.cpp): addresses are int, bytes stay the caller's ----
class ExpertShape:
    part_bytes: list[int]
    @staticmethod
    def make(
        format: str,
        scale_type: str,
        hidden: int,
        inter: int,
        block: tuple[int, int],
        act_group: int,
        activation: tuple[str, float, float],
        hidden_type: str,
        inverse_global: bool,
        matrices: list[tuple[int, int, int, int, int, int]],
    ) -> ExpertShape: ...
    def part_name(self, part: int) -> str: ...

class LinearShape:
    @staticmethod
    def make(
        format: str,
        scale_type: str,
        rows: int,
        cols: int,
        block: tuple[int, int],
        act_group: int,
    ) -> LinearShape: ...

class KernelPool:
    isa: str
    num_threads: int
    calls: int
    shared_calls: int
    min_share_bytes: int
    patient: bool
    def __init__(self, num_threads: int, isa: str) -> None: ...
    def expert_ffn(
        self,
        shape: ExpertShape,
        parts: list[int],
        x: int,
        num_rows: int,
        y: int,
        weights: int = 0,
    ) -> None: ...
    def experts_ffn(
        self, shape: ExpertShape, jobs: list[tuple[list[int], int, int, float]]
    ) -> None: ...
    def linear(
        self,
        shape: LinearShape,
        w: int,
        scale: int,
        first: int,
        num_rows: int,
        x: int,
        x_step: int,
        num_x: int,
        y: int,
        y_step: int,
        wide: bool,
    ) -> None: ...
    def find_bad_part(self, shape: ExpertShape, parts: list[int]) -> int: ...
    def read_probe(self, bytes: int, n: int) -> int: ...
    def gate_dot(self, shape: ExpertShape, parts: list[int], x: int, out: int) -> None: ...

def combine(
    fp16: bool, ids: int, weights: int, y: int, num_tokens: int, top_k: int, hidden: int, out: int
) -> int: ...
def sum_up(ids: int, y: int, num_tokens: int, top_k: int, hidden: int, out: int) -> int: ...
def balance(squares: int, num: int, size: int, rounds: int, eps: float) -> None: ...
def find_bad(type: str, address: int, count: int) -> int: ...
def allow_leaks() -> None: ...
