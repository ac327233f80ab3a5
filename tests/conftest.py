"""Fixtures of all tests: a clean start, proof that nothing was left behind, data, and skips."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

SHARED = Path(__file__).parents[2] / "shared"


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Seed torch and use one thread; afterwards Pyro's global param store must be empty."""
    if "torch" not in sys.modules:  # the data and export layers are tested without it
        yield
        return
    import pyro
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pyro.clear_param_store()
    yield
    left = list(pyro.get_param_store().keys())
    pyro.clear_param_store()
    assert left == [], f"left in Pyro's global param store: {left}"


@pytest.fixture
def unchanged():
    """A context manager that fails if its block changes global state, or the model it is given."""
    import pyro
    import torch

    def state(model):
        held = {} if model is None else model.state_dict()
        return {
            "torch RNG": torch.get_rng_state().tolist(),
            "numpy RNG": str(np.random.get_state()),  # noqa: NPY002
            "Python RNG": random.getstate(),
            "param store": list(pyro.get_param_store().keys()),
            "validation": torch.distributions.Distribution._validate_args,
            "grad mode": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "state_dict": {name: value.tolist() for name, value in held.items()},
            "training": [m.training for m in model.modules()] if model is not None else [],
            "gradients": [p.grad is None for p in model.parameters()] if model is not None else [],
        }

    @contextmanager
    def check(model=None):
        before = state(model)
        yield
        after = state(model)
        changed = [name for name, value in before.items() if after[name] != value]
        assert changed == [], f"changed: {changed}"

    return check


@pytest.fixture
def toy():
    """The data of the toy of the list of faults: x `(30, 2)`, y `(30,)`."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(30, 2)
        return x, x[:, 0] - x[:, 1] + 0.1 * torch.randn(30)


@pytest.fixture
def shared() -> Path:
    """The folder of shared data, or a skip."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared data beside the checkout")
    return SHARED
