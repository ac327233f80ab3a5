"""Flat graphs: what tracing keeps, the rewrites one by one, compiling and its rule."""

from collections import Counter

import pytest
import torch
from model_cases import Toy
from torch import nn
from torch.func import grad_and_value, vmap

from pbnn.errors import FitError, PbnnWarning
from pbnn.front_door import bind
from pbnn.infer import graph as graphs
from pbnn.infer.density import Density
from pbnn.infer.graph import CudaGraph, FlatGraph, LaneSafe, compile_graph, trace, worth_compiling


def _calls(graph: FlatGraph) -> Counter[str]:
    nodes = graph.module.graph.nodes
    return Counter(n.target.__name__.split(".")[0] for n in nodes if n.op == "call_function")


def _traced(function, *inputs):
    """Trace, hold the result against the function itself, and return the graph."""
    graph = trace(lambda *values: (function(*values),), inputs)
    others = [value + 0.25 * torch.rand_like(value) for value in inputs]
    # In float64: the same arithmetic in another order.
    torch.testing.assert_close(graph(*others)[0], function(*others), rtol=1e-12, atol=1e-12)
    return graph


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_held_tensors_become_inputs_and_are_kept_as_they_were():
    table = _random(4)

    def function(z):
        return z * table

    graph = _traced(function, _random(3, 4))
    assert [tuple(c.shape) for c in graph.constants] == [(4,)]
    assert graph.calls == 1
    assert graph.values == 12


def test_writes_into_inputs_are_left_out():
    def function(z, counter):
        counter.add_(1)
        return (z * counter,)

    counter = torch.ones(3)
    graph = trace(function, (torch.ones(3), counter))
    assert torch.equal(counter, torch.ones(3))
    assert torch.equal(graph(torch.ones(3), counter)[0], torch.full((3,), 2.0))
    assert torch.equal(counter, torch.ones(3))


def test_what_depends_on_constants_is_computed_once():
    loc, scale = _random(5).zero_(), torch.full((5,), 0.5).double()

    def function(z):
        return (-((z - loc) ** 2) / (2 * scale**2) - scale.log()).sum(-1)

    graph = _traced(function, _random(3, 5))
    assert graph.constants == ()
    assert set(_calls(graph)) == {"pow", "neg", "mul", "sub", "sum"}


def test_equal_calls_share_one_result():
    graph = _traced(lambda z: z.exp() + (z.exp() + 1) * 2 + (z.exp() + 1.0), _random(3))
    assert _calls(graph)["exp"] == 1


def test_numbers_of_different_type_are_not_one_call():
    """1, 1.0 and True are equal keys of a dictionary; integer and true division are not."""
    values = torch.arange(4)
    graph = trace(lambda v: (v * 2, v * 2.0), (values,))
    whole, real = graph(values)
    assert whole.dtype == torch.int64
    assert real.dtype == torch.float32


def test_work_is_done_before_broadcasting():
    def function(s, x):
        wide = s[:, None].expand(3, 7)
        return (-(x**2) / wide.exp() - wide.exp().log()).sum(1)

    graph = _traced(function, _random(3), _random(3, 7))
    shapes = {
        node.target.__name__: tuple(node.meta["tensor_meta"].shape)
        for node in graph.module.graph.nodes
        if node.op == "call_function" and node.target.__name__.startswith(("exp.", "log.", "recip"))
    }
    assert {shape for name, shape in shapes.items() if "expand" not in name} <= {(3,), (3, 1)}
    assert _calls(graph)["div"] == 0
    assert _calls(graph)["reciprocal"] == 1


def test_sums_over_broadcast_axes_are_products():
    def function(s):
        wide = s[:, None, None].expand(3, 4, 5)
        return wide.sum((1, 2)) + wide.sum(2, keepdim=True)[:, :, 0].sum(1) + wide.sum(0)[0, 0]

    graph = _traced(function, _random(3))
    assert graph.values < 30


@pytest.mark.parametrize(("rows", "units"), [(40, 5), (5, 40), (6, 6)])
def test_products_with_shared_data_are_one_product_for_all_chains(rows, units):
    x = _random(rows, 3)

    def function(w, x):
        def lane(w):
            return torch.tanh(nn.functional.linear(x, w)).square().sum()

        grad, value = vmap(grad_and_value(lane))(w)
        return torch.cat([grad.reshape(-1), value])

    graph = _traced(function, _random(4, units, 3), x)
    calls = _calls(graph)
    assert calls["bmm"] == 0
    assert calls["mm"] == 2


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("rows", [40, 3])
def test_deep_networks_are_the_same_in_every_orientation(rows, lanes):
    x = _random(rows, 3)
    sizes = [(6, 3), (6,), (5, 6), (5,), (1, 5), (1,)]

    def function(x, *parameters):
        def lane(*p):
            h = torch.tanh(nn.functional.linear(x, p[0], p[1]))
            h = torch.relu(nn.functional.linear(h, p[2], p[3]))
            return nn.functional.linear(h, p[4], p[5]).squeeze(-1).square().sum().log1p()

        grads, value = vmap(grad_and_value(lane, tuple(range(6))))(*parameters)
        return torch.cat([*(g.reshape(-1) for g in grads), value])

    _traced(function, x, *(_random(lanes, *size) for size in sizes))


def test_strided_reads_find_the_layout_that_they_expect():
    def function(a, b):
        product = torch.bmm(a, b)  # turned by the rewrite: more rows than columns
        return torch.as_strided(product, (2, 4), (8, 1), 1).sum(1)

    _traced(function, _random(2, 8, 3), _random(2, 3, 2))


def test_places_of_a_constant_mask_are_looked_up_when_tracing():
    mask = torch.tensor([[True, False], [True, True]])

    def function(z):
        return z[:, mask].exp().sum(1)

    graph = _traced(function, _random(3, 2, 2))
    (compiled,) = compile_graph(graph, (z := _random(3, 2, 2),))(z)
    torch.testing.assert_close(compiled, function(z), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.where(z > 0, z, torch.zeros_like(z)).expand(2, 3, 4).mean(0),
        lambda z: z.T.contiguous().T.exp().sum(0, keepdim=True) * torch.ones(3, 1).double(),
        lambda z: 1.0 - z.unsqueeze(0).expand(5, 3, 4).sum((0, 2)),
        lambda z: z.transpose(0, 1).sum(0) / (2 * torch.ones(3).double()),
        lambda z: (z[None] - z[:, None]).square().sum(-1).sqrt().sum(),
        lambda z: torch.cat([z.t(), torch.full((4, 1), 2.0).double()], 1) @ z.new_ones(4),
        lambda z: z.permute(1, 0).unsqueeze(2).transpose(0, 2).cumsum(1).clamp(min=0.1).log(),
        lambda z: (z / z.sum(1, keepdim=True).expand(3, 4)) ** 1.0 * 1.0 + 0.0,
        lambda z: torch.arange(4).double() * z + torch.eye(4).double()[:3] * z.t().sum(0)[:, None],
    ],
)
def test_other_programs_are_unchanged_in_value(function):
    _traced(function, _random(3, 4).abs() + 0.1)


def test_a_failed_factorisation_gives_nan_for_its_own_matrix():
    good, bad = torch.eye(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    with LaneSafe():
        factor = torch.linalg.cholesky(torch.stack([good, bad]))
        inverse = torch.linalg.inv(torch.stack([good, torch.zeros(2, 2)]))
        solved = torch.linalg.solve(torch.stack([good, torch.zeros(2, 2)]), torch.ones(2, 2))
        one = torch.linalg.solve(2 * good, torch.ones(2))
    assert factor.isnan().all((1, 2)).tolist() == [False, True]
    assert inverse.isnan().all((1, 2)).tolist() == [False, True]
    assert solved[0].isfinite().all()
    assert solved[1].isnan().all()
    assert torch.equal(one, torch.full((2,), 0.5))


def test_compiled_tanh_is_right_to_the_last_places():
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.logspace(-8, 1, 10_001)])
    (found,) = compile_graph(lambda x: (torch.tanh(x),), (x,))(x)
    exact = torch.tanh(x.double())
    # Relative error of the fit 6e-8 and about ten roundings of 6e-8, most of them averaged out.
    assert float((found - exact).abs().max()) < 4e-7
    assert float(((found - exact) / exact)[x != 0].abs().max()) < 4e-7
    assert float(found.abs().max()) <= 1.0
    (double,) = compile_graph(lambda x: (torch.tanh(x),), (x.double(),))(x.double())
    torch.testing.assert_close(double, exact, rtol=1e-14, atol=1e-15)


def test_compiled_functions_write_into_what_they_are_called_with():
    def function(state, step):
        state.copy_(state * 2 + step)
        return (state.sum(),)

    example, state = torch.ones(3), torch.ones(3)
    compiled = compile_graph(function, (example, torch.ones(3)))
    assert torch.equal(example, torch.ones(3))
    compiled(state, torch.ones(3))
    compiled(state, torch.ones(3))
    assert torch.equal(state, torch.full((3,), 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiled_density_equals_the_eager_one(toy, dtype):
    bound = bind(Toy(), *toy, dtype=dtype)
    density = Density(bound, chains=3, compile=True)
    z = density.initial_prior(3, 0)
    value, grad = density.value_and_grad(z)
    expected_value, expected_grad = density.graph(z, *density.data_tensors)
    digits = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]  # rounding of sums of 30 terms
    torch.testing.assert_close(value, expected_value, rtol=digits, atol=digits)
    torch.testing.assert_close(
        grad, expected_grad, rtol=digits, atol=digits * float(expected_grad.abs().max())
    )
    assert torch.equal(density.value_and_grad(z)[1], grad)
    assert density.rule == "as asked"


def test_the_rule_counts_and_never_measures(toy):
    bound = bind(Toy(), *toy)
    few, many = Density(bound, draws=200), Density(bound, draws=5000)
    assert not few.compiled
    assert many.compiled
    assert few.rule.startswith("not compiled: 200 draws of a graph of ")
    graph = many._graphs[1]
    assert worth_compiling(graph, 5000) == (many.compiled, many.rule)
    assert worth_compiling(graph, None)[0] is False


def test_without_a_compiler_it_goes_on_uncompiled_unless_asked(toy, monkeypatch):
    def fails(*_):
        raise FitError("inductor could not compile the graph (no compiler)")

    monkeypatch.setattr(graphs, "compile_graph", fails)
    monkeypatch.setattr("pbnn.infer.density.compile_graph", fails)
    bound = bind(Toy(), *toy)
    z = torch.zeros(1, 22)
    by_rule = Density(bound, draws=100_000)
    assert by_rule.compiled
    with pytest.warns(PbnnWarning, match="no compiler.*going on uncompiled"):
        value, _ = by_rule.value_and_grad(z)
    assert value.isfinite().all()
    with pytest.raises(FitError, match="no compiler"):
        Density(bound, compile=True).value_and_grad(z)


@pytest.mark.cuda
def test_a_recorded_graph_repeats_the_function():
    def function(z, data):
        return (torch.tanh(z * data).sum(1), z * data)

    z, data = torch.randn(4, 3, device="cuda"), torch.randn(3, device="cuda")
    recorded = CudaGraph.of(function, (z, data))
    other = torch.randn(4, 3, device="cuda")
    found = recorded(other, data)
    recorded(z, data)  # results must not be overwritten by the next call
    for a, b in zip(found, function(other, data), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_the_density_on_a_gpu_equals_that_on_the_cpu(toy, compiled):
    x, y = toy
    here = Density(bind(Toy(), x, y, dtype=torch.float64), chains=5)
    there = Density(
        bind(Toy(), x, y, dtype=torch.float64, device="cuda"), chains=5, compile=compiled
    )
    z = here.initial_prior(5, 0)
    for a, b in zip(there.value_and_grad(z.cuda()), here.value_and_grad(z), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-9)
