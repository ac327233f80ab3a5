import pytest
import torch
from density_cases import RecursiveNuts, funnel, independent, schools
from scipy import stats

from pbnn.infer.lanes import STATS, UNIFORMS, Rule
from pbnn.infer.noise import lane_keys, uniforms
from pbnn.infer.trajectory import leapfrog
from pbnn.infer.transition import begin, step

DEPTH, N_STEPS = STATS.index("tree_depth"), STATS.index("n_steps")


def lanes_at(z, density, rule, step_size, seed=0, scale=None):
    value, gradient = density(z)
    return begin(
        z,
        value,
        gradient,
        lane_keys(seed, list(range(len(z)))),
        rule,
        scale=torch.ones_like(z) if scale is None else scale,
        step_size=torch.full_like(value, step_size),
        target_accept=0.8,
    )


def advance(lanes, density, rule):
    noise = uniforms(lanes.keys, lanes.leapfrogs, UNIFORMS, lanes.z.dtype)
    return step(lanes, noise, density, rule)


def transitions(lanes, density, rule, count):
    """Run some transitions of each lane; return (z, r, directions, depth, steps) of each."""
    lanes = lanes._replace(stop=lanes.stop + count)
    fresh = [(z.clone(), r.clone(), [1]) for z, r in zip(lanes.z, lanes.r, strict=True)]
    found = []
    while not lanes.paused.all():
        lanes, outcome = advance(lanes, density, rule)
        for i in range(len(fresh)):
            if outcome is not None and outcome.finished[i]:
                row = outcome.stats[i]
                found.append((*fresh[i], int(row[DEPTH]), int(row[N_STEPS])))
                fresh[i] = (lanes.z[i].clone(), lanes.r[i].clone(), [1])
            elif lanes.leaf[i] == 0:
                fresh[i][2].append(int(lanes.direction[i]))
    return found


@pytest.mark.parametrize("dense", [False, True])
def test_leapfrog_goes_back_to_where_it_came_from(dense):
    z = torch.randn(6, 4, dtype=torch.float64)
    scale = torch.rand(6, 4, dtype=torch.float64) + 0.5
    if dense:
        scale = torch.linalg.cholesky(
            torch.diag_embed(scale) + 0.1 * torch.ones(6, 4, 4, dtype=torch.float64)
        )
    lanes = lanes_at(z, funnel, Rule(), 0.05, scale=scale)
    start = (lanes.z, lanes.r)
    for way in (1, -1):
        lanes = lanes._replace(direction=torch.full_like(lanes.direction, way))
        for _ in range(20):
            leaf = leapfrog(lanes, funnel)
            lanes = lanes._replace(z=leaf.z, r=leaf.r, g=leaf.g)
        if way == 1:
            assert (lanes.z - start[0]).abs().max() > 0.1
    # 40 steps of rounding, each near 1e-16 of values near 1.
    assert torch.allclose(lanes.z, start[0], atol=1e-12)
    assert torch.allclose(lanes.r, start[1], atol=1e-12)


def test_leapfrog_is_symplectic():
    scale = torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64)

    def move(state):
        x, r = state[:3], state[3:]  # x is the position in units of the scale
        z = (scale[0] * x)[None]
        lanes = lanes_at(z, funnel, Rule(), 0.3, scale=scale)
        lanes = lanes._replace(z=z, r=r[None], g=funnel(z)[1])
        for _ in range(3):
            leaf = leapfrog(lanes, funnel)
            lanes = lanes._replace(z=leaf.z, r=leaf.r, g=leaf.g)
        return torch.cat([lanes.z[0] / scale[0], lanes.r[0]])

    jacobian = torch.autograd.functional.jacobian(move, torch.randn(6, dtype=torch.float64))
    eye, zero = torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    form = torch.cat([torch.cat([zero, eye], 1), torch.cat([-eye, zero], 1)])
    assert torch.allclose(jacobian.T @ form @ jacobian, form, atol=1e-11)


@pytest.mark.parametrize(
    ("scale", "step_size", "count"),
    [
        ([1.0, 0.5, 2.0, 3.0, 0.7], 0.3, 10),
        ([1.0, 3.0], 0.03, 2),
        ([1.0, 1.0, 1.0], 1.95, 10),
        (torch.linspace(0.1, 3.0, 10).tolist(), 0.1, 3),
    ],
)
def test_trees_are_those_of_the_recursion(scale, step_size, count):
    scale = torch.tensor(scale, dtype=torch.float64)
    density = independent(scale)
    z = torch.randn(8, len(scale), dtype=torch.float64) * scale
    found = transitions(lanes_at(z, density, Rule(), step_size), density, Rule(), count)
    reference = RecursiveNuts(density, step_size)
    assert len(found) == 8 * count
    for start, momentum, directions, depth, steps in found:
        assert reference(start, momentum, [*directions, 1]) == (depth, steps)


def test_trees_with_divergences_and_a_depth_limit_are_those_of_the_recursion():
    rule = Rule(max_tree_depth=4)
    z = torch.randn(16, 4, dtype=torch.float64) - 1.5
    found = transitions(lanes_at(z, funnel, rule, 0.4), funnel, rule, 6)
    reference = RecursiveNuts(funnel, 0.4, max_depth=4)
    for start, momentum, directions, depth, steps in found:
        assert reference(start, momentum, [*directions, 1]) == (depth, steps)
    assert max(depth for *_, depth, _ in found) == 4
    assert min(depth for *_, depth, _ in found) == 0


def test_lengths_on_eight_schools_are_those_of_the_recursion():
    """NumPyro has other lengths there, for want of the tests across the seam (CONTRIBUTING.md)."""
    z = torch.randn(100, 10, dtype=torch.float64) + torch.tensor([4.0, 1.0] + 8 * [0.0])
    found = transitions(lanes_at(z, schools, Rule(), 0.4), schools, Rule(), 1)
    reference = RecursiveNuts(schools, 0.4)
    for start, momentum, directions, depth, steps in found:
        assert reference(start, momentum, [*directions, 1]) == (depth, steps)
    assert len({steps for *_, steps in found}) > 1


def test_the_extra_checks_hold_at_a_resonance_of_the_step_size():
    density = independent(torch.ones(402, dtype=torch.float64))
    z = torch.randn(8, 402, dtype=torch.float64)
    lanes = lanes_at(z, density, Rule(), 0.4)
    start = (lanes.z[0].clone(), lanes.r[0].clone())
    found = transitions(lanes, density, Rule(), 2)
    assert {steps for *_, steps in found} <= {7, 15}
    bare = RecursiveNuts(density, 0.4, extra=False)
    assert bare(*start, [1] * 10)[1] > 100


@pytest.mark.parametrize("algorithm", ["nuts", "hmc"])
@pytest.mark.parametrize("step_size", [0.4, 1.3])
def test_a_transition_leaves_the_density_as_it_is(algorithm, step_size):
    # Started from exact draws, one transition gives exact draws: Kolmogorov–Smirnov on each
    # coordinate and on the radius; 4 p-values, so that 0.001 in all is 0.00025 for each.
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    density, rule = independent(scale), Rule(algorithm=algorithm)
    z = torch.randn(4000, 3, dtype=torch.float64) * scale
    lanes = lanes_at(z, density, rule, step_size * 0.5)
    lanes = lanes._replace(stop=lanes.stop + 1)
    while not lanes.paused.all():
        lanes, _ = advance(lanes, density, rule)
    new = (lanes.sample_z / scale).numpy()
    assert (lanes.sample_z != z).any(1).double().mean() > 0.5
    for column in new.T:
        assert stats.kstest(column, "norm").pvalue > 0.00025
    assert stats.kstest((new**2).sum(1), "chi2", args=(3,)).pvalue > 0.00025


def test_the_choice_within_a_tree_follows_the_weights():
    # One doubling from a point, seen by many lanes: the new leaf is taken with probability
    # min(1, weight of the leaf / weight of the start).
    rule = Rule(max_tree_depth=1)
    density = independent(torch.ones(1, dtype=torch.float64))
    lanes = lanes_at(torch.full((20000, 1), 0.3, dtype=torch.float64), density, rule, 1.2)
    r = torch.full_like(lanes.r, 1.1)
    lanes = lanes._replace(r=r, rho=r, far_r=r, start_energy=0.5 * r[:, 0] ** 2 + 0.5 * 0.3**2)
    leaf = leapfrog(lanes, density)
    lanes, outcome = advance(lanes, density, rule)
    assert outcome.finished.all()
    expected = float(leaf.delta[0].exp())
    assert 0.2 < expected < 0.9
    taken = float((outcome.z[:, 0] != 0.3).double().mean())
    assert abs(taken - expected) < 4 * (expected * (1 - expected) / 20000) ** 0.5
