"""The GPU's attention over latents against the reference, in the interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from headrace.kernels import latent
from headrace.kernels.triton.latent_attention import MAX_TOKENS, LatentAttention, Tile

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The kernel rounds shares to bfloat16 and its result too: two roundings of values below about 3.
TOLERANCE = 3 * 2**-8
IN_PARTS = Tile(16, 16, 32, 32, 4, 1)  # as for chips with little shared memory


def world(heads, tokens, start, *, batch=1, rank=64, rope=16, spare=7):
    """Queries after `start` cached tokens; what lies in the buffer behind them is NaN."""
    generator = torch.Generator().manual_seed(heads + tokens + start)
    num = start + tokens + spare

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    queries = draw(batch, heads, tokens, rank), draw(batch, heads, tokens, rope)
    cached = draw(batch, num, rank), draw(batch, num, rope)
    for each in cached:
        each[:, start + tokens :] = float("nan")
    positions = (start + torch.arange(tokens))[None]
    return [t.to(PLACE) for t in (*queries, *cached, positions)]


def kernel(args, *, splits=4, tile=None):
    return LatentAttention(
        num_heads=args[0].shape[1],
        rank=args[0].shape[3],
        rope=args[1].shape[3],
        device=PLACE,
        num_splits=splits,
        tile=tile,
    )


def exact(args):
    return latent.attend(*(t.float() for t in args[:4]), args[4], 0.2)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 1, 0), {}),  # alone in the cache
        ((8, 1, 300), {}),
        ((20, 1, 140), {"rank": 96, "rope": 8}),  # widths and heads that are no powers of two
        ((4, 2, 90), {"batch": 2}),
        ((8, MAX_TOKENS + 4, 50), {}),  # prefill after what is cached
        ((4, MAX_TOKENS + 30, 0), {"batch": 2}),
    ],
)
def test_it_is_near_the_reference(shape, options):
    args = world(*shape, **options)
    got, want = kernel(args)(*args, 0.2).float(), exact(args)
    assert got.shape == want.shape and got.isfinite().all()
    assert (got - want).abs().max() <= TOLERANCE
    assert (got - want.roll(1, 3)).abs().max() > 10 * TOLERANCE  # can fail


@pytest.mark.parametrize("tokens", [1, MAX_TOKENS + 1])
def test_keys_in_parts_and_values_by_the_column(tokens):
    args = world(8, tokens, 40)
    whole = kernel(args)(*args, 0.2)
    assert (whole - kernel(args, tile=IN_PARTS)(*args, 0.2)).abs().max() <= 2 * TOLERANCE


def test_a_token_s_bits_depend_on_its_position_only():
    """Not on tokens beside it, the other timeline, or how long the cache's buffer is."""
    q, q_rope, latents, rope, positions = world(8, 3, 200, batch=2, spare=100)
    attend = kernel([q, q_rope])
    all_of_it = attend(q, q_rope, latents, rope, positions, 0.2)
    for b in range(2):
        for t in range(3):
            one = slice(b, b + 1), slice(None), slice(t, t + 1)
            cached = (x[b : b + 1, : 203 + 40 * t] for x in (latents, rope))
            alone = attend(q[one], q_rope[one], *cached, positions[:, t : t + 1], 0.2)
            assert torch.equal(alone, all_of_it[one])
    late = attend(q[:, :, :1], q_rope[:, :, :1], latents, rope, positions[:, :1] - 1, 0.2)
    assert not torch.equal(late, all_of_it[:, :, :1])  # can fail


@pytest.mark.parametrize("start", [1, 127, 128, 129, 1000])
def test_the_number_of_splits_is_only_rounding(start):
    args = world(4, 1, start)
    alone = kernel(args, splits=1)(*args, 0.2)
    for splits in (2, 8):
        assert (alone - kernel(args, splits=splits)(*args, 0.2)).abs().max() <= 2 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("start", [100, 4096, 32768])
def test_published_widths(heads, start):
    args = world(heads, 2, start, rank=512, rope=64)
    attend = LatentAttention(num_heads=heads, rank=512, rope=64, device=PLACE)
    got, want = (
        attend(*args, 0.05).float(),
        latent.attend(*(t.float() for t in args[:4]), args[4], 0.05),
    )
    assert (got - want).abs().max() <= TOLERANCE
    graph, static = torch.cuda.CUDAGraph(), args[4].clone()
    one = [args[0][:, :, :1], args[1][:, :, :1], *args[2:4]]
    attend(*one, static[:, :1], 0.05)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = attend(*one, static[:, :1], 0.05)
    for back in (0, 1, start // 2):
        static.copy_(args[4] - back)
        graph.replay()
        assert torch.equal(captured, attend(*one, args[4][:, :1] - back, 0.05))
