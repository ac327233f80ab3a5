import torch
from scipy import stats

from pbnn.infer.noise import both, lane_keys, normals, threefry, uniforms


def test_threefry_gives_the_known_answers():
    # Known-answer vectors of Salmon et al. (2011)'s Random123, threefry2x32 with 20 rounds.
    cases = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, expected in cases:
        words = threefry(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))
        assert tuple(int(word) for word in words) == expected


def test_a_lane_keeps_its_numbers_in_any_batch():
    together, alone = lane_keys(7, [0, 1, 2]), lane_keys(7, [2])
    assert torch.equal(together[2:], alone)
    counter = torch.tensor([5, 6, 7])
    for draw in (normals, uniforms):
        assert torch.equal(
            draw(together, counter, 11, torch.float32)[2:],
            draw(alone, counter[2:], 11, torch.float32),
        )
    assert len({tuple(row.tolist()) for row in torch.cat([together, lane_keys(8, [0, 1, 2])])}) == 6


def test_both_at_once_are_the_same_numbers():
    keys = lane_keys(0, [0, 1, 2])
    vector, row = torch.tensor([4, 5, 6]), torch.tensor([70, 80, 90])
    z, u = both(keys, vector, row, 5, 3, torch.float64)
    assert torch.equal(z, normals(keys, vector, 5, torch.float64))
    assert torch.equal(u, uniforms(keys, row, 3, torch.float64))


def test_normals_and_uniforms_have_their_laws():
    # p > 0.001 by Kolmogorov and Smirnov, over elements and over counters.
    keys = lane_keys(0, list(range(200)))
    counter = torch.arange(200)
    for dtype in (torch.float32, torch.float64):
        z = normals(keys, counter, 101, dtype)
        assert z.dtype == dtype
        assert z.isfinite().all()
        assert stats.kstest(z.double().flatten().numpy(), "norm").pvalue > 0.001
    u = uniforms(keys, counter, 100, torch.float32)
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.double().flatten().numpy(), "uniform").pvalue > 0.001
    series = torch.cat(
        [normals(keys[:1], torch.tensor([k]), 2, torch.float64) for k in range(2000)]
    )
    # Correlation of neighbours, within 4 of its standard errors 1/√2000.
    assert abs(float((series[1:, 0] * series[:-1, 0]).mean())) < 4 / 2000**0.5
    assert abs(float((series[:, 0] * series[:, 1]).mean())) < 4 / 2000**0.5
