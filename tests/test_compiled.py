import pytest
import torch
from density_cases import schools

from pbnn.infer.compiled import compile_step
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
