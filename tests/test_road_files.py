"""Every road's posterior, saved here and loaded in another process, predicts the same bits."""

import importlib.util
import subprocess
import sys

import pytest
import torch

import pbnn

MODEL = """
import pyro
import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import nn


class Model(PyroModule):
    '''A network with BatchNorm, dropout and a constant.'''

    def __init__(self, in_features):
        super().__init__()
        self.fc1 = PyroModule[nn.Linear](in_features, 4)
        self.norm = PyroModule[nn.BatchNorm1d](4)
        self.fc2 = PyroModule[nn.Linear](4, 1)
        for layer in (self.fc1, self.norm, self.fc2):
            for name, value in list(layer.named_parameters(recurse=False)):
                prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.ndim)
                setattr(layer, name, PyroSample(prior))
        self.drop = nn.Dropout(0.2)

    def forward(self, x, y=None):
        f = self.fc2(self.drop(self.norm(self.fc1(x)).tanh())).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f
"""

OTHER = """
import sys, torch, pbnn
torch.set_num_threads(1)
model = pbnn.load_model(sys.argv[1] + "/model.py", in_features=2)
x = torch.load(sys.argv[1] + "/x.pt", weights_only=True)
for road in sys.argv[2:]:
    posterior = pbnn.Posterior.load(f"{sys.argv[1]}/{road}.pt")
    torch.save(pbnn.predictive(model, posterior, x), f"{sys.argv[1]}/{road}.out.pt")
"""

ROADS = {
    "svi": {"steps": 3, "draws": 3},
    "nuts": {"chains": 2, "warmup": 3, "draws": 3, "max_tree_depth": 2, "init": "prior"},
    "map": {"steps": 3},
    "swag": {"steps": 3, "snapshots": 2, "every": 1, "draws": 3},
    "ensemble": {"members": 2, "steps": 3},
    "dropout": {"steps": 3, "draws": 3},
    "subspace": {
        "rank": 1, "draws": 3, "steps": 3, "basis": "random",
        "inner": {"chains": 2, "warmup": 3, "max_tree_depth": 2, "init": "prior"},
    },
    "laplace": {"steps": 3, "draws": 3, "structure": "diag"},
    "sgmcmc": {"steps": 6, "draws": 2, "chains": 2, "init": "prior", "lr": 1e-4},
}  # fmt: skip


if importlib.util.find_spec("laplace") is None:
    del ROADS["laplace"]
# With masks, with buffers by draw, with a plane, from batches: what no other test sends elsewhere.
SHORT = ["swag", "dropout", "subspace", "sgmcmc"]


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
@pytest.mark.parametrize(
    "roads", [SHORT, pytest.param([*ROADS], marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_road_predicts_the_same_bits_in_another_process(tmp_path, roads):
    (tmp_path / "model.py").write_text(MODEL)
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    torch.save(x, tmp_path / "x.pt")
    model = pbnn.load_model(tmp_path / "model.py", in_features=2)
    expected, without_buffers = {}, {"svi", "nuts", "sgmcmc"}
    for road in roads:
        fit = getattr(pbnn, f"fit_{road}")
        posterior = fit(model, x, x[:, 0], compile=False, progress=False, **ROADS[road])
        assert set(posterior.buffers) >= {"norm.running_mean", "norm.running_var"}
        trained = bool((posterior.buffers["norm.running_mean"] != 0).any())
        assert trained == (road not in without_buffers)
        posterior.save(tmp_path / f"{road}.pt")
        expected[road] = pbnn.predictive(model, posterior, x)
    command = [sys.executable, "-c", OTHER, str(tmp_path), *roads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for road, values in expected.items():
        found = torch.load(tmp_path / f"{road}.out.pt", weights_only=True)
        for name, value in values.items():
            assert torch.equal(found[name], value), road
