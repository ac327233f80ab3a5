"""Each file of models/: it passes the front door, every guide and NUTS can run it, as it says.

Those of test_contract.py are not walked again. What takes a traced graph for each is slow.
"""

import ast
import math
import re
import warnings

import pyro.distributions as dist
import pytest
import torch
from network_cases import CASES, MODELS, ROWS, Case
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from scipy import special, stats
from torch import nn
from torch.func import grad_and_value, vmap

import pbnn
from pbnn.errors import ConvergenceWarning, FitError, ModelError
from pbnn.front_door import bind, prior_values
from pbnn.infer.guides import make_guide
from pbnn.infer.lane import Lane
from pbnn.model import isolated

GUIDES = ["normal", "lowrank", "kronecker"]


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request):
    return request.param


def test_every_file_is_walked():
    walked = {case.file for case in CASES.values()}
    contract = {"classification", "heteroscedastic", "regression"}
    assert walked | contract == {path.stem for path in MODELS.glob("*.py")}


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.py")), ids=lambda path: path.stem)
def test_file_opens_with_the_model_what_to_change_and_when_not_to_use_it(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert "~" in text
    assert "\nChange: " in text
    assert re.search(r"\b(Do not|Use \w+\.py)", text)


def test_prior_draws_are_finite_and_gradients_of_mapped_chains_too(case):
    model, x, y = case.build()
    bound = bind(model, x, y)
    with isolated(0), prior_values(bound.dtype, bound.device):
        for _ in range(5):
            nodes = bound.run({}, checks=True).nodes
            assert nodes["_RETURN"]["value"].isfinite().all()
    lane = Lane(bound)
    z = lane.start + 0.1 * torch.arange(2)[:, None]
    dims = (0, *(None for _ in lane.data))
    grad, value = vmap(grad_and_value(lane.log_density), dims)(z, *lane.data)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    alone = lane.log_density(z[1], *lane.data)
    assert value[1].item() == pytest.approx(alone.item(), rel=1e-4, abs=1e-3)


def test_five_steps_with_each_guide_are_finite(case):
    model, x, y = case.build()
    bound = bind(model, x, y)
    for family in GUIDES:
        with isolated(0):
            guide = make_guide(family, bound.model, rank=2 if family == "lowrank" else None)
            svi = SVI(lambda x, y: bound.run({}), guide, Adam({"lr": 0.01}), Trace_ELBO())
            losses = [svi.step(bound.x, bound.y) for _ in range(5)]
        assert all(torch.tensor(losses).isfinite()), family


def test_nuts_without_its_constants_says_the_line(case):
    model, x, y = case.build()
    assert bool(bind(model, x, y).constants()) == case.constants
    if case.constants:
        with pytest.raises(FitError, match=re.escape("fit_nuts(…, constants=fit_svi(")):
            pbnn.fit_nuts(model, x, y, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_whole_road(case, guide):
    """Five steps of `fit_svi`, its prediction, and a few transitions of NUTS from its constants."""
    model, x, y = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit = pbnn.fit_svi(
            model, x, y, guide=guide, steps=5, draws=10, compile=False, progress=False
        )
        chains = pbnn.fit_nuts(
            model, x, y, chains=2, warmup=3, draws=3, max_tree_depth=3, compile=False,
            constants=fit.constants or None, progress=False,
        )  # fmt: skip
    for posterior in (fit, chains):
        values = [*posterior.draws.values(), *posterior.deterministic.values()]
        assert all(value.isfinite().all() for value in (*values, posterior.stats["lp"]))
        if x is not None:
            frame = pbnn.predict(model, posterior, x).to_frame()
            assert frame.notna().all(axis=None)
            assert pbnn.log_likelihood(model, posterior, x, y).isfinite().all()


# Likelihoods against scipy, at one draw of the prior.


def at_a_draw(name, seed=1, **options):
    """Return bound model, latent values and nodes of a run of a case in float64."""
    case = CASES[name]
    model, x, y = Case(case.file, {**case.options, **options}, case.x, case.y).build()
    bound = bind(model, x, y, dtype=torch.float64)
    with isolated(seed), torch.no_grad(), prior_values(bound.dtype, bound.device):
        trace = bound.run({})
        trace.compute_log_prob()
    return bound, {k: v["value"] for k, v in trace.nodes.items() if "value" in v}, trace


def check(name, expected, **options):
    """Compare the log density of the observed site, row by row, with a function of the values."""
    bound, values, trace = at_a_draw(name, **options)
    node = trace.nodes["y"]
    f, y = values["_RETURN"].numpy(), node["value"].numpy()
    numbers = {k: v.detach().numpy() for k, v in values.items() if isinstance(v, torch.Tensor)}
    found = node["log_prob"].numpy()
    assert found.shape == (ROWS,)
    assert found == pytest.approx(expected(f, y, numbers), rel=1e-6)
    return bound


def test_student_t_noise():
    check("robust", lambda f, y, v: stats.t(v["df"], f, v["scale"]).logpdf(y))
    check("robust, df", lambda f, y, v: stats.t(5.0, f, v["scale"]).logpdf(y))


def negative_binomial(f, size):
    return stats.nbinom(size, size / (size + torch.as_tensor(f).exp().numpy()))


def test_counts():
    def poisson(f):
        return stats.poisson(torch.as_tensor(f).exp().numpy())

    def inflated(counts, y, zeros):
        """A zero has two sources: the share of zeros, and the counts."""
        probability = (1 - zeros) * counts.pmf(y) + zeros * (y == 0)
        return torch.as_tensor(probability).log().numpy()

    check("counts", lambda f, y, v: poisson(f).logpmf(y))
    check("counts, negative binomial", lambda f, y, v: negative_binomial(f, v["size"]).logpmf(y))
    check("counts, zero-inflated", lambda f, y, v: inflated(poisson(f), y, v["zeros"]))
    check(
        "counts, both",
        lambda f, y, v: inflated(negative_binomial(f, v["size"]), y, v["zeros"]),
    )


def test_zero_inflation_by_hand():
    """P(0) = ¼ + ¾ e⁻², P(3) = ¾ · e⁻² 2³ / 3!."""
    model = pbnn.load_model(MODELS / "counts.py", 1, zero_inflated=True)
    model.zeros = torch.tensor(0.25)
    counts = model.distribution(torch.tensor(2.0).log())
    zero, three = (counts.log_prob(torch.tensor(k)).exp().item() for k in (0.0, 3.0))
    assert zero == pytest.approx(0.25 + 0.75 * 0.1353353)
    assert three == pytest.approx(0.75 * 0.1353353 * 8 / 6)


def test_bernoulli_and_cumulative_logits():
    check("binary", lambda f, y, v: stats.bernoulli(special.expit(f)).logpmf(y))

    def ordinal(f, y, v):
        cuts = [-torch.inf, *(v["first"] + [0, *v["gaps"].cumsum()]), torch.inf]
        below = [special.expit(c - f) for c in cuts]
        levels = torch.as_tensor([[b[n] for b in below] for n in range(len(f))])
        probability = levels.diff(dim=1).gather(1, torch.as_tensor(y)[:, None])[:, 0]
        return probability.log().numpy()

    check("ordinal", ordinal)
    check("ordinal", ordinal, out_features=5)


def test_ordinal_levels_stay_apart_far_from_the_cut_points():
    model = pbnn.load_model(MODELS / "ordinal.py", 3, out_features=4)
    module = __import__(type(model).__module__)
    first, gaps = torch.tensor(-1.0), torch.tensor([1e-3, 2.0])
    logits = module.log_probabilities(torch.tensor([-80.0, 0.0, 80.0]), first, gaps)
    assert logits.isfinite().all()
    assert torch.allclose(logits.exp().sum(-1), torch.ones(3))
    # sigmoid(79.001) − sigmoid(79) is 0 in float32; its log is that of e⁻⁷⁹ − e^−79.001.
    assert logits[0, 1].item() == pytest.approx(-79.0 + math.log(-math.expm1(-1e-3)), rel=1e-4)


def test_missing_cells_count_for_nothing():
    def cells(f, y, v):
        """The sum over the cells that are there."""
        _, _, given = CASES["multi_output"].build()
        there = ~given.isnan().numpy()
        return (stats.norm(f, v["scale"]).logpdf(y) * there).sum(1)

    bound = check("multi_output", cells)
    assert bound.y.isnan().any()
    # And what stands in their place does not matter.
    values = {k: v for k, v in at_a_draw("multi_output")[1].items() if k in bound.named("latent")}
    full = torch.where(bound.y.isnan(), 0.0, bound.y)
    nodes = bound.run(values).nodes
    by_hand = dist.Normal(nodes["_RETURN"]["value"], values["scale"]).log_prob(full)
    expected = by_hand[~bound.y.isnan()].sum()
    trace = bound.run(values)
    trace.compute_log_prob()
    assert trace.nodes["y"]["log_prob"].sum().item() == pytest.approx(expected.item())


def test_normal_noise():
    for name in ("ard", "hierarchical", "lastlayer", "rank1"):
        check(name, lambda f, y, v: stats.norm(f, v["scale"]).logpdf(y))


def test_softmax():
    for name in ("convnet", "resnet", "recurrent"):
        check(name, lambda f, y, v: special.log_softmax(f, -1)[range(ROWS), y])


def test_eight_schools_by_hand():
    errors = [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
    lp = []
    for name in ("eight_schools", "eight_schools, centred"):
        bound, v, trace = at_a_draw(name)
        mu, tau, theta = (v[key].numpy() for key in ("mu", "tau", "theta"))
        prior = stats.norm(0, 5).logpdf(mu) + stats.halfcauchy(scale=5).logpdf(tau)
        data = stats.norm(theta, errors).logpdf(bound.y.numpy()).sum()
        if "z" in v:
            prior += stats.norm().logpdf(v["z"].numpy()).sum()
            assert theta == pytest.approx(mu + tau * v["z"].numpy())
        else:
            prior += stats.norm(mu, tau).logpdf(theta).sum()
        lp.append(trace.log_prob_sum().item())
        assert lp[-1] == pytest.approx(prior + data)
    assert bound.rows is None


# Networks by hand.


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_states_are_those_of_torchs_own_cell_and_padding_does_not_matter(kind):
    name = "recurrent" if kind == "gru" else "recurrent, LSTM"
    bound, values, _ = at_a_draw(name)
    rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](3, 3, batch_first=True).double()
    state = {
        "weight_ih_l0": values["input.weight"],
        "bias_ih_l0": values["input.bias"],
        "weight_hh_l0": values["state.weight"],
        "bias_hh_l0": values["state.bias"],
    }
    rnn.load_state_dict(state)
    sequence, length = bound.x["sequence"], bound.x["length"]
    packed = nn.utils.rnn.pack_padded_sequence(
        sequence, length, batch_first=True, enforce_sorted=False
    )
    last = rnn(packed)[1]
    last = (last[0] if kind == "lstm" else last)[0]
    expected = last @ values["head.weight"].mT + values["head.bias"]
    assert torch.allclose(values["_RETURN"], expected)


def test_groups_share_a_trunk_and_pool_sets_how_far_their_last_layers_part():
    bound, values, _ = at_a_draw("hierarchical")
    v = {k: values[k] for k in bound.named("latent")}
    h = torch.tanh(bound.x["x"] @ v["trunk.0.weight"].mT + v["trunk.0.bias"])
    group = bound.x["group"]
    weight = v["head.weight"] + v["pool"] * v["groups.weight"][group]
    bias = v["head.bias"] + v["pool"] * v["groups.bias"][group]
    assert torch.allclose(values["_RETURN"], (weight * h).sum(-1) + bias)
    pooled = bound.run({**v, "pool": torch.zeros(()).double()}).nodes["_RETURN"]["value"]
    assert torch.allclose(pooled, h @ v["head.weight"][0] + v["head.bias"])


def test_rank_one_factors_scale_the_weights():
    bound, values, _ = at_a_draw("rank1")
    h = bound.x
    for i in range(3):
        s, r = values[f"layers.{i}.inputs"], values[f"layers.{i}.outputs"]
        w = bound.constants()[f"layers.{i}.linear.weight"] * r[:, None] * s
        h = h @ w.mT + bound.constants()[f"layers.{i}.bias"]
        h = h.relu() if i < 2 else h
    assert torch.allclose(values["_RETURN"], h[:, 0])


def test_weight_decay_is_a_factor_and_batches_are_refused_with_it():
    bound, _, trace = at_a_draw("rank1, decay")
    squares = sum(v.square().sum() for k, v in bound.constants().items() if "weight" in k)
    factor = trace.nodes["weight_decay"]["log_prob"].item()
    assert factor == pytest.approx(-0.05 * squares.item())
    model, x, y = CASES["rank1, decay"].build()
    with pytest.raises(ModelError, match="site 'weight_decay' is observed outside plate"):
        pbnn.fit_svi(model, x, y, batch_size=5, steps=1, progress=False)


def test_batch_norm_keeps_its_statistics_and_rows_apart():
    """Fault 8."""
    model, x, y = CASES["resnet, BatchNorm"].build()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bound, one = bind(model, x, y), bind(model, x[3:4], y[3:4])
    with isolated(0), prior_values(bound.dtype, bound.device):
        values = {name: bound.run({}).nodes[name]["value"] for name in bound.named("latent")}
        first, again = (bound.run(values).log_prob_sum() for _ in range(2))
        assert torch.equal(first, again)
        whole, alone = (b.run(values).nodes["_RETURN"]["value"] for b in (bound, one))
    assert torch.allclose(alone[0], whole[3], atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_filter_response_norm_by_hand():
    model, _, _ = CASES["resnet"].build()
    with isolated(), torch.no_grad():
        model.norm.threshold.fill_(0.3)
        model.norm.bias.fill_(0.1)
        x = torch.randn(2, 2, 4, 4)
        scale = x.square().mean((-2, -1), keepdim=True).add(1e-6).sqrt()
        assert torch.allclose(model.norm(x), (x / scale + 0.1).clamp(min=0.3))


def test_a_table_of_pixels_is_the_image_row_by_row():
    bound, values, _ = at_a_draw("convnet, table")
    latent = {name: values[name] for name in bound.named("latent")}
    image = bind(*CASES["convnet"].build(), dtype=torch.float64).run(latent)
    assert torch.allclose(image.nodes["_RETURN"]["value"], values["_RETURN"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet", {"norm": "layer"}, "norm='layer'; expected 'frn' or 'batch'"),
        ("recurrent", {"kind": "rnn"}, "kind='rnn'; expected 'gru' or 'lstm'"),
        ("counts", {"likelihood": "binomial"}, "likelihood='binomial'; expected poisson or"),
        ("ordinal", {"out_features": 2}, "out_features=2; expected 3 levels or more"),
    ],
)
def test_options_that_are_not_there_are_told(name, options, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        pbnn.load_model(MODELS / f"{name}.py", 2, **options)


# Relevant inputs.


def two_of_ten(rows=80):
    """Return ten inputs and a y that inputs 2 and 7 make."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 10, generator=generator)
    y = torch.sin(x[:, 2]) + 0.5 * x[:, 7] + 0.1 * torch.randn(rows, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = pbnn.load_model(MODELS / "ard.py", 10, hidden=4)
    return model, x, (y - y.mean()) / y.std()


def relevances(posterior):
    """Return the median of each relevance, and the larger ones' indices."""
    found = posterior.draws["layers.0.weight_relevance"].flatten(0, 1).flatten(1).median(0).values
    order = found.argsort(descending=True)
    return found[order], set(order[:2].tolist())


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
def test_ard_finds_the_two_relevant_inputs_of_ten():
    fit = pbnn.fit_svi(
        *two_of_ten(), steps=600, lr=0.02, draws=200, compile=False, progress=False
    )  # fmt: skip
    found, largest = relevances(fit)
    assert largest == {2, 7}
    assert found[1] > 3 * found[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
def test_ard_finds_the_two_relevant_inputs_of_ten_under_nuts():
    chains = pbnn.fit_nuts(
        *two_of_ten(), chains=4, warmup=300, draws=300, progress=False, dtype=torch.float64
    )
    found, largest = relevances(chains)
    assert largest == {2, 7}
    assert found[1] > 3 * found[2]
