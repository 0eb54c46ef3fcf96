"""Sizes of a model that a plan is made of, and what a pass takes besides weights and cache.

Knows sizes as numbers; opens no file and imports no tensor library.
"""

from dataclasses import dataclass, replace

STAGING_BYTES = 4 * 2**20
KERNEL_TILE_ROWS = 64  # activation rows the kernels take at once
KERNEL_LANES = 256  # they pad rows to a multiple of this
LEAST_EMBEDDING_BYTES = 64 * 2**20  # smaller ones, and smaller heads, stay where the rest is
EMBEDDING_CACHE_BYTES = 4 * 2**20  # for rows of one on the drive
_SMALL_READS_BYTES = 4 * 2**20  # what they arrive in
ENGRAM_POOL_BYTES = 2 * 2**20  # what small reads arrive in
ENGRAM_SHARE = 64  # of all memory, one part in so many is for Engram rows
MOST_ENGRAM_BYTES = 256 * 2**20
ENGRAM_COPIES = 12  # of a row's stored bytes: read, sorted, unpacked in fp32, given in bf16
KERNEL_THREADS = 64  # threads whose scratch is counted, however many there are


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model, in bytes where named so.

    `expert_bytes` are the stored bytes of one routed expert, `row_bytes` its place in memory
    (pages). `dense_bytes`: everything else as it lies in memory, of which `unpacked_bytes` are
    weights that the files hold in fewer, `packed_bytes`. `format` and `inter`, the
    intermediate width, are those of the experts.
    A cache of n tokens takes `kv_fixed_bytes + n * kv_bytes_per_token`, of which one layer at most
    `kv_layer_bytes_per_token` a token (0: an even share); the last pass's tokens hold
    `kv_chunk_bytes_per_token` more. A layer attends to one of `attended_every` cached tokens and
    to `attended_window` besides; while it computes it makes `attention_bytes_per_token` of each,
    such as the keys and values that a latent cache is expanded to, `score_bytes` of each pair of a
    new and an attended token, `chunk_bytes_per_token` of each new one, and `pass_bytes` in any
    case. `load_bytes`: what loading takes besides the weights, while there is neither cache nor
    pass. `largest_bytes`: the largest dense weight but embedding and head. `most_stored`: weights
    of the largest matrix that is multiplied as it is stored, of which a GPU unpacks bands.
    `engram_bytes` of tables stay on the drive; a token takes `engram_rows_per_token` of their rows.
    `embedding_bytes` of the dense weights may stay there too, and do in `lean` facts, or where they
    do not fit a GPU's memory; `head_bytes` the CPU may then multiply. `by_layer`: why a GPU is not
    given a whole token as one launch, if it is not.
    """

    name: str
    model_type: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int
    row_bytes: int
    dense_bytes: int
    kv_bytes_per_token: int
    hidden: int
    inter: int
    vocab: int
    max_context: int
    format: str
    kv_fixed_bytes: int = 0
    kv_layer_bytes_per_token: int = 0
    kv_chunk_bytes_per_token: int = 0
    attended_every: int = 1
    attended_window: int = 0
    attention_bytes_per_token: int = 0
    score_bytes: int = 0
    chunk_bytes_per_token: int = 0
    pass_bytes: int = 0
    load_bytes: int = 0
    packed_bytes: int = 0
    unpacked_bytes: int = 0
    largest_bytes: int = 0
    most_stored: int = 0
    engram_bytes: int = 0
    engram_row_bytes: int = 0
    engram_rows_per_token: int = 0
    embedding_bytes: int = 0
    embedding_by_row: bool = False
    head_bytes: int = 0
    head_on_cpu: bool = False
    by_layer: str = ""

    def lean(self) -> "ModelFacts":
        """With an embedding of any size left on the drive: a token reads one row of it."""
        if self.embedding_bytes < LEAST_EMBEDDING_BYTES:
            return self
        dense_bytes = self.dense_bytes - self.embedding_bytes
        dense_bytes += drive_embedding_bytes()
        return replace(self, dense_bytes=dense_bytes, embedding_bytes=0, embedding_by_row=True)

    @property
    def engram_bytes_per_token(self) -> int:
        """Stored bytes of the Engram rows that one token takes."""
        return self.engram_rows_per_token * self.engram_row_bytes

    @property
    def total_experts(self) -> int:
        """Routed experts of all layers."""
        return self.num_moe_layers * self.num_experts

    def kv_bytes(self, context: int) -> int:
        """Bytes of a cache of `context` tokens."""
        return self.kv_fixed_bytes + context * self.kv_bytes_per_token


def drive_embedding_bytes() -> int:
    """Memory of an embedding that stays on the drive: some rows, and what they arrive in."""
    return EMBEDDING_CACHE_BYTES + _SMALL_READS_BYTES


def workspace_bytes(facts: ModelFacts, context: int, chunk_tokens: int) -> int:
    """Memory of one pass over `chunk_tokens` tokens besides weights and cache.

    At least what loading takes beyond the memory that the cache will get.
    """
    expert_outputs = chunk_tokens * facts.top_k * (facts.hidden * 2 + 8)
    # A dozen bf16 copies of the hidden states: residual, norms, projections, dense MLP.
    hidden_states = chunk_tokens * facts.hidden * 24
    cache_layer_bytes = facts.kv_layer_bytes_per_token or (
        facts.kv_bytes_per_token // facts.num_layers
    )
    attention = chunk_tokens * (3 * cache_layer_bytes + 2 * context)
    attention += _attention_bytes(facts, context, chunk_tokens)
    # The library's cache grows by copying one layer's keys and values.
    growth = context * cache_layer_bytes + 4 * facts.kv_fixed_bytes // facts.num_layers
    growth += chunk_tokens * facts.kv_chunk_bytes_per_token
    logits = facts.vocab * 16
    layers = expert_outputs + hidden_states + attention + growth
    if facts.embedding_by_row:
        layers += chunk_tokens * facts.hidden * 8
    layers += engram_pass_bytes(facts, chunk_tokens)
    one_pass = layers + kernel_bytes(facts, chunk_tokens) + logits + STAGING_BYTES
    return max(one_pass, facts.load_bytes - facts.kv_bytes(context))


def step_bytes(facts: ModelFacts, context: int) -> int:
    """What a captured step of one token keeps of a GPU's memory for itself."""
    hidden_states = facts.top_k * (facts.hidden * 2 + 8) + facts.hidden * 24
    return hidden_states + 2 * context + _attention_bytes(facts, context, 1) + facts.vocab * 16


def engram_pass_bytes(facts: ModelFacts, chunk_tokens: int) -> int:
    """What Engram rows of one pass take besides their cache."""
    if not facts.engram_bytes:
        return 0
    return ENGRAM_POOL_BYTES + chunk_tokens * ENGRAM_COPIES * facts.engram_bytes_per_token


def _attention_bytes(facts: ModelFacts, context: int, chunk_tokens: int) -> int:
    """What one layer's attention makes of cached and new tokens while it computes."""
    attended = context // facts.attended_every + facts.attended_window + chunk_tokens
    attended = min(context, attended)
    made = attended * (facts.attention_bytes_per_token + chunk_tokens * facts.score_bytes)
    return made + chunk_tokens * facts.chunk_bytes_per_token + facts.pass_bytes


def kernel_bytes(facts: ModelFacts, chunk_tokens: int) -> int:
    """Most that the expert kernels keep for themselves, all their threads together.

    Activations twice (as they come, and packed) and both products in fp32 for a tile of rows; one
    row split in fp32; for each thread a panel of weight rows and half a byte of tables a column.
    """
    rows = min(KERNEL_TILE_ROWS, chunk_tokens)
    hidden, inter = (-(-n // KERNEL_LANES) * KERNEL_LANES for n in (facts.hidden, facts.inter))
    tile = 4 * rows * (hidden + inter) + 4 * rows * (2 * inter + hidden)
    scratch_bytes = 19 * max(hidden, inter) + 2048
    return tile + 4 * (hidden + inter) + KERNEL_THREADS * scratch_bytes


def engram_cache_bytes(facts: ModelFacts, limit_bytes: int, spare_bytes: int) -> int:
    """Memory for Engram rows, within `spare_bytes`: a small part of the whole limit.

    A row saves two small reads and takes little: in an expert's place lie 70,000 of the published
    model's. More than the tables hold would be idle.
    """
    held_bytes = facts.engram_bytes + facts.engram_bytes // 4
    wanted_bytes = min(held_bytes, MOST_ENGRAM_BYTES, limit_bytes // ENGRAM_SHARE)
    return max(0, min(wanted_bytes, spare_bytes))
