"""Rules of priors against closed forms; patterns, shared and recurrent parameters on any module."""

import math
import re
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from scipy import integrate, stats
from torch import nn

import pbnn
from pbnn import priors
from pbnn.errors import ModelError
from pbnn.front_door import bind
from pbnn.infer.guides.sites import is_real
from pbnn.model import isolated

RULES = {
    "normal": priors.normal(),
    "laplace": priors.laplace(),
    "student_t": priors.student_t(),
    "spike_and_slab": priors.spike_and_slab(),
    "pretrained": priors.pretrained(),
    "layer_scale": priors.layer_scale(),
    "layer_scale, centred": priors.layer_scale(centred=True),
    "ard": priors.ard(),
    "horseshoe": priors.horseshoe(),
    "regularised_horseshoe": priors.regularised_horseshoe(),
}


class Regression(PyroModule):
    """Normal noise of scale 0.5 about a network of one output."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, y=None):
        f = self.network(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f


def perceptron():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def random(module):
    """Return the latent and deterministic sites of one run, by name."""
    with isolated():
        nodes = poutine.trace(module).get_trace(torch.ones(2, 3)).nodes
    return {n: v for n, v in nodes.items() if v["type"] == "sample" and n not in ("data", "y")}


def prior_of(rule, module=None, name="weight"):
    """Return the distribution that a rule gives to a parameter of a lone module."""
    module = module or nn.Linear(3, 4)
    priors.place_priors(module, {name: rule}, constants="*" if len(module._parameters) > 1 else ())
    return module._pyro_samples[name]


# Patterns.


def test_the_first_pattern_that_matches_wins():
    model = Regression(perceptron())
    priors.place_priors(
        model,
        {"*.0.weight": priors.laplace(), "*.weight": priors.normal(), "*": dist.Normal(0.0, 2.0)},
    )
    kinds = {name: type(site["fn"].base_dist).__name__ for name, site in random(model).items()}
    assert kinds == {
        "network.0.weight": "Laplace",
        "network.0.bias": "Normal",
        "network.2.weight": "Normal",
        "network.2.bias": "Normal",
    }
    scales = {name: site["fn"].base_dist.stddev.unique() for name, site in random(model).items()}
    assert scales["network.0.bias"].tolist() == [2.0]
    assert scales["network.2.weight"].tolist() == [0.5]  # fan in 4


@pytest.mark.parametrize(
    ("patterns", "constants", "message"),
    [
        (
            {"*.weight": priors.normal()},
            (),
            "parameter '0.bias' matches none of the patterns ['*.weight']; give it a prior, or "
            "name it in constants=",
        ),
        (
            {"*": priors.normal(), "head.*": priors.normal()},
            (),
            "pattern 'head.*' takes nothing: expected a name or pattern among ['0.weight', "
            "'0.bias', '2.weight', '2.bias']",
        ),
        (
            {"*": priors.normal()},
            ("2.*",),
            "pattern '2.*' takes nothing: ['2.weight', '2.bias'] went to patterns before it, or "
            "are random already, where exact names alone give another prior",
        ),
        (
            {"*": dist.Normal(torch.zeros(2), 1.0)},
            (),
            "prior Normal of shape (2,) does not fit parameter '0.weight' of shape (4, 3); give it "
            "numbers, such as dist.Normal(0.0, 1.0), or the parameter's own shape",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_told(patterns, constants, message):
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        priors.place_priors(perceptron(), patterns, constants=constants)


def test_constants_stay_parameters_and_random_attributes_can_get_another_prior():
    model = Regression(perceptron())
    priors.place_priors(model, {"network.2.*": priors.normal()}, constants="network.0.*")
    assert [name for name, _ in model.named_parameters()] == ["network.0.weight", "network.0.bias"]
    priors.place_priors(model, {"network.2.bias": priors.laplace()}, constants="network.0.*")
    assert list(random(model)) == ["network.2.weight", "network.2.bias"]
    assert isinstance(random(model)["network.2.bias"]["fn"].base_dist, dist.Laplace)
    # A wide pattern leaves alone what is random already: it may be a scale.
    priors.place_priors(model, {"*": priors.student_t()})
    assert isinstance(random(model)["network.2.bias"]["fn"].base_dist, dist.Laplace)
    assert isinstance(random(model)["network.0.bias"]["fn"].base_dist, dist.StudentT)


def test_a_distribution_of_the_parameters_own_shape_is_one_event():
    model = Regression(perceptron())
    own = dist.Normal(torch.ones(4, 3), 0.1).to_event(1)
    priors.place_priors(model, {"*.0.weight": own, "*": priors.normal()})
    assert random(model)["network.0.weight"]["fn"].event_shape == (4, 3)


def test_the_table_says_what_is_random_computed_and_constant():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    priors.place_priors(
        network,
        {"0.weight": priors.layer_scale(), "2.*": priors.normal(), "0.bias": dist.Normal(0.0, 3.0)},
        constants="1.*",
    )
    rows = [line.split(None, 2) for line in priors.describe_priors(network).splitlines()]
    assert [row[:2] for row in rows] == [
        ["name", "kind"],
        ["0.weight_scale", "random"],
        ["0.weight_raw", "random"],
        ["0.weight", "computed"],
        ["0.bias", "random"],
        ["2.weight", "random"],
        ["2.bias", "random"],
        ["1.weight", "constant"],
        ["1.bias", "constant"],
        ["1.running_mean", "buffer"],
        ["1.running_var", "buffer"],
        ["1.num_batches_tracked", "buffer"],
    ]
    assert rows[4][2].split(None, 1) == ["(4,)", "Normal(loc=0, scale=3)"]
    assert rows[3][2].endswith("from other sites")


# Modules of all kinds.


@pytest.mark.parametrize(
    ("module", "name", "fan_in"),
    [
        (nn.Linear(3, 4), "weight", 3),
        (nn.Linear(3, 4), "bias", 1),
        (nn.Conv2d(6, 4, (3, 5), groups=2), "weight", 3 * 15),
        (nn.ConvTranspose2d(6, 4, (3, 5), groups=2), "weight", 3 * 15),
        (nn.Embedding(7, 2), "weight", 1),
        (nn.GRU(3, 4), "weight_ih_l0", 3),
        (nn.LSTM(3, 4), "weight_hh_l0", 4),
    ],
)
def test_fan_in_is_the_number_of_inputs_of_one_output(module, name, fan_in):
    prior = prior_of(priors.normal(2.0), module, name)
    assert prior.base_dist.scale.unique().item() == pytest.approx(2 / fan_in**0.5)
    assert prior.event_shape == prior.sample().shape


def test_fan_in_keeps_the_scale_of_a_grouped_and_a_transposed_convolution():
    """Outputs of N(0, 1) inputs have variance 1 inside the image."""
    for module in (nn.Conv2d(6, 4, (3, 5), groups=2), nn.ConvTranspose2d(6, 4, (3, 5), groups=2)):
        priors.place_priors(module, {"weight": priors.normal()}, constants="bias")
        with isolated(0), torch.no_grad():
            module.bias.zero_()
            out = torch.cat([module(torch.randn(50, 6, 9, 11))[..., 4, 6] for _ in range(40)])
        # 160 draws of 45 weights make sqrt(2 / 45 / 160), 8,000 outputs sqrt(2 / 8000); 4 of both.
        error = (2 / 45 / 160 + 2 / 8000) ** 0.5
        assert out.var().item() == pytest.approx(1.0, abs=4 * error)


def test_nested_and_sliced_module_lists_keep_their_names():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            pairs = [nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2)]
            self.blocks = nn.ModuleList(pairs)
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            for pair in self.blocks[1:]:
                for layer in pair[::-1]:
                    x = layer(x).tanh()
            return self.head(x)

    model = Regression(Nested())
    priors.place_priors(model, {"network.blocks.1.*": priors.normal(), "*": priors.laplace()})
    first = [name for name in random(model) if name.startswith("network.blocks")]
    assert first[:2] == ["network.blocks.1.1.weight", "network.blocks.1.1.bias"]
    assert first[2:] == ["network.blocks.1.0.weight", "network.blocks.1.0.bias"]
    assert list(random(model)) == [*first, "network.head.weight", "network.head.bias"]


def test_a_shared_parameter_is_one_site():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(self.encode(x)).sum(-1, keepdim=True)

    model = priors.place_priors(Regression(Tied()), {"*": priors.normal()})
    x = torch.randn(5, 3)
    sites = pbnn.check_model(model, x, x[:, 0]).set_index("site")["kind"]
    assert sites["network.encode.weight"] == "latent"
    assert sites["network.decode.weight"] == "deterministic"
    # The copy that a fit makes reads its own site, not the caller's module.
    bound = bind(model, x, x[:, 0])
    nodes = bound.run({"network.encode.weight": torch.eye(3)}).nodes
    assert torch.equal(nodes["network.decode.weight"]["value"], torch.eye(3))


def test_a_module_in_two_places_is_one_set_of_sites():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.again = self.layer

        def forward(self, x):
            return self.again(self.layer(x).tanh()).sum(-1, keepdim=True)

    model = priors.place_priors(Regression(Twice()), {"network.again.*": priors.normal()})
    assert list(random(model)) == ["network.again.weight", "network.again.bias"]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_draws_of_a_recurrent_layer_differ_and_every_site_acts(kind):
    """Fault 6."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(2, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0][:, -1].sum(-1, keepdim=True)

    model = priors.place_priors(Regression(Recurrent()), {"*": priors.normal()})
    x = torch.randn(6, 3, 2)
    assert not torch.equal(model(x), model(x))
    bind(model, x, x[:, 0, 0])  # warns of a site that does not act on the data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_priors_follow_the_dtype_of_the_fit_and_of_the_module(rule, dtype):
    x = torch.randn(5, 3)
    for module in (perceptron(), perceptron().to(dtype)):
        model = Regression(module)
        priors.place_priors(model, {"*.weight": rule, "*.bias": dist.Normal(0.0, 1.0)})
        bound = bind(model, x, x[:, 0], dtype=dtype)
        nodes = bound.run({}).nodes
        assert {nodes[name]["value"].dtype for name in bound.named("latent")} == {dtype}


# Rules.


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (priors.normal(0.6), stats.norm(scale=0.6 / 3**0.5)),
        (priors.laplace(0.6), stats.laplace(scale=0.6 / 6**0.5)),
        (priors.student_t(0.6, df=5.0), stats.t(5, scale=0.6 * (3 / 5) ** 0.5 / 3**0.5)),
    ],
)
def test_log_density_and_scale_are_those_of_scipy(rule, expected):
    prior = prior_of(rule)
    w = torch.randn(4, 3)
    assert prior.log_prob(w).item() == pytest.approx(expected.logpdf(w.numpy()).sum(), rel=1e-5)
    assert prior.stddev.flatten()[0].item() == pytest.approx(0.6 / 3**0.5, rel=1e-5)
    assert expected.std() == pytest.approx(0.6 / 3**0.5)


def test_pretrained_priors_are_about_the_values_that_are_there():
    module = nn.Linear(3, 4)
    value = module.weight.detach().clone()
    prior = prior_of(priors.pretrained(0.3), module)
    assert torch.equal(prior.base_dist.loc, value)
    assert prior.stddev.unique().item() == pytest.approx(0.3 / 3**0.5)


def test_spike_and_slab_is_a_mixture_in_log_space():
    prior = prior_of(priors.spike_and_slab(1.0, spike=0.01, share=0.3))
    slab, spike = (stats.norm(scale=s / 3**0.5) for s in (1.0, 0.01))
    for value in (0.0, 0.003, 0.5):
        expected = math.log(0.3 * slab.pdf(value) + 0.7 * spike.pdf(value))
        found = prior.log_prob(torch.full((4, 3), value)).item() / 12
        assert found == pytest.approx(expected, rel=1e-5)
    # Where exp underflows, the slab alone is left.
    far = prior.log_prob(torch.full((4, 3), 30.0)).item() / 12
    assert far == pytest.approx(slab.logpdf(30.0) + math.log(0.3), rel=1e-5)
    assert is_real(prior.support)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: priors.normal(0.0), "scale is 0.0; expected a positive number"),
        (lambda: priors.student_t(df=2.0), "df is 2.0; expected more than 2"),
        (lambda: priors.spike_and_slab(share=1.0), "share is 1.0; expected a number between 0 and"),
        (lambda: priors.sparse_scale(10, 10, 100), "relevant is 10; expected a number between"),
        (lambda: prior_of(priors.ard(), name="bias"), "ard() is for weights with inputs; 'bias'"),
    ],
)
def test_arguments_out_of_range_are_told(make, message):
    with pytest.raises(ModelError, match=f"^{re.escape(message)}"):
        make()


def drawn(rule, module, draws):
    """Return draws of a weight and of the sites that its prior is made of."""
    priors.place_priors(module, {"weight": rule})
    parts = module._pyro_samples
    given = {k: prior.sample((draws,)) for k, prior in parts.items() if hasattr(prior, "sample")}

    def weight(values):
        value = parts["weight"](SimpleNamespace(**values))
        return value if isinstance(value, torch.Tensor) else value.sample()

    return {**given, "weight": torch.vmap(weight, randomness="different")(given)}


def test_layer_scale_is_one_prior_in_two_forms():
    both = [
        drawn(priors.layer_scale(0.7, centred=centred), nn.Linear(3, 1, bias=False), 2000)
        for centred in (False, True)
    ]
    for sites in both:
        assert sites["weight_scale"].mean().item() == pytest.approx(
            0.7 * (2 / math.pi) ** 0.5, abs=4 * 0.7 * 0.61 / 2000**0.5
        )
    assert torch.allclose(
        both[0]["weight"],
        both[0]["weight_raw"] * both[0]["weight_scale"][:, None, None] / 3**0.5,
    )
    first, second = (sites["weight"][:, 0, 0].numpy() for sites in both)
    assert stats.ks_2samp(first, second).pvalue > 0.001


def test_the_horseshoe_shrinks_by_a_beta_of_halves():
    """With unit noise and τ = 1 the weight on 0 is κ = 1 / (1 + λ²) ~ Beta(½, ½)."""
    sites = drawn(priors.horseshoe(), nn.Linear(3, 1, bias=False), 2000)
    kappa = 1 / (1 + sites["weight_local"].double().square())
    assert stats.kstest(kappa.flatten(), stats.beta(0.5, 0.5).cdf).pvalue > 0.001
    tau = sites["weight_global"]
    assert stats.kstest(tau, stats.halfcauchy(scale=1 / 3**0.5).cdf).pvalue > 0.001
    product = tau[:, None, None] * sites["weight_local"] * sites["weight_raw"]
    assert torch.allclose(sites["weight"], product)


def test_the_horseshoe_leaves_large_weights_alone():
    """E[w | y] of one weight with unit noise, τ and λ integrated out, against quadrature."""
    w = drawn(priors.horseshoe(), nn.Linear(1, 1, bias=False), 40_000)["weight"].flatten().double()

    def expected(y):
        # s = τ λ has density 4 / π² · log s / (s² − 1); y given s is N(0, 1 + s²).
        def prior(s):
            return math.log(s) / (s * s - 1) if abs(s - 1) > 1e-6 else 0.5

        def part(s, power):
            share = (s * s / (1 + s * s)) ** power
            return prior(s) * stats.norm.pdf(y, scale=math.hypot(1, s)) * share

        ends = ((0, 1), (1, 20), (20, math.inf))
        total = [sum(integrate.quad(part, *e, args=(p,))[0] for e in ends) for p in (0, 1)]
        return y * total[1] / total[0]

    for y in (0.5, 2.0, 5.0):
        weights = torch.exp(-0.5 * (y - w).square())
        mean = (weights * w).sum() / weights.sum()
        error = (weights * (w - mean)).square().sum().sqrt() / weights.sum()
        assert mean.item() == pytest.approx(expected(y), abs=4 * error.item())
    assert expected(5.0) > 0.9 * 5.0
    assert expected(0.5) < 0.5 * 0.5


def test_the_regularised_horseshoe_is_its_formula_and_does_not_overflow():
    rule = priors.regularised_horseshoe(0.5, slab=2.0, slab_df=6.0)
    sites = drawn(rule, nn.Linear(3, 1, bias=False), 500)
    tau, v = (sites[name][:, None, None] for name in ("weight_global", "weight_slab"))
    c = 2.0 / 3**0.5 * v.sqrt()
    lam = sites["weight_local"]
    scale = tau * (c**2 * lam**2 / (c**2 + tau**2 * lam**2)).sqrt()
    assert torch.allclose(sites["weight"], scale * sites["weight_raw"], rtol=1e-4)
    assert stats.kstest(sites["weight_slab"], stats.invgamma(3, scale=3).cdf).pvalue > 0.001
    module = priors.place_priors(nn.Linear(3, 1, bias=False), {"weight": rule})
    values = {
        "weight_global": torch.tensor(1e20),
        "weight_local": torch.full((1, 3), 1e15),
        "weight_raw": torch.ones(1, 3),
        "weight_slab": torch.tensor(1.0),
    }
    with poutine.condition(data=values):
        assert module(torch.ones(1, 3)).item() == pytest.approx(3 * 2.0 / 3**0.5)


def test_sparse_scale_is_the_recommended_one():
    assert priors.sparse_scale(5, 105, 400, noise=2.0) == pytest.approx(5 / 100 * 2 / 20)


def test_ard_shares_one_scale_among_the_weights_of_an_input():
    sites = drawn(priors.ard(), nn.Linear(3, 1, bias=False), 2000)
    assert sites["weight_relevance"].shape == (2000, 1, 3)
    relevance = sites["weight_relevance"][:, 0, 0]
    assert stats.kstest(relevance, stats.halfcauchy(scale=1 / 3**0.5).cdf).pvalue > 0.001
    assert torch.allclose(sites["weight"], sites["weight_relevance"] * sites["weight_raw"])
    conv = priors.place_priors(nn.Conv2d(2, 4, 3), {"weight": priors.ard()}, constants="bias")
    assert conv._pyro_samples["weight_relevance"].event_shape == (1, 2, 1, 1)
    transposed = nn.ConvTranspose2d(2, 4, 3)  # inputs come first in its weight
    priors.place_priors(transposed, {"weight": priors.ard()}, constants="bias")
    assert transposed._pyro_samples["weight_relevance"].event_shape == (2, 1, 1, 1)
    assert transposed.weight.shape == (2, 4, 3, 3)


def test_a_prior_of_ones_own_is_a_function_of_the_target():
    def fixed(target):
        shape, n = target.shape, target.value.ndim
        return {"": dist.Normal(target.number(0.0), 1.0).expand(shape).to_event(n)}

    model = Regression(perceptron())
    priors.place_priors(model, {"*.bias": fixed, "*.weight": priors.normal()})
    assert isinstance(model.network[0]._pyro_samples["bias"].base_dist, dist.Normal)
    model.extra = PyroSample(dist.HalfNormal(1.0))
    priors.place_priors(model, {"extra": dist.HalfNormal(2.0)})
    assert model._pyro_samples["extra"].scale.item() == 2.0
