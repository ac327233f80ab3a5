from types import SimpleNamespace

import pytest
import torch
from density_cases import schools
from model_cases import Toy

from pbnn.front_door import bind
from pbnn.infer.compiled import compile_step, group_size, worth_compiling_step
from pbnn.infer.density import Density
from pbnn.infer.engine import Engine, eager
from pbnn.infer.lanes import Rule
from pbnn.infer.options import Options
from pbnn.infer.sampler import sample

OPTIONS = Options(warmup=30, draws=20, rule=Rule(max_tree_depth=5))


def start():
    return torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(3, 10)


def test_the_compiled_step_is_the_eager_one():
    # Rounding differs, and a chaotic trajectory makes it grow: at first near 1e-16, and still far
    # below any decision of the tree after two blocks.
    plain, built = (Engine.start(schools, start(), OPTIONS) for _ in range(2))
    take_plain = eager(schools, OPTIONS.rule)
    take_built = compile_step(lambda z: schools(z), (), built)
    before = built.lanes.sample_z.clone()
    for _ in range(2):
        plain.advance(take_plain)
        built.advance(take_built)
    assert not torch.equal(built.lanes.sample_z, before)
    for name, value in plain.lanes._asdict().items():
        other = getattr(built.lanes, name)
        if value.is_floating_point():
            assert torch.allclose(value, other, rtol=1e-6, atol=1e-8, equal_nan=True), name
        else:
            assert torch.equal(value, other), name
    assert (plain.done == built.done).all()
    assert torch.allclose(plain.store.draws, built.store.draws, rtol=1e-6, atol=1e-8)


def test_compiled_runs_repeat_and_go_on_from_checkpoints(tmp_path):
    stop = False

    def stepper(engine):
        take = compile_step(lambda z: schools(z), (), engine)

        def interrupted(*arguments):
            if stop and engine.calls >= 96:
                raise KeyboardInterrupt
            return take(*arguments)

        return interrupted

    whole = sample(schools, start, OPTIONS, stepper=stepper)
    stop = True
    part = sample(schools, start, OPTIONS, stepper=stepper, checkpoint=tmp_path, every=0.0)
    assert part.interrupted
    stop = False
    result = sample(schools, start, OPTIONS, stepper=stepper, checkpoint=tmp_path, resume=True)
    assert torch.equal(result.draws, whole.draws)


def test_lanes_in_groups_draw_the_same_on_one_thread_and_on_two():
    def stepper(group):
        return lambda engine: compile_step(lambda z: schools(z), (), engine, group)

    def run(group, threads):
        torch.set_num_threads(threads)
        try:
            result = sample(schools, six, options, stepper=stepper(group))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(1)
        return result.draws

    def six():
        return torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(6, 10)

    options = Options(warmup=0, draws=6, step_size=0.2, rule=Rule(max_tree_depth=5))
    one, two = run(2, 1), run(2, 2)
    assert torch.equal(one, two)
    assert torch.allclose(one, sample(schools, six, options).draws, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("values", "chains", "size"),
    [
        (80_000, 1, 1),
        (80_000, 4, 2),  # two threads' worth
        (80_000, 16, 4),  # what the cache holds
        (80_000, 64, 4),
        (80_000, 6, 3),
        (80_000, 7, 7),  # no good divisor
        (10**7, 16, 1),
        (200, 16, 16),  # too little work for a second call
        (200, 4096, 2048),
    ],
)
def test_groups_hold_what_the_cache_holds(values, chains, size):
    assert group_size(SimpleNamespace(values=values * chains), chains) == size


@pytest.mark.parametrize("chains", [1, 4])
def test_few_draws_of_a_small_model_are_not_compiled(chains):
    # Compile time counts: examples/benchmark_nuts.py prints what it costs beside what it saves.
    x = torch.randn(30, 2)
    density = Density(bind(Toy(), x, x[:, 0]), chains=chains, compile=False)
    graph = density._prepare(chains)
    few, reason = worth_compiling_step(graph, density.dim, 200)
    assert not few
    assert reason.startswith("not compiled: ")
    many, reason = worth_compiling_step(graph, density.dim, 20_000)
    assert many
    assert reason.startswith("compiled: ")


@pytest.mark.cuda
def test_chains_on_a_gpu_draw_what_they_draw_on_the_cpu():
    def on_gpu():
        return start().cuda()

    def stepper(engine):
        return compile_step(lambda z: schools(z), (), engine)

    options = Options(warmup=0, draws=5, step_size=0.2, rule=Rule(max_tree_depth=5))
    host = sample(schools, start, options)
    eager_draws = sample(schools, on_gpu, options).draws
    first = sample(schools, on_gpu, options, stepper=stepper).draws
    second = sample(schools, on_gpu, options, stepper=stepper).draws
    assert torch.equal(first, second)
    assert torch.allclose(first, eager_draws, atol=1e-6)
    assert torch.allclose(first, host.draws, atol=1e-6)
