"""SWAG: moments of hand-made snapshots, the traps seen elsewhere, ranks, batch statistics."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data
from test_map import Normed
from torch import nn

import pbnn
from pbnn.errors import FitError, ModelError
from pbnn.infer.covariance import GaussianCovariance
from pbnn.infer.swag import SnapshotMoments, sweep_rank

DRAWS = 40_000
# A standard deviation from so many draws has the relative error 1/sqrt(2 draws): five of them.
FIVE_SIGMA = 5 / math.sqrt(2 * DRAWS)


def moments(variance=0.01, size=3, rank=0):
    return SnapshotMoments(
        mean=torch.zeros(size),
        variance=torch.full((size,), variance),
        deviations=torch.zeros(size, rank),
    )


@pytest.mark.parametrize(("rank", "scale"), [(0, 0.1), (5, 0.1 / math.sqrt(2))])
def test_diagonal_part_has_the_scale_of_its_form(rank, scale):  # fault 15
    draws = moments(rank=rank).draw(DRAWS)
    torch.testing.assert_close(draws.std(0), torch.full((3,), scale), rtol=FIVE_SIGMA, atol=0.0)


def test_moments_of_hand_made_snapshots():
    snapshots = torch.tensor([[1.0, 0.0], [3.0, 0.0], [8.0, 3.0]])
    found = SnapshotMoments.of(snapshots, 3)
    # Running means 1, 2, 4 and 0, 0, 1: of the snapshots alone, not of where they started from.
    torch.testing.assert_close(found.mean, torch.tensor([4.0, 1.0]))
    torch.testing.assert_close(found.variance, torch.tensor([74 / 3 - 16, 3 - 1.0]))
    expected = torch.tensor([[0.0, 1.0, 4.0], [0.0, 0.0, 2.0]])
    torch.testing.assert_close(found.deviations, expected)
    # Fewer columns are those of the last snapshots, with the running mean of all.
    last = SnapshotMoments.of(snapshots, 2).deviations
    torch.testing.assert_close(last, expected[:, 1:])


def test_one_z2_serves_all_parameters_and_is_divided_by_the_snapshots_there_are():
    snapshots = torch.tensor([[0.0, 0.0], [2.0, -2.0], [1.0, -1.0], [3.0, -3.0]])
    found = SnapshotMoments.of(snapshots, 4)
    covariance = torch.cov(found.draw(DRAWS).T)
    low_rank = found.deviations @ found.deviations.T / (2 * 3)
    expected = torch.diag(found.variance / 2) + low_rank
    # Var of a sample covariance is (Σ_ii Σ_jj + Σ_ij²) / draws; the off-diagonal entry would be 0
    # if each parameter had a z2 of its own.
    error = (expected[0, 0] * expected[1, 1] + expected[0, 1] ** 2) ** 0.5 / DRAWS**0.5
    torch.testing.assert_close(covariance, expected, rtol=0.0, atol=5 * float(error))
    assert expected[0, 1] < -10 * error


@pytest.mark.parametrize(
    ("count", "rank", "message"),
    [
        (1, 0, "snapshots=1; expected at least 2"),
        (3, 1, "rank=1 with 3 snapshots"),
        (3, 4, "rank=4 with 3 snapshots; expected 0"),
        (3, -1, "rank=-1; expected a whole number of at least 0"),
    ],
)
def test_too_few_snapshots_are_refused(count, rank, message):
    with pytest.raises(FitError) as caught:
        SnapshotMoments.of(torch.randn(count, 2), rank)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def linear():
    x, y = linear_data(60, 3)
    start = pbnn.fit_map(Linear(3), x, y, steps=200, lr=0.1, progress=False)
    options = {"start": start, "snapshots": 6, "every": 5, "draws": 2000, "progress": False}
    return x, y, start, pbnn.fit_swag(Linear(3), x, y, **options)


def test_fit_draws_from_the_moments_of_its_own_path(linear):
    _, _, start, posterior = linear
    path = posterior.history["snapshots"]
    assert path.shape == (6, 3)
    assert not torch.equal(path[0], start.draws["w"][0, 0])
    assert posterior.history["log_joint"].shape == (30,)
    assert posterior.provenance["options"]["batch_size"] == 6
    expected = SnapshotMoments.of(path, 6)
    w = posterior.draws["w"][0]
    covariance = torch.diag(expected.variance / 2)
    covariance += expected.deviations @ expected.deviations.T / 10
    scales = covariance.diagonal().sqrt()
    assert ((w.mean(0) - expected.mean) / scales).abs().max() < 5 / math.sqrt(2000)
    torch.testing.assert_close(w.std(0), scales, rtol=5 / math.sqrt(4000), atol=0.0)
    known = GaussianCovariance(posterior.approximation).scales()["w"]
    torch.testing.assert_close(known.float(), scales)
    normal = torch.distributions.MultivariateNormal(expected.mean, covariance)
    torch.testing.assert_close(
        posterior.stats["log_q"][0], normal.log_prob(w), rtol=1e-3, atol=1e-2
    )


def test_ranks_are_swept_over_the_snapshots_of_one_fit(linear):
    x, y, _, posterior = linear
    sweep = sweep_rank(Linear(3), posterior, x, y, ranks=(0, 2, 6), draws=50)
    assert list(sweep) == [0, 2, 6]
    for rank, found in sweep.items():
        assert found.draws["w"].shape == (1, 50, 3)
        assert found.provenance["options"]["rank"] == rank
        factor = found.approximation["tensors"].get("factor")
        assert (0 if factor is None else factor.shape[1]) == rank
    with pytest.raises(FitError, match="rank=7 with 6 snapshots"):
        sweep_rank(Linear(3), posterior, x, y, ranks=(7,))
    with pytest.raises(FitError, match="the draws of 'map' have no snapshots"):
        sweep_rank(Linear(3), linear[2], x, y)


def test_batch_norm_statistics_and_constants_are_those_of_each_draw():
    x = 2 * torch.randn(40, 2) + 1
    y = x[:, 0] - x[:, 1]
    options = {"snapshots": 3, "every": 2, "steps": 20, "draws": 4, "progress": False}
    posterior = pbnn.fit_swag(Normed(), x, y, **options)
    assert "log_q" not in posterior.stats
    own = {"norm1.weight", "norm2.weight", "norm2.running_mean", "norm2.running_var"}
    assert own <= set(posterior.per_draw)
    # The first layer sees the rows themselves, whatever the weights: all draws share them.
    assert posterior.buffers["norm1.running_mean"].shape == (2,)
    torch.testing.assert_close(posterior.buffers["norm1.running_var"], x.var(0))
    assert posterior.buffers["norm2.running_mean"].shape == (1, 4, 4)
    for draw in range(4):
        d = {k: v[0, draw] for k, v in posterior.draws.items()}
        c = {
            k: v[0, draw]
            for k, v in {**posterior.constants, **posterior.buffers}.items()
            if k in posterior.per_draw
        }
        h = (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt() * c["norm1.weight"] + c["norm1.bias"]
        h = h @ d["fc1.weight"].T + d["fc1.bias"]
        torch.testing.assert_close(c["norm2.running_mean"], h.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(c["norm2.running_var"], h.var(0), rtol=1e-4, atol=1e-5)
        h = (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt() * c["norm2.weight"] + c["norm2.bias"]
        f = (torch.tanh(h) @ d["fc2.weight"].T + d["fc2.bias"]).squeeze(-1)
        alone = posterior.select(draws=slice(draw, draw + 1))
        found = pbnn.predict(Normed(), alone, x, quantiles=()).mean
        torch.testing.assert_close(found.float(), f, rtol=1e-4, atol=1e-4)
    expected = pbnn.log_likelihood(Normed(), posterior, x, y)
    assert expected.shape == (1, 4, 40)


def test_network_that_torch_trained_is_a_start():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.fc1 = nn.BatchNorm1d(2), nn.Linear(2, 4)
            self.norm2, self.fc2 = nn.BatchNorm1d(4), nn.Linear(4, 1)

        def forward(self, x):
            return self.fc2(torch.tanh(self.norm2(self.fc1(self.norm1(x))))).squeeze(-1)

    x = 2 * torch.randn(40, 2) + 1
    y = x[:, 0] - x[:, 1]
    network = Network()
    optimiser = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(100):
        optimiser.zero_grad()
        (network(x) - y).square().mean().backward()
        optimiser.step()
    network.eval()
    options = {"snapshots": 2, "every": 1, "lr": 1e-6, "draws": 2, "progress": False}
    posterior = pbnn.fit_swag(Normed(), x, y, start=network.state_dict(), **options)
    assert posterior.provenance["options"]["start"] == "state_dict"
    # At such a rate the path stays where it began; statistics differ from running ones a little.
    off = pbnn.predict(Normed(), posterior, x, quantiles=()).mean - network(x).detach()
    assert off.abs().max() < 0.1 * y.std()


def test_same_seed_gives_the_same_bits(toy, unchanged):
    options = {"snapshots": 2, "every": 1, "steps": 5, "draws": 3, "progress": False}
    model = Toy()
    with unchanged(model):
        a, b = (pbnn.fit_swag(model, *toy, seed=4, lr=1e-4, **options) for _ in range(2))
    for name, value in a.draws.items():
        assert torch.equal(value, b.draws[name])


def test_what_does_not_fit_is_refused(toy, linear):
    x, y, _, posterior = linear
    with pytest.raises(FitError, match="start has 2000 draws; expected one point"):
        pbnn.fit_swag(Linear(3), x, y, start=posterior)
    with pytest.raises(FitError, match=r"start has sites w, the model fc1\.weight"):
        pbnn.fit_swag(Toy(), *toy, start=posterior)
    with pytest.raises(FitError, match=r"start has no value for site 'fc1\.bias'"):
        pbnn.fit_swag(Toy(), *toy, start={"fc1.weight": torch.zeros(5, 2)})
    with pytest.raises(FitError, match="rank=9 with 5 snapshots"):
        pbnn.fit_swag(Toy(), *toy, snapshots=5, rank=9)
    with pytest.raises(FitError, match="snapshots=1; expected a whole number of at least 2"):
        pbnn.fit_swag(Toy(), *toy, snapshots=1)
    with pytest.raises(FitError, match=r"not finite at step \d+ \(site"):
        pbnn.fit_swag(Linear(3), x, y, start=linear[2], lr=1e30, progress=False)


def test_model_without_rows_is_refused():
    def model(x, y=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean.expand(5), 1.0).to_event(1), obs=y)

    with pytest.raises(ModelError, match="SWAG takes the rows in batches"):
        pbnn.fit_swag(model, None, torch.randn(5))
