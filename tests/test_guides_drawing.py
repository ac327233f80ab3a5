"""Draws, densities and plain tensors of any guide, the user's own among them."""

import json

import pyro
import pyro.distributions as dist
import pytest
import torch
from guide_cases import (
    GAUSSIANS,
    PATTERNS,
    Network,
    clean,  # noqa: F401
    data,
    flat_unconstrained,
    scrambled,
)
from pyro import poutine
from pyro.distributions.constraints import softplus_positive
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDelta,
    AutoGuideList,
    AutoIAFNormal,
    AutoNormal,
    AutoStructured,
)
from pyro.nn import PyroParam
from torch.distributions import biject_to, constraints

from pbnn.errors import ModelError
from pbnn.infer.guides import (
    GUIDES,
    AutoKronecker,
    approximation,
    dense_moments,
    draw_guide,
    init_to_fan_in,
    log_prob_guide,
    make_guide,
)


@pytest.mark.parametrize("kind", [*GUIDES, PATTERNS, AutoIAFNormal], ids=str)
def test_draws_are_seeded_and_leave_the_global_generator(kind):
    x, y = data()
    torch.set_default_dtype(torch.float64)  # the flow makes its parameters in the default dtype
    try:
        options = {"hidden_dim": [16]} if kind is AutoIAFNormal else {}
        model = Network()
        guide = AutoIAFNormal(model, **options) if options else make_guide(kind, model)
        guide(x, y)
        state = torch.get_rng_state()
        first, log_q = draw_guide(guide, 4, (x, y), seed=5)
        second, _ = draw_guide(guide, 4, (x, y), seed=5)
        third, _ = draw_guide(guide, 4, (x, y), seed=6)
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_default_dtype(torch.float32)
    assert log_q.shape == (4,)
    assert not any(v.requires_grad for v in (*first.values(), log_q))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["scale"], third["scale"])


class Looped(AutoNormal):
    """AutoNormal that nothing can recognise, so that it has to be run draw by draw."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class RadialNoise(dist.TorchDistribution):
    """A uniform direction times a Normal distance (Farquhar, Osborne & Gal 2020)."""

    support, arg_constraints, has_rsample = constraints.real_vector, {}, True

    def rsample(self, sample_shape=()):
        direction = torch.randn(*sample_shape, *self.event_shape)
        return direction / direction.norm(dim=-1, keepdim=True) * torch.randn(*sample_shape, 1)

    def log_prob(self, value):
        size, distance = torch.tensor(float(value.shape[-1])), value.norm(dim=-1)
        sphere = (
            torch.tensor(2.0).log()
            + size / 2 * torch.tensor(torch.pi).log()
            - torch.lgamma(size / 2)
        )
        return dist.HalfNormal(1.0).log_prob(distance) - sphere - (size - 1) * distance.log()


class Radial(AutoContinuous):
    """A family of a user's own."""

    def _setup_prototype(self, *args, **kwargs):
        super()._setup_prototype(*args, **kwargs)
        self.loc = PyroParam(self._init_loc())
        self.scale = PyroParam(torch.full((self.latent_dim,), 0.01), softplus_positive)

    def get_posterior(self, *args, **kwargs):
        noise = RadialNoise((), (self.latent_dim,), validate_args=False)
        return dist.TransformedDistribution(
            noise, dist.transforms.AffineTransform(self.loc, self.scale, event_dim=1)
        )


def test_unknown_guide_is_run_draw_by_draw_with_the_same_density():
    x, y = data()
    guide = scrambled(Looped(Network(), init_loc_fn=init_to_fan_in), x, y)
    assert approximation(guide) is None
    values, log_q = draw_guide(guide, 6, (x, y), seed=0)
    twin = scrambled(make_guide("normal", Network()), x, y)
    twin.load_state_dict(guide.state_dict())
    torch.testing.assert_close(log_q, log_prob_guide(twin, values))
    with pytest.raises(ModelError, match="Looped has no density"):
        log_prob_guide(guide, values)


def test_family_of_the_users_own_trains_and_has_the_density_it_states():
    x, y = data(torch.float32)
    model = Network(torch.float32)
    guide = make_guide(Radial, model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10])
    values, log_q = draw_guide(guide, 1000, seed=0)
    z = (flat_unconstrained(guide, values, list(values)) - guide.loc) / guide.scale
    distance = z.norm(dim=1)
    # D = 16: the sphere has area 2 pi^8 / 7!; a density of the distance becomes one of the point.
    area = 2 * torch.pi**8 / 5040
    expected = dist.HalfNormal(1.0).log_prob(distance) - 15 * distance.log()
    expected = expected - torch.tensor(area).log() - guide.scale.log().sum()
    torch.testing.assert_close(log_q, expected.detach(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", ["structured", "list", "function", "flow class"])
def test_other_kinds_of_guides_are_drawn(kind):
    x, y = data(torch.float32)
    model = Network(torch.float32)
    if kind == "structured":
        guide = make_guide(AutoStructured, model)
    elif kind == "list":
        guide = AutoGuideList(model)
        guide.append(AutoKronecker(poutine.block(model, expose=["scale", "share"])))
        guide.append(AutoKronecker(poutine.block(model, hide=["scale", "share"]), bias="separate"))
    elif kind == "function":

        def by_hand(x, y=None):
            for name, shape in {
                "hidden.weight": (3, 2),
                "hidden.bias": (3,),
                "out.weight": (1, 3),
                "out.bias": (1,),
            }.items():
                pyro.sample(name, dist.Normal(0.0, 0.5).expand(shape).to_event(len(shape)))
            pyro.sample("scale", dist.LogNormal(0.0, 0.5))
            pyro.sample("share", dist.Dirichlet(torch.ones(3)))

        guide = make_guide(lambda _: by_hand, model)
    else:

        class Flow(AutoContinuous):
            def get_posterior(self, *args, **kwargs):
                return dist.StudentT(5.0, torch.zeros(self.latent_dim), 0.1).to_event(1)

        guide = make_guide(Flow, model)
    values, log_q = draw_guide(guide, 5, (x, y), seed=0)
    assert {name: tuple(v.shape[1:]) for name, v in values.items()} == {
        "hidden.weight": (3, 2),
        "hidden.bias": (3,),
        "out.weight": (1, 3),
        "out.bias": (1,),
        "scale": (),
        "share": (3,),
    }
    assert log_q.shape == (5,)
    assert log_q.isfinite().all()
    if kind == "function":
        weights = torch.cat([v.flatten(1) for v in list(values.values())[:4]], 1)
        expected = dist.Normal(0.0, 0.5).log_prob(weights).sum(1)
        expected = expected + dist.Normal(0.0, 0.5).log_prob(values["scale"].log())
        u = biject_to(constraints.simplex).inv(values["share"])
        jacobian = biject_to(constraints.simplex).log_abs_det_jacobian(u, values["share"])
        expected = expected + torch.tensor(2.0).log() + jacobian
        torch.testing.assert_close(log_q, expected, rtol=1e-4, atol=1e-4)


def test_guide_that_leaves_out_a_site_is_refused():
    x, y = data()
    guide = make_guide(
        lambda _: lambda *a: pyro.sample("scale", dist.LogNormal(0.0, 1.0)), Network()
    )
    with pytest.raises(ModelError, match=r"does not sample the model's site 'hidden\.weight'"):
        draw_guide(guide, 2, (x, y))


def test_point_estimate_has_infinite_density():
    x, y = data()
    values, log_q = draw_guide(make_guide(AutoDelta, Network()), 3, (x, y))
    assert (log_q == torch.inf).all()
    assert torch.equal(values["scale"][0], values["scale"][2])


@pytest.mark.parametrize("kind", GAUSSIANS, ids=str)
def test_approximation_is_plain_data(kind, tmp_path):
    x, y = data()
    guide = scrambled(make_guide(kind, Network()), x, y)
    saved = approximation(guide)
    tensors = saved.pop("tensors")
    torch.save(tensors, tmp_path / "t.pt")
    loaded = json.loads(json.dumps(saved)) | {
        "tensors": torch.load(tmp_path / "t.pt", weights_only=True)
    }
    before, after = dense_moments({**saved, "tensors": tensors}), dense_moments(loaded)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not any(tensor.requires_grad for tensor in tensors.values())
