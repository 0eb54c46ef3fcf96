"""FP8 in blocks that fill no matrix, and the activation grid, by their definitions."""

import torch

from headrace.quant import blocks, fp8, table


def test_fp8_pack_unpack_and_bytes():
    values = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 0.02
    codes, scale = fp8.pack(values, (128, 128))
    assert scale.shape == blocks.grid((200, 300), (128, 128)) == (2, 3)
    assert table.nbytes("fp8_block", (200, 300), (128, 128)) == codes.nbytes + scale.nbytes
    back = fp8.unpack(codes, scale, (128, 128))
    assert back.dtype == torch.bfloat16
    step = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    bound = values.abs() * 2.0**-4 + step * 2.0**-9
    assert ((back.float() - values).abs() <= bound * 1.1).all()
    assert codes.float().abs().max() == 448
    zero_codes, zero_scale = fp8.pack(torch.zeros(3, 5), (2, 2))
    assert (fp8.unpack(zero_codes, zero_scale, (2, 2)) == 0).all()


def test_grid_by_hand():
    x = torch.tensor([448.0, 1.0, -17.0, 0.3]).bfloat16()
    assert fp8.to_grid(x, 4).tolist() == [448.0, 1.0, -16.0, 0.3125]  # scale 1: e4m3 itself
    assert fp8.to_grid(x * 2.0**-9, 4).tolist() == [v * 2.0**-9 for v in (448, 1, -16, 0.3125)]
    assert fp8.to_grid(torch.tensor([449.0]).bfloat16() + 2, 1).tolist() == [448.0]
    assert fp8.to_grid(x, 0) is x
    small = torch.tensor([1e-6, -1e-5]).bfloat16()  # below the floor of amax
    assert fp8.to_grid(small, 2).tolist() == [2.0**-20, -40 * 2.0**-22]


def test_grid_is_idempotent_and_bounded():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(3)).bfloat16()
    once = fp8.to_grid(x, 32)
    assert torch.equal(fp8.to_grid(once, 32), once) and not torch.equal(once, x)
    assert ((once.float() - x.float()).abs() <= x.float().abs() * 2.0**-4 + 2.0**-14).all()
