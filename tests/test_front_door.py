"""The front door: each fault refused with the line that mends it, and what is right let through."""

import re

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy, set_priors
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn
from torch.nn.functional import dropout

from pbnn import check_model
from pbnn.errors import DataError, ModelError, PbnnWarning
from pbnn.front_door import bind, target_kind
from pbnn.model import isolated


def weights(columns=2):
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([columns]).to_event(1))


def refused(message, model, x, y=None, error=ModelError, **options):
    with pytest.raises(error) as caught:
        bind(model, x, y, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert message in text, text


def observed(build, outputs=1):
    """Return a model that observes what `build` makes of a linear f(x)."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, outputs]).to_event(2))
        f = (x @ w).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", build(f), obs=y)
        return f

    return model


normal = observed(lambda f: dist.Normal(f, 1.0))

# Shapes: faults 1, 2 and 5 of the list, and what is right.


def test_toy_passes_and_nothing_changes(toy, unchanged):
    model = Toy()
    with unchanged(model):
        table = check_model(model, *toy)
    assert table["site"].tolist() == [
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
        "sigma",
        "y",
    ]
    assert table["kind"].tolist() == ["latent"] * 5 + ["observed"]
    assert table["shape"].tolist() == [(5, 2), (5,), (1, 5), (1,), (), (30,)]
    assert table["prior"].tolist() == ["Normal"] * 4 + ["HalfNormal", "Normal"]
    assert table["support"].tolist() == ["real"] * 4 + ["positive", "real"]
    assert table["values"].tolist() == [10, 5, 5, 1, 1, 30]


class Column(Toy):
    """The toy without its squeeze: f(x) has shape (n, 1)."""

    def network(self, x):
        return super().network(x).unsqueeze(-1)


def test_column_against_vector_names_both_shapes_and_the_line(toy):  # fault 1
    refused(
        "site 'y' would score 30 × 30 values for y of shape (30,) (f(x) has shape (30, 1)); write "
        "`f = f.squeeze(-1)` before the observed site",
        Column(),
        *toy,
    )


def test_vector_against_column(toy):
    x, y = toy
    refused(
        "would score 30 values for y of shape (30, 1) (f(x) has shape (30,)); pass `y.squeeze(-1)`",
        Toy(),
        x,
        y[:, None],
    )


def test_another_site_name_does_not_hide_the_shape(toy):
    def model(x, y=None):
        f = (x @ weights()).unsqueeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(f, 1.0), obs=y)
        return f

    refused(
        "y is given for site 'y', which the model does not observe; it observes ['obs']",
        model,
        *toy,
    )


def test_prior_without_to_event(toy):  # fault 2
    model = Toy()
    model.fc1.weight = PyroSample(dist.Normal(0.0, 1.0).expand([5, 2]))
    refused(
        "site 'fc1.weight': its prior has batch shape (5, 2) outside any plate, so its log density "
        "would not be one number; add `.to_event(2)`",
        model,
        *toy,
    )


def test_two_outputs_need_to_event(toy):
    x, y = toy
    both = torch.stack([y, -y], 1)
    refused(
        "add `.to_event(1)` to the distribution of 'y'",
        observed(lambda f: dist.Normal(f, 1.0), 2),
        x,
        both,
    )
    bound = bind(observed(lambda f: dist.Normal(f, 1.0).to_event(1), 2), x, both)
    assert bound.named("observed")["y"].shape == (30, 2)
    assert bound.rows == 30


def test_one_row(toy):
    x, y = toy
    assert bind(Toy(), x[:1], y[:1]).rows == 1


def test_fixed_plate_is_refused_before_it_fails_on_other_rows(toy):  # fault 5
    def model(x, y=None):
        f = x @ weights()
        with pyro.plate("data", 30):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    refused(
        "plate 'data' has size 30 where x has 1 row; write `pyro.plate('data', x.shape[0])`",
        model,
        *toy,
    )


def test_squeeze_of_everything_is_refused_before_it_meets_one_row(toy):
    def model(x, y=None):
        f = (x @ weights().unsqueeze(-1)).squeeze()
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    refused("for 1 row the model returns (); expected f(x), rows first", model, *toy)


def test_model_that_returns_nothing(toy):
    def model(x, y=None):
        f = x @ weights()
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    refused(
        "for 30 rows the model returns NoneType; expected f(x), rows first: end with", model, *toy
    )


def test_model_that_needs_y(toy):
    def model(x, y):
        f = x @ weights()
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    refused("write `def forward(self, x, y=None)`", model, *toy)


def test_model_that_is_not_callable(toy):
    refused("model is int; expected a Pyro model (x, y=None)", 3, *toy)


def test_model_that_fails_tells_shapes_and_the_error(toy):
    x, y = toy
    refused(
        "the model failed on x of shape (30, 1), y of shape (30,): RuntimeError: mat1",
        Toy(),
        x[:, :1],
        y,
    )
    refused(
        "x holds integers, which stay integers: pass `x.float()`",
        Toy(),
        torch.ones(30, 2, dtype=torch.int64),
        y,
    )


def test_model_that_fails_at_some_prior_draws_only_passes(toy):
    """A matrix that is not positive definite at half of the draws is no fault of the model."""

    def model(x, y=None):
        w = weights()
        cov = torch.eye(2) + (w[0] > 0) * 2 * (1 - torch.eye(2))
        pyro.sample("z", dist.MultivariateNormal(torch.zeros(2), covariance_matrix=cov))
        f = x @ w
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    with pytest.warns(PbnnWarning, match="site 'z' does not act on the data"):
        assert bind(model, *toy).rows == 30


# Plates.


def test_plate_of_another_name_has_no_rows(toy):
    def model(x, y=None):
        f = x @ weights()
        with pyro.plate("rows", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    bound = bind(model, *toy)
    assert bound.rows is None
    assert bound.named("observed")["y"].row_dim is None


@pytest.mark.parametrize("name", ["data", "rows"])
@pytest.mark.parametrize("given", [True, False])
def test_subsampled_plate(toy, name, given):
    x, y = toy

    def model(x, y_given=None):
        y_all = y_given if given else y
        f = x @ weights()
        with pyro.plate(name, 30, subsample_size=10) as rows:
            obs = None if y_all is None else y_all[rows]
            pyro.sample("y", dist.Normal(f[rows], 1.0), obs=obs)
        return f

    refused(
        f"plate '{name}' takes 10 of its 30 rows at random; the batch size belongs to",
        model,
        x,
        y if given else None,
    )


def test_sequential_plate(toy):
    def model(x, y=None):
        f = x @ weights()
        for i in pyro.plate("data", x.shape[0]):
            pyro.sample(f"y_{i}", dist.Normal(f[i], 1.0), obs=None if y is None else y[i])
        return f

    refused(
        "site 'y_0' lies in the sequential plate 'data'; write `with pyro.plate(…):`", model, *toy
    )


# Sites.


def test_discrete_latent(toy):  # fault 9
    def model(x, y=None):
        switch = pyro.sample("switch", dist.Bernoulli(0.5))
        f = x @ weights() * switch
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    refused("site 'switch' is discrete (Bernoulli); gradients need continuous sites", model, *toy)


def test_nothing_latent_and_nothing_observed(toy):
    x, y = toy
    refused("the model has no latent site", lambda x, y=None: x, x, y)
    refused("nothing is observed; pass y", Toy(), x)


def test_site_that_does_not_act_is_told(toy):
    def model(x, y=None):
        pyro.sample("idle", dist.Normal(0.0, 1.0))
        return normal(x, y)

    with pytest.warns(PbnnWarning, match="site 'idle' does not act on the data") as told:
        bind(model, *toy)
    assert len(told) == 1


def test_randomness_beyond_the_sites(toy):  # fault 23 for the roads that need one density
    class Wet(Toy):
        def network(self, x):
            return super().network(dropout(x, 0.5))

    refused("is random beyond its sites; use `nn.Dropout`", Wet(), *toy)


def test_factor_sites_are_told_apart_by_plate(toy):
    def model(x, y=None):
        w = weights()
        pyro.factor("prior", -w.square().sum())
        f = x @ w
        with pyro.plate("data", x.shape[0]):
            pyro.factor("soft", -f.square())
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    factors = bind(model, *toy).named("factor")
    assert {name: site.row_dim for name, site in factors.items()} == {"prior": None, "soft": -1}


def test_flat_prior_and_support_that_depends_on_a_site(toy):  # fault 36
    def model(x, y=None):
        a = pyro.sample("a", dist.Uniform(0.0, 1.0))
        b = pyro.sample("b", dist.Uniform(0.0, 1 - a))
        c = pyro.sample("c", dist.ImproperUniform(dist.constraints.real, (), ()))
        f = a * x[:, 0] + b * x[:, 1] + c
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f

    supports = {s.name: s.support for s in bind(model, *toy).named("latent").values()}
    assert supports["b"].startswith("[0, ")
    assert supports["c"] == "real"


# Parameters without priors.


class Mixed(PyroModule):
    """BatchNorm and Dropout, a prior on one weight only, a constrained parameter."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = PyroModule[nn.Linear](2, 5), PyroModule[nn.Linear](5, 1)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.fc2.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 5]).to_event(2))
        self.noise = PyroParam(torch.tensor(0.5), dist.constraints.positive)

    def forward(self, x, y=None):
        f = self.fc2(self.drop(self.norm(self.fc1(x)))).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)
        return f


def test_constants_buffers_and_eval_mode(toy, unchanged):  # fault 8
    model = Mixed().train()
    with unchanged(model):
        bound = bind(model, *toy)
    assert (
        set(bound.named("constant"))
        == set(bound.constants())
        == {
            "fc1.weight",
            "fc1.bias",
            "fc2.bias",
            "norm.weight",
            "norm.bias",
            "noise_unconstrained",
        }
    )
    assert set(bound.buffers()) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert not any(module.training for module in bound.model.modules())
    values = {"fc2.weight": torch.ones(1, 5)}
    with isolated():
        first, second = (bound.run(values).nodes["_RETURN"]["value"] for _ in range(2))
    assert torch.equal(first, second)


def test_param_statements_of_a_function_are_constants(toy):
    def model(x, y=None):
        shift = pyro.param("shift", torch.tensor(0.5))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=dist.constraints.positive)
        f = x @ weights() + shift
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, noise), obs=y)
        return f

    bound = bind(model, *toy)
    assert set(bound.constants()) == {"shift", "noise_unconstrained"}
    given = {"shift": torch.tensor(7.0), "noise_unconstrained": torch.tensor(3.0).log()}
    trace = bind(model, *toy, constants=given).run({"w": torch.zeros(2)})
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], torch.full((30,), 7.0))
    torch.testing.assert_close(trace.nodes["y"]["fn"].scale, torch.full((30,), 3.0))


def test_parameters_that_no_constants_could_hold(toy):
    net = nn.Linear(2, 1)

    def outside(x, y=None):
        pyro.module("net", net)
        return normal(x, y)

    class Made(Toy):
        def network(self, x):
            return super().network(x) + pyro.param("made", torch.tensor(0.0))

    refused("write the model as a PyroModule that holds the network", outside, *toy)
    refused("write `self.made = PyroParam(…)` in `__init__`", Made(), *toy)


def test_constants_of_another_model(toy):
    refused(
        "constant 'fc3.bias' of shape (1,) has no place in this model",
        Mixed(),
        *toy,
        constants={"fc3.bias": torch.zeros(1)},
    )
    refused(
        "it has no parameter without a prior, and no buffer: leave it out",
        Toy(),
        *toy,
        constants={"q": torch.zeros(1)},
    )


def test_y_of_a_model_of_factors(toy):
    def factors(x, y=None):
        w = weights()
        pyro.factor("likelihood", -(x @ w).square().sum())
        return x @ w

    assert bind(factors, toy[0]).named("factor")
    refused("the model observes no site: its data are in its factors; leave y out", factors, *toy)


# Layers.


def test_gru_with_priors_on_all_parameters(toy):  # fault 6
    class Recurrent(PyroModule):
        def __init__(self):
            super().__init__()
            self.gru = PyroModule[nn.GRU](2, 4, batch_first=True)
            self.out = PyroModule[nn.Linear](4, 1)
            set_priors(self.gru)
            set_priors(self.out)

        def forward(self, x, y=None):
            f = self.out(self.gru(x)[0][:, -1]).squeeze(-1)
            with pyro.plate("data", x.shape[0]):
                pyro.sample("y", dist.Normal(f, 1.0), obs=y)
            return f

    x = torch.randn(30, 5, 2)
    bound = bind(Recurrent(), x, toy[1])  # a warning would be an error
    shapes = {name: site.shape for name, site in bound.named("latent").items()}
    draws = [{k: torch.randn(v) for k, v in shapes.items()} for _ in range(2)]
    first, second = (bound.run(draw).nodes["_RETURN"]["value"] for draw in draws)
    assert not torch.allclose(first, second)
    leaves = {k: v.requires_grad_() for k, v in draws[0].items()}
    output = bound.run(leaves).nodes["_RETURN"]["value"].sum()
    gradients = torch.autograd.grad(output, list(leaves.values()))
    assert all(bool((gradient != 0).any()) for gradient in gradients)


# Data.


def test_x_and_y_as_dicts(toy):
    x, y = toy

    def model(x, y=None):
        f = x["a"] * weights(1) + x["b"]
        with pyro.plate("data", f.shape[0]):
            pyro.sample("first", dist.Normal(f, 1.0), obs=None if y is None else y["first"])
            pyro.sample("second", dist.Poisson(f.exp()), obs=None if y is None else y["second"])
        return f

    inputs = {"a": x[:, 0], "b": x[:, 1].numpy()}
    outputs = {"first": y, "second": torch.arange(30)}
    bound = bind(model, inputs, outputs)
    assert list(bound.named("observed")) == ["first", "second"]
    assert bound.y["second"].dtype == torch.float32
    refused(
        "y is given for site 'third', which the model does not observe",
        model,
        inputs,
        {**outputs, "third": y},
    )
    refused(
        "rows differ: x['a'] has 29, x['b'] has 30",
        model,
        {**inputs, "a": x[:29, 0]},
        outputs,
        error=DataError,
    )
    refused("write `obs=None if y is None else y['y']`", normal, x, {"y": y})


def test_no_x_at_all():
    def eight_schools(x, y=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        pyro.sample("y", dist.Normal(mu, 10.0).expand([8]).to_event(1), obs=y)

    bound = bind(eight_schools, None, torch.arange(8.0))
    assert bound.rows is None
    assert bound.named("observed")["y"].shape == (8,)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.ones(30, 2), torch.ones(29), "rows differ: x has 30, y has 29"),
        (torch.ones(0, 2), torch.ones(0), "the data have no rows"),
        (torch.tensor(1.0), torch.ones(1), "x is one number; expected rows, of shape (n, …)"),
        ([[1.0, 2.0], [3.0]], torch.ones(2), "x is no array"),
        (np.array([["a", "b"]]), torch.ones(1), "x has type <U1; expected numbers"),
        (torch.ones(2, 2).to(torch.complex64), torch.ones(2), "x is complex"),
        (torch.tensor([[0.0, 0.0], [0.0, torch.nan]]), torch.ones(2), "x is not finite in row 1"),
        (torch.ones(2, 2), torch.tensor([0.0, torch.inf]), "y is infinite in some row"),
        (
            np.array([[0.0], [1e300]]),
            torch.ones(2),
            "x ranges too widely: row 1 has a value beyond",
        ),
        (torch.ones(2, 2), np.array([1e300, 0.0]), "y ranges too widely: row 0 has a value beyond"),
        (torch.ones(2, 2), torch.full((2,), torch.nan), "y at site 'y' is NaN in every row"),
    ],
)
def test_data_that_cannot_be_used(x, y, message):
    refused(message, normal, x, y, error=DataError)


def masked(x, y=None):
    f = x @ weights()
    with pyro.plate("data", x.shape[0]), poutine.mask(mask=y is None or ~y.isnan()):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)
    return f


def test_missing_y_masked_or_refused(toy):  # fault 36
    x, y = toy
    y = y.masked_fill(torch.arange(30) == 4, torch.nan)
    refused(
        "y is NaN in row 4 and the model does not mask it; drop the row, or write `with "
        "poutine.mask(mask=y is None or ~y.isnan()):`",
        normal,
        x,
        y,
        error=DataError,
    )
    bound = bind(masked, x, y)
    w = torch.zeros(2, requires_grad=True)
    trace = bound.run({"w": w})
    density = trace.log_prob_sum()
    density.backward()
    kept = torch.arange(30) != 4
    expected = dist.Normal(0.0, 1.0).log_prob(y[kept]).sum() + 2 * dist.Normal(0, 1).log_prob(
        torch.tensor(0.0)
    )
    torch.testing.assert_close(density.detach(), expected)
    torch.testing.assert_close(w.grad, x[kept].T @ y[kept])


def categorical(f):
    return dist.Categorical(logits=f)


@pytest.mark.parametrize(
    ("build", "outputs", "y", "message"),
    [
        (categorical, 3, [0, 1, 2], None),
        (categorical, 3, [0.0, 1.0, 2.0], None),
        (categorical, 2, [True, False, True], None),
        (categorical, 3, [0.0, 0.5, 2.0], "is not a whole number in row 1"),
        (categorical, 3, [0.0, torch.nan, 2.0], "is not a whole number in row 1"),
        (categorical, 3, [0, 1, 3], "is 3 in row 2; expected values that Categorical can take"),
        (lambda f: dist.Poisson(f.exp()), 1, [0, 1, -1], "is -1.0 in row 2; expected values that"),
        (lambda f: dist.Bernoulli(logits=f), 1, [0, 1, 2], "is 2.0 in row 2"),
        (lambda f: dist.Gamma(2.0, f.exp()), 1, [1.0, -1.0, 1.0], "is -1.0 in row 1"),
        (lambda f: dist.Beta(f.exp(), 1.0), 1, [0.5, 0.5, 1.5], "is 1.5 in row 2"),
        (lambda f: dist.Normal(f, 1.0), 1, [1, 2, 3], None),
    ],
)
def test_y_outside_its_support(build, outputs, y, message):
    x, y = torch.randn(3, 2), torch.tensor(y)
    if message is None:
        sampled = build(torch.zeros(outputs)).sample().dtype
        assert bind(observed(build, outputs), x, y).y.dtype == sampled
    else:
        refused(message, observed(build, outputs), x, y, error=DataError)


# Dtype and device (fault 7).


@pytest.mark.parametrize(
    ("model", "x", "y", "options", "expected"),
    [
        (Toy, torch.float32, torch.float32, {}, torch.float32),
        (Toy, torch.float64, torch.float64, {}, torch.float64),
        (Toy, torch.float64, torch.float32, {}, torch.float64),
        (Toy, torch.float32, torch.float64, {}, torch.float32),
        (lambda: Toy().double(), torch.float32, torch.float32, {}, torch.float32),
        (Mixed, torch.float64, torch.float64, {}, torch.float32),
        (lambda: Mixed().double(), torch.float32, torch.float32, {}, torch.float64),
        (Mixed, torch.float32, torch.float32, {"dtype": torch.float64}, torch.float64),
    ],
)
def test_one_dtype_throughout(toy, model, x, y, options, expected):
    bound = bind(model(), toy[0].to(x), toy[1].to(y), **options)
    assert bound.dtype == bound.x.dtype == bound.y.dtype == expected
    with isolated():
        trace = bound.run({})
    held = {node["value"].dtype for node in trace.nodes.values() if node["type"] == "sample"}
    held |= {value.dtype for value in bound.constants().values()}
    assert held - {torch.int64} == {expected}  # plates have indices


def test_numpy_float64_takes_the_default(toy):
    x, y = (value.double().numpy() for value in toy)
    assert bind(Toy(), x, y).dtype == torch.float32


def test_priors_made_of_tensors_move_with_the_model(toy):
    model = Toy()
    model.sigma = PyroSample(dist.HalfNormal(torch.ones((), dtype=torch.float64)))
    assert bind(model, *toy).named("latent")["sigma"].prior == "HalfNormal"
    assert model.sigma.dtype == torch.float64  # the caller's own prior stays as it was
    model.sigma = PyroSample(lambda _: dist.HalfNormal(torch.ones((), dtype=torch.float64)))
    refused(
        "site 'sigma' draws torch.float64 where the fit runs in torch.float32; build its prior "
        "from numbers",
        model,
        *toy,
    )


def test_dtype_and_device_that_do_not_exist(toy):
    refused(
        "dtype is torch.float16; expected torch.float32 or torch.float64",
        Toy(),
        *toy,
        dtype=torch.float16,
    )
    refused("device is 'abacus'", Toy(), *toy, device="abacus")
    if not torch.cuda.is_available():
        refused(
            "device 'cuda' was asked for, but torch sees no CUDA device", Toy(), *toy, device="cuda"
        )


@pytest.mark.cuda
def test_everything_moves_to_cuda(toy):
    bound = bind(Toy(), *toy, device="cuda")
    assert bound.x.device.type == bound.y.device.type == "cuda"
    assert bound.run({}).log_prob_sum().device.type == "cuda"


def test_no_grad_of_the_caller_is_no_reason_to_warn(toy):
    with torch.no_grad():
        bind(Toy(), *toy)


# Kinds of target.


@pytest.mark.parametrize(
    ("build", "outputs", "kind"),
    [
        (lambda f: dist.Normal(f, 1.0), 1, "real"),
        (lambda f: dist.StudentT(3.0, f, 1.0), 1, "real"),
        (lambda f: dist.Normal(f, 1.0).to_event(1), 2, "real"),
        (lambda f: dist.MultivariateNormal(f, torch.eye(2)), 2, "real"),
        (lambda f: dist.Bernoulli(logits=f), 1, "class"),
        (lambda f: dist.Bernoulli(logits=f).to_event(1), 2, "class"),
        (categorical, 3, "class"),
        (lambda f: dist.Poisson(f.exp()), 1, "count"),
        (lambda f: dist.Poisson(f.exp()).to_event(1), 2, "count"),
        (lambda f: dist.NegativeBinomial(5.0, logits=f), 1, "count"),
        (lambda f: dist.ZeroInflatedPoisson(f.exp(), gate=torch.tensor(0.3)), 1, "count"),
        (lambda f: dist.Binomial(10, logits=f), 1, "count"),
        (lambda f: dist.Gamma(2.0, f.exp()), 1, "positive"),
        (lambda f: dist.LogNormal(f, 1.0), 1, "positive"),
        (lambda f: dist.Beta(f.exp(), 1.0), 1, "positive"),
    ],
)
def test_target_kind(build, outputs, kind, unchanged):
    x = torch.randn(2, 2)
    with unchanged():
        assert target_kind(observed(build, outputs), x) == kind


def test_target_kind_without_y(toy):
    def model(x, y=None):
        pyro.sample("count", dist.Poisson((x @ weights()).exp()).to_event(1), obs=y)

    with pytest.raises(
        ModelError, match=re.escape("the model has no site 'y'; it has ['w', 'count']")
    ):
        target_kind(model, toy[0])
