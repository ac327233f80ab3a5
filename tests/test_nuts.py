import gc
import math
import warnings

import arviz as az
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data
from torch import nn

import pbnn
from pbnn.errors import ConvergenceWarning, FileError, FitError, PbnnWarning
from pbnn.front_door import bind
from pbnn.infer import nuts
from pbnn.infer import starts as starting
from pbnn.infer.density import Density
from pbnn.infer.lanes import STATS, Rule
from pbnn.infer.options import Options
from pbnn.infer.starts import find_starts
from pbnn.inference_data import groups


def fit(model, x, y, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # short runs do not converge
        return pbnn.fit_nuts(model, x, y, progress=False, compile=False, **options)


@pytest.fixture
def toy():
    x = torch.randn(30, 2)
    return Toy(), x, x[:, 0] - x[:, 1] + 0.1 * torch.randn(30)


def test_the_posterior_holds_what_a_nuts_fit_knows(toy):
    model, x, y = toy
    posterior = fit(model, x, y, chains=2, warmup=10, draws=6, max_tree_depth=3)
    assert posterior.method == "nuts"
    assert posterior.markov
    assert tuple(posterior.stats) == STATS
    assert all(value.shape == (2, 6) for value in posterior.stats.values())
    assert posterior.draws["fc1.weight"].shape == (2, 6, 5, 2)
    assert posterior.draws["sigma"].dtype == torch.float32
    record = posterior.provenance
    assert record["options"]["max_tree_depth"] == 3
    assert record["options"]["init"] == "map"
    assert not record["compiled"]
    assert record["compile_rule"] == "as asked"
    assert max(record["leapfrogs"]) <= record["calls"]


def test_the_warmup_is_kept_on_request(toy, tmp_path):
    model, x, y = toy
    options = {"chains": 2, "warmup": 12, "draws": 4, "max_tree_depth": 3}
    plain = fit(model, x, y, **options)
    posterior = fit(model, x, y, keep_warmup=True, checkpoint=tmp_path / "run", **options)
    assert plain.warmup is None
    assert torch.equal(posterior.draws["sigma"], plain.draws["sigma"])
    before = posterior.warmup
    assert (before.chains, before.draws_per_chain) == (2, 12)
    assert before.draws["fc1.weight"].shape == (2, 12, 5, 2)
    assert len(before.stats["step_size"][0].unique()) > 1  # it is being adapted
    density = Density(bind(model, x, y), chains=2, compile=False)
    with torch.no_grad():
        z = density.unconstrain(before.draws)
        lp = torch.stack([density.value_and_grad(z[:, k])[0] for k in range(12)], 1)
    torch.testing.assert_close(lp, before.stats["lp"], rtol=1e-4, atol=1e-3)
    loaded = pbnn.Posterior.load(posterior.save(tmp_path / "a.pt"))
    assert torch.equal(loaded.warmup.draws["sigma"], before.draws["sigma"])
    assert loaded.select(chains=[1]).warmup.chains == 1
    exported = pbnn.to_inference_data(loaded)
    assert {"warmup_posterior", "warmup_sample_stats"} <= set(groups(exported))


def test_lp_is_the_log_joint_on_the_unconstrained_space(toy):  # fault 26
    model, x, y = toy
    posterior = fit(model, x, y, chains=1, warmup=5, draws=3, dtype=torch.float64)
    for draw in range(3):
        values = {name: value[0, draw] for name, value in posterior.draws.items()}
        sigma = values["sigma"]
        hidden = torch.tanh(x.double() @ values["fc1.weight"].T + values["fc1.bias"])
        f = (hidden @ values["fc2.weight"].T + values["fc2.bias"]).squeeze(-1)
        expected = -0.5 * (((y.double() - f) / sigma) ** 2).sum() - 30 * sigma.log()
        weights = torch.cat([v.flatten() for k, v in values.items() if k != "sigma"])
        expected = expected - 0.5 * (weights**2).sum()
        constant = 0.5 * (30 + len(weights)) * math.log(2 * math.pi)
        # HalfNormal(1), and log sigma as the unconstrained value.
        expected = expected - constant + 0.5 * math.log(2 / math.pi) - 0.5 * sigma**2 + sigma.log()
        assert torch.allclose(posterior.stats["lp"][0, draw], expected)


def test_chains_differ_and_seeds_repeat(toy):
    options = {"chains": 3, "warmup": 10, "draws": 5, "max_tree_depth": 3}
    first, again = fit(*toy, seed=1, **options), fit(*toy, seed=1, **options)
    other = fit(*toy, seed=2, **options)
    weight = first.draws["fc1.weight"]
    assert torch.equal(weight, again.draws["fc1.weight"])
    assert not torch.equal(weight, other.draws["fc1.weight"])
    assert not torch.equal(weight[0], weight[1])
    assert not torch.equal(weight[1], weight[2])


def test_chains_of_a_model_that_no_other_process_could_import():  # fault 10
    scale = torch.tensor(2.0)

    class Local(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.w = pyro.nn.PyroSample(lambda _: dist.Normal(0.0, scale))

        def forward(self, x, y=None):
            f = self.w * x
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(f, 1.0), obs=y)
            return f

    x = torch.randn(10)
    posterior = fit(Local(), x, 2 * x, chains=3, warmup=10, draws=5)
    assert posterior.draws["w"].std() > 0


@pytest.mark.parametrize("algorithm", ["nuts", "hmc"])
def test_a_run_that_failed_is_loud(toy, algorithm):  # fault 11
    with pytest.warns(ConvergenceWarning) as told:
        pbnn.fit_nuts(
            *toy,
            chains=2,
            warmup=20,
            draws=20,
            max_tree_depth=4,
            algorithm=algorithm,
            progress=False,
        )
    text = " ".join(str(warning.message) for warning in told)
    assert "max_tree_depth=4" in text or "R-hat" in text or "diverged" in text


def verdict(**changes):
    stats = {
        "diverging": torch.zeros(4, 100, dtype=torch.bool),
        "reached_max_treedepth": torch.zeros(4, 100, dtype=torch.bool),
        "acceptance_rate": torch.full((4, 100), 0.85),
        "lp": torch.randn(4, 100),
    }
    return nuts.verdict({**stats, **changes}, Options(rule=Rule(max_tree_depth=7)))


def test_the_verdict_names_each_fault_with_its_number():
    assert verdict() == []
    flags = torch.zeros(4, 100, dtype=torch.bool)
    flags[0, :7] = True
    assert "7 of 400 transitions diverged" in verdict(diverging=flags)[0]
    assert (
        "7 of 400 trajectories ended at max_tree_depth=7" in verdict(reached_max_treedepth=flags)[0]
    )
    assert "mean acceptance 0.41" in verdict(acceptance_rate=torch.full((4, 100), 0.41))[0]
    apart = torch.randn(4, 100) + 3 * torch.arange(4.0)[:, None]
    assert "R-hat of the log density" in verdict(lp=apart)[0]
    assert "R-hat" in verdict(lp=torch.randn(4, 3))[0]
    still = torch.zeros(4, 100)
    assert "R-hat" in verdict(lp=still)[0]


def test_five_draws_never_pass_for_converged():
    """R-hat alone lets one run in some through (fault 11)."""
    found = [verdict(lp=torch.randn(10, 5)) for _ in range(50)]
    assert all(len(messages) == 1 for messages in found)
    assert any("effective sample size of the log density is" in told for (told,) in found)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, -0.5])
def test_effective_sizes_are_those_of_arviz(correlation):
    noise = torch.randn(4, 500, dtype=torch.float64)
    lp = noise.clone()
    for k in range(1, 500):
        lp[:, k] = correlation * lp[:, k - 1] + noise[:, k]
    expected = float(az.ess(lp.numpy(), method="mean"))
    # ArviZ adds half a pair where the sequence is cut, of the size of the noise there.
    assert nuts._effective_size(lp) == pytest.approx(expected, rel=0.05)


def test_parameters_without_a_prior_are_refused_unless_given():
    class Half(Linear):
        def __init__(self):
            super().__init__(2)
            self.bias = nn.Parameter(torch.tensor(0.5))

        def forward(self, x, y=None):
            return super().forward(x, None if y is None else y - self.bias)

    x, y = linear_data(20, 2)
    with pytest.raises(FitError, match=r"bias.*constants=fit_svi"):
        fit(Half(), x, y, chains=1, warmup=5, draws=5)
    posterior = fit(
        Half(), x, y, chains=1, warmup=5, draws=5, constants={"bias": torch.tensor(0.25)}
    )
    assert float(posterior.constants["bias"]) == 0.25


@pytest.mark.parametrize("init", ["prior", "map", "svi"])
def test_starts_are_finite_differ_by_chain_and_repeat(toy, init, monkeypatch):
    monkeypatch.setattr(starting, "_SVI_STEPS", 100)
    model, x, y = toy
    density = Density(bind(model, x, y), chains=3, compile=False)
    with torch.no_grad():
        starts = find_starts(density, init, model, 3, 5)
        assert starts.shape == (3, density.dim)
        assert density.value_and_grad(starts)[0].isfinite().all()
        assert not torch.equal(starts[0], starts[1])
        assert torch.equal(starts, find_starts(density, init, model, 3, 5))
        prior = density.value_and_grad(find_starts(density, "prior", model, 3, 5))[0]
        if init != "prior":
            assert (density.value_and_grad(starts)[0] > prior).all()


def test_starts_can_be_given(toy):
    model, x, y = toy
    bound = bind(model, x, y)
    density = Density(bound, chains=2, compile=False)
    with torch.no_grad():
        z = density.initial_prior(2, 0)
        values = density.constrain(z)
        assert torch.equal(find_starts(density, z, model, 2, 0), z)
        assert torch.allclose(find_starts(density, values, model, 2, 0), z, atol=1e-5)
        one = {name: value[0] for name, value in values.items()}
        assert torch.allclose(find_starts(density, one, model, 2, 0), z[[0, 0]], atol=1e-5)
        for wrong, message in (
            ("best", "init='best'; expected one of prior, map, svi"),
            (z[:, 1:], r"init has shape \(2, 21\)"),
            ({"sigma": one["sigma"]}, "no values for site 'fc1.weight'"),
            ({**values, "sigma": torch.ones(3)}, r"init\['sigma'\] has shape \(3,\)"),
        ):
            with pytest.raises(FitError, match=message):
                find_starts(density, wrong, model, 2, 0)


def test_a_checkpoint_of_other_data_is_refused(toy, tmp_path):
    model, x, y = toy
    options = {"chains": 2, "warmup": 5, "draws": 4, "max_tree_depth": 2, "checkpoint": tmp_path}
    first = fit(model, x, y, **options)
    again = fit(model, x, y, resume=True, **options)
    assert torch.equal(first.draws["sigma"], again.draws["sigma"])
    with pytest.raises(FileError, match="data is"):
        fit(model, x, y + 1, resume=True, **options)


def test_ctrl_c_keeps_the_draws_so_far(toy, monkeypatch):
    take = nuts.Engine.advance
    blocks = 0

    def advance(self, *arguments):
        nonlocal blocks
        blocks += 1
        if blocks == 12:
            raise KeyboardInterrupt
        take(self, *arguments)

    monkeypatch.setattr(nuts.Engine, "advance", advance)
    with pytest.warns(PbnnWarning, match="interrupted: [0-9]+ of 500 draws"):
        posterior = fit(*toy, chains=2, warmup=5, draws=500, max_tree_depth=2)
    assert 0 < posterior.draws_per_chain < 500
    assert posterior.provenance["interrupted"]
    blocks = 11
    with pytest.raises(KeyboardInterrupt, match="before all chains had a draw"):
        fit(*toy, chains=2, warmup=5, draws=500, max_tree_depth=2)


def test_the_caller_and_its_model_stay_as_they_were(toy):
    model, x, y = toy
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, data = torch.get_rng_state(), (x.clone(), y.clone())
    fit(model, x, y, chains=2, warmup=5, draws=5, max_tree_depth=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(x, data[0])
    assert torch.equal(y, data[1])
    assert model.training


@pytest.mark.parametrize("fits", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_fits_in_a_row_do_not_grow_in_memory(toy, fits):  # fault 12
    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * 4096 / 2**20

    options = {"chains": 2, "warmup": 4, "draws": 4, "max_tree_depth": 2}
    for seed in range(2):
        fit(*toy, seed=seed, **options)
    before = resident()
    for seed in range(fits):
        fit(*toy, seed=seed, **options)
    assert resident() - before < 50


@pytest.mark.parametrize("rows", [0, -1])
def test_a_run_without_chains_is_refused(toy, rows):
    with pytest.raises(FitError, match=f"chains={rows}"):
        fit(*toy, chains=rows)
