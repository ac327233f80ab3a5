import pytest
import torch
from density_cases import correlated, funnel, independent, schools

from pbnn.errors import FitError
from pbnn.infer import engine as engines
from pbnn.infer.lanes import STATS, Rule
from pbnn.infer.options import Options
from pbnn.infer.sampler import sample

SHORT = Rule(max_tree_depth=4)


def starts(chains, dim, dtype=torch.float64):
    return lambda: torch.randn(chains, dim, dtype=dtype)


def assert_moments(draws, mean, square):
    """Means over chains are independent: within 4 of their standard error, by chains."""
    for values, exact in ((draws, mean), (draws**2, square)):
        chain_means = values.double().mean(1)
        error = chain_means.std(0) / len(chain_means) ** 0.5
        assert ((chain_means.mean(0) - exact).abs() < 4 * error).all()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"dense_mass": True}, torch.float64),
        ({"pool_mass": True}, torch.float64),
    ],
)
def test_moments_of_a_normal(options, dtype):
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    factor = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.5, 1.0, 2.0]], dtype=dtype)
    covariance = factor @ factor.T
    options = Options(warmup=50, draws=20, **options)
    result = sample(correlated(mean, covariance), starts(200, 3, dtype), options)
    assert result.draws.dtype == dtype
    assert_moments(result.draws, mean, covariance.diagonal() + mean**2)


def test_moments_of_a_normal_by_hmc():
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    options = Options(warmup=100, draws=30, rule=Rule(algorithm="hmc"))
    result = sample(independent(scale), starts(200, 3), options)
    assert_moments(result.draws, 0.0, scale**2)
    assert result.stats["n_steps"].unique().numel() > 2  # lengths are jittered
    assert "tree_depth" not in result.stats


def test_statistics_are_those_of_the_draws():
    scale = torch.tensor([1.0, 2.0], dtype=torch.float64)
    density = independent(scale)
    result = sample(density, starts(3, 2), Options(warmup=50, draws=40))
    stats = result.stats
    assert tuple(stats) == STATS
    assert all(value.shape == (3, 40) for value in stats.values())
    assert torch.equal(density(result.draws.flatten(0, 1))[0], stats["lp"].flatten())
    assert (stats["energy"] >= -stats["lp"]).all()  # the kinetic energy is positive
    assert ((stats["acceptance_rate"] >= 0) & (stats["acceptance_rate"] <= 1)).all()
    assert (stats["step_size"] == result.step_size[:, None]).all()
    assert (stats["n_steps"] < 2 ** (stats["tree_depth"] + 1)).all()
    assert stats["diverging"].dtype == stats["reached_max_treedepth"].dtype == torch.bool
    assert not stats["diverging"].any()
    assert torch.equal(result.lengths[:, 50:].long(), stats["n_steps"])
    assert (result.leapfrogs >= result.lengths.sum(1)).all()


def test_energy_is_that_of_marginal_and_transition():
    # For an exact sampler of a D-dimensional Normal the energy has mean D and variance D.
    options = Options(warmup=0, draws=20, step_size=0.3)
    result = sample(independent(torch.ones(10, dtype=torch.float64)), starts(200, 10), options)
    chain_means = result.stats["energy"].mean(1)
    assert abs(chain_means.mean() - 10) < 4 * chain_means.std() / 200**0.5


def test_the_same_seed_gives_the_same_draws_and_another_one_others():
    z = torch.randn(2, 10, dtype=torch.float64)
    runs = [
        sample(schools, lambda: z, Options(warmup=20, draws=8, seed=seed)).draws
        for seed in (3, 3, 4)
    ]
    assert torch.equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any(2).all()
    assert (runs[0][0] != runs[0][1]).any(1).all()


def test_a_chain_alone_draws_what_it_draws_in_a_batch():
    z = torch.randn(5, 4, dtype=torch.float64)
    options = Options(warmup=30, draws=10, rule=SHORT)
    together = sample(funnel, lambda: z, options)
    alone = sample(funnel, lambda: z[3:4], options, numbers=[3])
    assert torch.equal(together.draws[3:4], alone.draws)
    assert torch.equal(together.leapfrogs[3:4], alone.leapfrogs)


def test_draws_do_not_depend_on_when_the_lanes_are_looked_at(monkeypatch):
    z = torch.randn(3, 4, dtype=torch.float64)
    results = []
    for block in (1, 7, 32):
        monkeypatch.setattr(engines, "BLOCK", block)
        results.append(sample(funnel, lambda: z, Options(warmup=24, draws=6, rule=SHORT)))
    assert torch.equal(results[0].draws, results[1].draws)
    assert torch.equal(results[0].draws, results[2].draws)


def test_no_lane_waits_for_another():
    result = sample(schools, starts(16, 10), Options(warmup=0, draws=100, step_size=0.4))
    busiest = int(result.leapfrogs.max())
    assert result.calls <= 1.05 * busiest
    assert result.lockstep_calls > 1.3 * busiest


@pytest.mark.slow  # the short form is in test_posteriordb_nuts
def test_eight_schools():
    # Reference posterior of posteriordb (10,000 draws of Stan): mean of mu, tau and theta_1.
    result = sample(schools, starts(400, 10), Options(warmup=100, draws=30, target_accept=0.9))
    mu, tau = result.draws[:, :, 0], result.draws[:, :, 1].exp()
    theta = mu + tau * result.draws[:, :, 2]
    for values, mean, sd in ((mu, 4.41, 3.32), (tau, 3.62, 3.19), (theta, 6.20, 5.63)):
        chain_means = values.mean(1)
        error = (chain_means.var() / 400 + (sd / 100) ** 2).sqrt()
        assert abs(chain_means.mean() - mean) < 4 * error


def test_thinning_keeps_every_third_draw():
    z = torch.randn(2, 4, dtype=torch.float64)
    every = sample(funnel, lambda: z, Options(warmup=20, draws=15, rule=SHORT))
    third = sample(funnel, lambda: z, Options(warmup=20, draws=5, thin=3, rule=SHORT))
    assert torch.equal(third.draws, every.draws[:, 2::3])
    for name, value in third.stats.items():
        assert torch.equal(value, every.stats[name][:, 2::3])


def test_without_warmup_the_step_size_stays():
    density = independent(torch.ones(3, dtype=torch.float64))
    given = sample(density, starts(2, 3), Options(warmup=0, draws=20, step_size=0.37))
    assert (given.stats["step_size"] == 0.37).all()
    searched = sample(density, starts(2, 3), Options(warmup=0, draws=20))
    assert (searched.stats["step_size"] == searched.step_size[:, None]).all()
    assert (searched.scale == 1).all()


def test_a_lane_that_fails_leaves_the_others_alone():
    def broken(z):
        value, gradient = funnel(z)
        hole = (z[:, 1] > 0.5) & (torch.arange(len(z)) == 1)
        nan = torch.full_like(value, torch.nan)
        return torch.where(hole, nan, value), torch.where(hole[:, None], nan[:, None], gradient)

    z = 0.3 * torch.randn(3, 4, dtype=torch.float64)
    options = Options(warmup=40, draws=30, rule=SHORT)
    whole, holed = sample(funnel, lambda: z, options), sample(broken, lambda: z, options)
    assert torch.equal(whole.draws[[0, 2]], holed.draws[[0, 2]])
    assert holed.draws.isfinite().all()
    assert (holed.draws[1, :, 1] <= 0.5).all()
    assert holed.stats["diverging"][1].any()


def test_the_funnel_diverges_and_says_so():
    result = sample(funnel, starts(32, 10), Options(warmup=20, draws=10))
    assert result.stats["diverging"].any()


def test_interrupted_chains_are_cut_to_the_shortest():
    calls = 0

    def interrupting(z):
        nonlocal calls
        calls += 1
        if calls == 350:
            raise KeyboardInterrupt
        return schools(z)

    z = torch.randn(4, 10, dtype=torch.float64)
    options = Options(warmup=5, draws=50)
    result = sample(interrupting, lambda: z, options)
    whole = sample(schools, lambda: z, options)
    kept = result.draws.shape[1]
    assert result.interrupted
    assert not whole.interrupted
    assert 0 < kept < 50
    assert torch.equal(result.draws, whole.draws[:, :kept])
    assert all(value.shape == (4, kept) for value in result.stats.values())


def test_a_start_without_density_is_refused():
    z = torch.zeros(3, 2, dtype=torch.float64)
    z[1] = torch.inf
    with pytest.raises(FitError, match=r"start of chain 1 .*init="):
        sample(independent(torch.ones(2, dtype=torch.float64)), lambda: z, Options())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": -1}, "warmup=-1"),
        ({"draws": 0}, "draws=0"),
        ({"thin": 1.5}, r"thin=1\.5"),
        ({"target_accept": 1.0}, r"target_accept=1\.0"),
        ({"step_size": 0.0}, r"step_size=0\.0"),
        ({"rule": Rule(max_tree_depth=0)}, "max_tree_depth=0"),
        ({"rule": Rule(algorithm="gibbs")}, "algorithm='gibbs'"),
        ({"rule": Rule(path_length=0.0)}, r"path_length=0\.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(FitError, match=message):
        Options(**options)
