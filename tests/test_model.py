"""Model files and models: loading, errors in one line, and runs that leave no trace."""

import hashlib
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pbnn import check_model, load_model
from pbnn.errors import ModelError
from pbnn.front_door import prior_values
from pbnn.model import copied, isolated, leaves, run, take

SOURCE = """
from __future__ import annotations

import dataclasses

import torch
from pyro.nn import PyroModule


@dataclasses.dataclass
class Widths:
    hidden: int | None = None


class Model(PyroModule):
    def __init__(self, in_features: int, *, hidden: int = 3, fail: bool = False):
        super().__init__()
        if fail:
            raise RuntimeError("too wide")
        self.widths = Widths(hidden)
        self.fc = torch.nn.Linear(in_features, hidden)
"""


def write(folder, source, name="net.py"):
    path = folder / name
    path.write_text(source, encoding="utf-8")
    return path


def test_load_records_name_hash_and_options(tmp_path):
    path = write(tmp_path, SOURCE)
    model = load_model(path, 2, hidden=4)
    assert model.fc.weight.shape == (4, 2)
    assert model.pbnn_source == {
        "file": "net.py",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "options": {"in_features": 2, "hidden": 4},
    }


def test_the_file_that_is_hashed_is_the_file_that_runs(tmp_path):
    """Two files of one size in one second: cached bytecode would be the first one's."""
    for hidden in (3, 7, 5):
        path = write(tmp_path, SOURCE.replace("hidden: int = 3", f"hidden: int = {hidden}"))
        model = load_model(path, 2)
        assert model.fc.out_features == hidden
        assert model.pbnn_source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [p.name for p in tmp_path.iterdir()] == ["net.py"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (None, {}, "no such model file; expected a Python file with `class Model`"),
        ("class Model(:", {}, "failed to import: SyntaxError: invalid syntax"),
        ("import missing_module_x", {}, "failed to import: ModuleNotFoundError"),
        ("1 / 0", {}, "failed to import: ZeroDivisionError: division by zero"),
        ("class Net: ...", {}, "defines no class named Model; write `class Model(PyroModule)`"),
        ("def Model(): ...", {}, "defines no class named Model"),
        (SOURCE, {"hiden": 3}, "unexpected keyword argument 'hiden'; Model takes (in_features"),
        (SOURCE, {"in_features": None}, "missing a required argument: 'in_features'"),
        (SOURCE, {"fail": True}, "failed: RuntimeError: too wide"),
        (SOURCE, {"hidden": "wide"}, "failed: TypeError"),
    ],
)
def test_load_errors_name_the_file_in_one_line(tmp_path, source, options, message):
    path = tmp_path / "net.py" if source is None else write(tmp_path, source)
    with pytest.raises(ModelError) as caught:
        load_model(path, **{"in_features": 2, **options})
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_of_a_folder(tmp_path):
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path}: no such model file")):
        load_model(tmp_path, 2)


def test_copy_is_in_eval_mode_and_leaves_the_model_alone(unchanged):
    model = Toy().train()
    model.drop, model.norm = nn.Dropout(), nn.BatchNorm1d(2)
    scale = torch.ones(2)
    model.extra = PyroSample(dist.Normal(torch.zeros(2), scale).to_event(1))
    with unchanged(model):
        copy = copied(model, torch.device("cpu"), torch.float64)
    assert model.norm.weight.dtype == scale.dtype == torch.float32
    assert copy.norm.weight.dtype == torch.float64
    assert copy.extra.dtype == torch.float64
    assert not any(module.training for module in copy.modules())
    assert copy.norm.weight is not model.norm.weight


def test_copy_moves_every_tensor_of_a_prior():
    one = torch.ones(3)
    priors = {
        "independent": dist.Normal(0 * one, one).to_event(1),
        "expanded": dist.Normal(0 * one[0], one[0]).expand([3]).to_event(1),
        "masked": dist.Normal(0 * one, one).mask(torch.tensor(True)).to_event(1),
        "transformed": dist.LogNormal(0 * one, one).to_event(1),
        "affine": dist.TransformedDistribution(
            dist.Normal(0 * one, one), [dist.transforms.AffineTransform(one, 2 * one)]
        ).to_event(1),
        "mixture": dist.MixtureSameFamily(dist.Categorical(one), dist.Normal(one, one)),
        "multivariate": dist.MultivariateNormal(one, torch.eye(3)),
        "dirichlet": dist.Dirichlet(one),
    }
    model = Toy()
    for name, prior in priors.items():
        setattr(model, name, PyroSample(prior))
    copy = copied(model, torch.device("cpu"), torch.float64)
    for name in priors:
        value = getattr(copy, name)
        prior = copy._pyro_samples[name]
        assert value.dtype == prior.log_prob(value).dtype == torch.float64, name
        assert getattr(model, name).dtype == torch.float32, name


def test_isolated_block_leaves_no_trace(unchanged):
    with unchanged(), isolated(3):
        first = torch.randn(2)
        pyro.param("left", torch.zeros(1))
    with unchanged(), isolated(3), torch.no_grad():
        assert torch.equal(first, torch.randn(2))
    with torch.no_grad(), isolated():
        assert torch.is_grad_enabled()

    def failing():
        with isolated(3):
            torch.randn(2)
            pyro.param("left", torch.zeros(1))
            raise ZeroDivisionError

    with unchanged(), pytest.raises(ZeroDivisionError):
        failing()


def test_run_at_given_values(toy):
    x, y = toy
    with isolated(0), prior_values(torch.float32, torch.device("cpu")):
        drawn = run(Toy(), {}, x)
    values = {n: drawn.nodes[n]["value"] for n in ("fc1.weight", "fc1.bias", "fc2.weight")}
    values |= {"fc2.bias": torch.tensor([0.5]), "sigma": torch.tensor(2.0)}
    with isolated(0):
        trace = run(Toy(), values, x, y)
    hidden = torch.tanh(x @ values["fc1.weight"].T + values["fc1.bias"])
    f = (hidden @ values["fc2.weight"].T + 0.5).squeeze(-1)
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], f)
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], dist.Normal(f, 2.0).log_prob(y))


def test_run_checks_arguments_only_when_asked(toy):
    x, y = toy
    bad = {"sigma": torch.tensor(-1.0)}
    with isolated(0), prior_values(torch.float32, torch.device("cpu")):
        with pytest.raises(ValueError, match="Expected parameter scale"):
            run(Toy(), bad, x, y, checks=True)
        found = run(Toy(), bad, x, y).nodes["y"]
    assert found["fn"].log_prob(y).isnan().all()


def test_leaves_and_rows_of_data():
    data = {"a": torch.arange(3), "b": torch.arange(6).reshape(3, 2)}
    assert [name for name, _ in leaves(data)] == ["a", "b"]
    assert leaves(None) == [] == leaves({})
    assert take(None, slice(1)) is None
    assert take(data, slice(1, 3))["b"].tolist() == [[2, 3], [4, 5]]
    assert take(data["a"], torch.tensor([2, 0])).tolist() == [2, 0]


def test_a_prior_that_closes_over_the_model_reads_the_copy():
    class Outer(PyroModule):
        def __init__(self):
            super().__init__()
            self.fc = PyroModule[nn.Linear](2, 1, bias=False)
            self.tau = PyroSample(dist.HalfCauchy(1.0))
            self.fc.weight = PyroSample(
                lambda _: dist.Normal(0.0, self.tau).expand([1, 2]).to_event(2)
            )

        def forward(self, x, y=None):
            f = self.fc(x).squeeze(-1)
            with pyro.plate("data", x.shape[0]):
                pyro.sample("y", dist.Normal(f, 1.0), obs=y)
            return f

    model = Outer()
    copy = copied(model, torch.device("cpu"), torch.float32)
    x, values = torch.ones(3, 2), {"tau": torch.tensor(2.0), "fc.weight": torch.zeros(1, 2)}
    trace = run(copy, values, x, None)
    assert set(values) <= set(trace.nodes)
    assert float(trace.nodes["fc.weight"]["fn"].base_dist.scale.max()) == 2.0
    assert list(check_model(model, x, x[:, 0])["site"]) == ["tau", "fc.weight", "y"]
