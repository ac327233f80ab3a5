"""What a fit says about itself, against closed forms, and the warnings that it must give."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Linear, Toy, linear_data, prior_posterior, set_priors
from pyro.infer.autoguide import AutoContinuous, AutoMultivariateNormal
from pyro.nn import PyroModule, PyroParam
from test_contract import MODELS, fitted, problem
from torch import nn

from pbnn import fit_svi, to_inference_data
from pbnn.errors import ConvergenceWarning, ModelError
from pbnn.evaluate.svi_report import svi_report
from pbnn.infer.guides import dense_moments

QUIET = {"progress": False, "early_stopping": False}


def fit(model, data, **options):
    return fit_svi(model, *data, **{**QUIET, "steps": 30, "draws": 250, **options})


@pytest.mark.parametrize("guide", ["normal", AutoMultivariateNormal])
def test_terms_are_the_closed_form(guide):
    """A linear model: both terms of the ELBO within 4 standard errors of their means over draws."""
    model, data = Linear(3), linear_data(40, 3, correlation=0.5)
    posterior = fit(model, data, guide=guide, steps=200, lr=0.05)
    report = svi_report(posterior, model, *data)
    mean, covariance, _ = dense_moments(posterior.approximation)
    likelihood, kl = model.elbo(*data, mean.double(), covariance.double())
    error = float(report.observed.loc["y", "error"])
    assert abs(report.expected_log_likelihood - likelihood) < 4 * error
    covariance = covariance.double()
    assert report.kl == pytest.approx(kl, rel=1e-5)
    assert report.elbo == pytest.approx(report.expected_log_likelihood - report.kl)
    assert report.kl_share == pytest.approx(report.kl / (report.kl + abs(likelihood)), rel=0.1)
    assert report.kl_weight == 1
    assert report.correlation_kl == pytest.approx(0.0, abs=1e-6)  # a single site
    values = torch.linalg.eigvalsh(covariance).flip(0)
    assert report.eigenvalues == pytest.approx(values.tolist())
    assert report.effective_rank == pytest.approx(float(values.sum() ** 2 / values.square().sum()))
    # f is linear, so that the linearised variance is the exact one.
    x = data[0].double()
    total = torch.tensor(report.variance["total"].to_numpy())
    torch.testing.assert_close(total, (x @ covariance * x).sum(1))


def normal_kl(mean, scale):
    """Return the KL divergence of independent Normals from N(0, 1)."""
    return float(0.5 * (mean.square() + scale.square() - 1).sum() - scale.log().sum())


def test_sites_and_layers(toy):
    posterior = fit(Toy(), toy, init_scale=0.3)
    report = svi_report(posterior, Toy(), *toy)
    tensors = posterior.approximation["tensors"]
    sizes = [torch.Size(shape).numel() for _, shape in posterior.approximation["sites"]]
    means, scales = tensors["loc"].split(sizes), tensors["scale"].split(sizes)
    names = [name for name, _ in posterior.approximation["sites"]]
    assert list(report.sites.index) == names
    for name, mean, scale in zip(names[:4], means, scales, strict=False):
        row = report.sites.loc[name]
        assert row["kl"] == pytest.approx(normal_kl(mean, scale), rel=1e-5)
        assert row["scale_ratio"] == pytest.approx(float(scale.median()), rel=1e-5)
        assert row["smallest_scale"] == pytest.approx(float(scale.min()), rel=1e-5)
        assert row["values"] == len(mean)
    assert list(report.layers.index) == ["fc1", "fc2", "(top)"]
    joined = report.sites.groupby("layer")["kl"].sum()
    assert report.layers.loc["fc1", "kl"] == pytest.approx(joined["fc1"])
    assert report.layers["kl_share"].sum() == pytest.approx(1.0)
    # log sigma under HalfNormal(1) has the scale of log |N(0, 1)|, pi / sqrt(8); 400 draws.
    prior = torch.pi / 8**0.5
    found = float(scales[-1]) / report.sites.loc["sigma", "scale_ratio"]
    assert found == pytest.approx(prior, rel=4 * (1.5 / 400) ** 0.5)


def test_correlations_between_sites_are_told_apart(toy):
    posterior = fit(Toy(), toy, guide=AutoMultivariateNormal, steps=150, lr=0.03)
    report = svi_report(posterior, Toy(), *toy)
    _, covariance, names = dense_moments(posterior.approximation)
    covariance = covariance.double()
    sizes = [torch.Size(dict(posterior.approximation["sites"])[name]).numel() for name in names]
    start, apart = 0, 0.0
    for size in sizes:
        part = slice(start, start + size)
        apart += float(covariance[part, part].logdet())
        start += size
    assert report.correlation_kl == pytest.approx(0.5 * (apart - float(covariance.logdet())))
    assert report.correlation_kl > 0.1
    assert (report.variance["cross"] != 0).all()


class AutoLaplace(AutoContinuous):
    """Independent Laplace distributions on the unconstrained space."""

    def _setup_prototype(self, *args, **kwargs):
        super()._setup_prototype(*args, **kwargs)
        self.loc = nn.Parameter(self._init_loc())
        self.width = PyroParam(torch.full_like(self.loc, 0.1), dist.constraints.positive)

    def get_posterior(self, *args, **kwargs):
        return dist.Laplace(self.loc, self.width).to_event(1)


def test_a_guide_that_is_not_gaussian_has_the_parts_that_it_can(toy):
    posterior = fit(Toy(), toy, guide=AutoLaplace)
    report = svi_report(posterior, Toy(), *toy)
    assert report.variance is None
    assert report.eigenvalues == ()
    assert report.sites["kl"].isna().all()
    assert report.sites["scale_ratio"].notna().all()
    lp, log_q = (posterior.stats[name].double() for name in ("lp", "log_q"))
    assert report.elbo == pytest.approx(float((lp - log_q).mean()), abs=5.0)
    assert "guide AutoLaplace" in str(report)


def test_a_flat_prior_is_infinitely_wide(toy):
    def model(x, y=None):
        w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
        f = x @ w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f

    posterior = fit(model, toy, init={"w": torch.tensor([1.0, -1.0])})
    report = svi_report(posterior, model, *toy)
    assert report.sites.loc["w", "scale_ratio"] == 0.0
    assert report.layers.loc["(top)", "at_prior"] == 0.0
    assert len(report.variance) == 30


def test_a_model_without_rows(toy):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)
        return x @ w

    report = svi_report(fit(model, toy), model, *toy)
    assert report.variance is None
    assert report.signal != report.signal
    assert report.sites.loc["w", "kl"] > 0
    assert "KL" in str(report)


def test_readable(toy):
    posterior = fit(Toy(), toy, guide="lowrank", rank=2)
    text = str(svi_report(posterior, Toy(), *toy))
    for part in ("ELBO", "KL", "Pareto k", "effective rank", "signal", "fc1.weight", "covariances"):
        assert part in text


# Warnings.


def test_a_weight_of_the_kl_is_told(toy):
    posterior = fit(Toy(), toy, kl_weight=0.1, steps=50)
    exported = to_inference_data(posterior, model=Toy(), x=toy[0], y=toy[1])
    assert "the KL divergence has weight 0.1, not 1" in exported.attrs["pbnn_provenance"]
    report = svi_report(posterior, Toy(), *toy)
    assert report.kl_weight == 0.1
    assert "the KL divergence has weight 0.1, not 1" in str(report)
    assert report.kl_share < report.kl / (report.kl + abs(report.expected_log_likelihood))


def test_what_the_fit_warned_of_is_told_again(toy):
    with pytest.warns(ConvergenceWarning, match="had not levelled off"):
        posterior = fit(Toy(), toy, early_stopping=True)
    report = svi_report(posterior, Toy(), *toy)
    assert "the ELBO had not levelled off after 30 steps" in report.warnings[0]
    assert str(report).startswith("warning: the ELBO had not")


class Idle(PyroModule):
    """A linear model beside a layer that as good as does not act."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = PyroModule[nn.Linear](2, 1), PyroModule[nn.Linear](2, 3)
        set_priors(self.used), set_priors(self.idle)

    def forward(self, x, y=None):
        f = self.used(x).squeeze(-1) + 1e-4 * self.idle(x).sum(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)
        return f


def test_a_layer_that_stays_at_its_prior_is_told(toy):
    posterior = fit(Idle(), toy, steps=1_200, lr=0.05)
    report = svi_report(posterior, Idle(), *toy)
    assert report.warnings == ("layer 'idle' stays at its prior: the data say nothing to it",)
    assert report.layers.loc["idle", "scale_ratio"] == pytest.approx(1.0, abs=0.05)


def gap_sine():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(2, 30, generator=generator)
    x = torch.cat([left - 2.0, right + 1.0])
    return x[:, None], torch.sin(2.0 * x) + 0.2 * torch.randn(60, generator=generator)


def underfitting(width, **options):
    model, data = Toy(hidden=width, in_features=1), gap_sine()
    report = svi_report(fit(model, data, **options), model, *data)
    return report, [w for w in report.warnings if "mean field underfits" in w]


def test_width_that_makes_mean_field_underfit_is_told():  # fault 17
    """The three parts that tell why stand apart: likelihood, KL, and scales over the prior's."""
    narrow, silent = underfitting(5, steps=600, lr=0.03)
    wide, told = underfitting(300, steps=600, lr=0.03)
    assert silent == []
    assert len(told) == 1
    assert wide.expected_log_likelihood < narrow.expected_log_likelihood - 50
    assert wide.layers.loc["fc1", "scale_ratio"] > 1.5 * narrow.layers.loc["fc1", "scale_ratio"]
    assert wide.signal < 0.1 < 0.8 < narrow.signal


@pytest.mark.slow
def test_mean_field_underfits_more_and_more_with_width():  # fault 17
    reports = [underfitting(width, steps=3_000) for width in (5, 50, 500)]
    likelihoods = [report.expected_log_likelihood for report, _ in reports]
    assert likelihoods == sorted(likelihoods, reverse=True)
    ratios = [report.layers.loc["fc1", "scale_ratio"] for report, _ in reports]
    assert ratios == sorted(ratios)
    assert [len(told) for _, told in (reports[0], reports[-1])] == [0, 1]


# What is refused.


def test_draws_of_no_guide_are_refused(toy):
    with pytest.raises(ModelError, match="svi_report is for fit_svi"):
        svi_report(prior_posterior(Toy(), *toy, chains=2, markov=True), Toy(), *toy)


def test_other_rows_than_those_of_the_fit_are_refused(toy):
    posterior = fit(Toy(), toy)
    with pytest.raises(ModelError, match="pass the model, x and y that were fitted"):
        svi_report(posterior, Toy(), toy[0][:20], toy[1][:20])


@pytest.mark.parametrize("guide", ["normal", "lowrank", "kronecker"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_model_file_and_guide_has_a_report(path, guide):
    model, x, y = problem(path)
    posterior = fitted(path, guide, seed=3)
    report = svi_report(posterior, model, x, y)
    outputs = model(x).reshape(len(x), -1).shape[1]
    assert len(report.variance) == len(x) * outputs
    assert list(report.sites.index) == list(posterior.draws)
    assert report.kl > 0
    assert report.khat != report.khat  # ten draws have no tail
    assert "ELBO" in str(report)
