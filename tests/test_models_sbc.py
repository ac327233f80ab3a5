"""Simulation-based calibration of the model files (Talts et al. 2018): replicates are lanes."""

import dataclasses

import pytest
import torch
from network_cases import CASES
from scipy import stats
from torch.func import vmap

from pbnn.front_door import bind
from pbnn.infer.density import Density
from pbnn.infer.graph import LaneSafe
from pbnn.infer.lanes import Rule
from pbnn.infer.options import Options
from pbnn.infer.sampler import sample
from pbnn.model import isolated, run

# By case, smaller options still and the scalar sites whose ranks are looked at, beside f and lp.
SITES = {
    "robust, df": ({"hidden": 2}, ["scale"]),
    "counts": ({"hidden": 2}, []),
    "counts, both": ({"hidden": 2}, ["size", "zeros"]),
    "binary": ({"hidden": 2}, []),
    "ordinal": ({"hidden": 2}, ["first"]),
    "multi_output": ({"hidden": 2}, []),
    "ard": ({"hidden": 2}, ["scale"]),
    "hierarchical": ({"hidden": 2}, ["pool", "scale"]),
    "convnet": ({"width": 1, "hidden": 2}, []),
    "resnet": ({"width": 2}, []),
    "recurrent": ({"hidden": 2}, []),
    "rank1": ({"hidden": 3}, ["scale"]),
    "lastlayer": ({"hidden": 3}, ["scale"]),
    "eight_schools": ({}, ["mu", "tau"]),
}


def outputs(bound, values):
    """Return f(x) at the first two rows of draws `(lanes, …)`, each `(lanes, …)`."""
    names = list(values)
    state = {**bound.constants(), **bound.buffers()}

    def one(*drawn):
        given = dict(zip(names, drawn, strict=True))
        trace = run(bound.model, given, bound.x, bound.y, fill=bound.fill, state=state)
        return trace.nodes["_RETURN"]["value"]

    mapped = one
    some = values[names[0]]
    event = len(bound.named("latent")[names[0]].shape)
    for _ in range(some.ndim - event):
        mapped = vmap(mapped)
    with torch.no_grad(), LaneSafe():
        f = mapped(*values.values())
    f = f.flatten(some.ndim - event)
    return {"f_0": f[..., 0], "f_1": f[..., 1]}


def simulated(bound, values, replicates):
    """Return a y of each lane's own values, with the missing cells of the case's y."""
    with torch.no_grad():
        drawn = [
            run(bound.model, {k: v[i] for k, v in values.items()}, bound.x).nodes["y"]["value"]
            for i in range(replicates)
        ]
    y = torch.stack(drawn).to(bound.y)
    return torch.where(bound.y.isnan(), torch.nan, y) if y.is_floating_point() else y


def quantities(bound, values, sites):
    return {**outputs(bound, values), **{site: values[site] for site in sites}}


def p_values(name, options, sites, *, replicates, warmup, draws, thin, depth, bins):
    """Return the p-value of uniform ranks of each quantity."""
    case = dataclasses.replace(CASES[name], options={**CASES[name].options, **options})
    model, x, y = case.build()
    bound = bind(model, x, y, dtype=torch.float64)
    with isolated(3):
        truth = Density(bound, chains=replicates, compile=False)
        z = truth.initial_prior(replicates, seed=1)
        values = truth.constrain(z)
        density = Density(bound, compile=False, lanes={"y": simulated(bound, values, replicates)})
    rule = Rule(max_tree_depth=depth)
    settings = Options(warmup=warmup, draws=draws, thin=thin, target_accept=0.9, rule=rule)
    with torch.no_grad():
        result = sample(
            density.value_and_grad, lambda: density.initial_prior(replicates, seed=2), settings
        )
        found = density.constrain(result.draws)
        true = {**quantities(bound, values, sites), "lp": density.value_and_grad(z)[0]}
    drawn = {**quantities(bound, found, sites), "lp": result.stats["lp"]}
    tests = {}
    for key, value in true.items():
        # Of discrete quantities none: ties of a rank have probability 0.
        ranks = (drawn[key] < value[:, None]).sum(1)
        counts = torch.bincount(ranks * bins // (draws + 1), minlength=bins)
        tests[key] = stats.chisquare(counts.numpy()).pvalue
    print({k: round(float(v), 4) for k, v in tests.items()})
    return tests


def test_ranks_of_a_logit_are_uniform():
    """The short form, of one file."""
    sizes = {"replicates": 40, "warmup": 40, "draws": 7, "thin": 2, "depth": 4, "bins": 4}
    tests = p_values("binary", {"hidden": 2}, [], **sizes)
    assert min(tests.values()) > 0.0003, tests


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
def test_ranks_of_the_truth_are_uniform(name):
    """200 replicates, a level of 0.001 for each file: 3 to 5 tests of it."""
    sizes = {"replicates": 200, "warmup": 80, "draws": 15, "thin": 3, "depth": 5, "bins": 8}
    if name == "ard":
        # From the prior into the half-Cauchy's funnel is a longer way: after 80 transitions the
        # ranks of the scale were still those of the starts.
        sizes |= {"warmup": 300, "thin": 6, "depth": 8}
    tests = p_values(name, *SITES[name], **sizes)
    assert min(tests.values()) > 0.001 / len(tests), tests
