"""The guide of models/: its code runs, its tables are complete, its messages those that come."""

import re
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from network_cases import MODELS
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.nn import functional

import pbnn
from pbnn.errors import PbnnError
from pbnn.front_door import bind
from pbnn.infer.density import Density
from pbnn.priors import normal, place_priors

TEXT = (MODELS / "README.md").read_text(encoding="utf-8")
X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, 0]


def test_every_file_is_in_the_table():
    assert set(re.findall(r"\((\w+\.py)\)", TEXT)) == {path.name for path in MODELS.glob("*.py")}


def test_code_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert "0.weight_local" in capsys.readouterr().out


def test_every_rule_is_in_the_table():
    rules = set(pbnn.priors.rules.__all__) - {"sparse_scale"}
    assert set(re.findall(r"`(\w+)\(scale", TEXT)) == rules


class Right(PyroModule):
    """A file without a mistake; each other class makes one."""

    priors = {"*": normal()}  # noqa: RUF012
    constants = ()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 5), nn.Linear(5, 1)])
        place_priors(self, self.priors, constants=self.constants)
        self.scale = PyroSample(dist.HalfNormal(1.0))

    def hidden(self, x):
        return torch.tanh(self.layers[0](x))

    def network(self, x):
        return self.layers[1](self.hidden(x)).squeeze(-1)

    def observed(self, f):
        return dist.Normal(f, self.scale)

    def plate(self, x):
        return pyro.plate("data", x.shape[0])

    def forward(self, x, y=None):
        f = self.network(x)
        observed = self.observed(f)
        with self.plate(x):
            pyro.sample("y", observed, obs=y)
        return f


class NoSqueeze(Right):
    def network(self, x):
        return self.layers[1](self.hidden(x))


class NoEvent(Right):
    def __init__(self):
        super().__init__()
        self.layers[0].weight = PyroSample(dist.Normal(0.0, 1.0).expand([5, 2]))


class TwoOutputs(Right):
    def network(self, x):
        return self.layers[1](self.hidden(x)).expand(-1, 2)


class FixedPlate(Right):
    def plate(self, x):
        return pyro.plate("data", 30)


class Subsample(Right):
    def forward(self, x, y=None):
        f = self.network(x)
        with pyro.plate("data", x.shape[0], subsample_size=min(10, len(x))) as rows:
            pyro.sample("y", dist.Normal(f[rows], 1.0), obs=None if y is None else y[rows])
        return f


class NoReturn(Right):
    def forward(self, x, y=None):
        super().forward(x, y)


class YRequired(Right):
    def forward(self, x, y):
        return super().forward(x, y)


class Dropout(Right):
    def hidden(self, x):
        return functional.dropout(super().hidden(x))


class ParamInForward(Right):
    def observed(self, f):
        one = torch.tensor(1.0)
        return dist.Normal(f, pyro.param("sigma", one, constraint=dist.constraints.positive))


class Constants(Right):
    priors = {"layers.0.*": normal()}  # noqa: RUF012
    constants = "layers.1.*"


class Unmatched(Right):
    priors = {"*.weight": normal()}  # noqa: RUF012


class Slip(Right):
    priors = {"layer.*": normal(), "*": normal()}  # noqa: RUF012


class Discrete(Right):
    def network(self, x):
        return super().network(x) + pyro.sample("k", dist.Bernoulli(0.5))


class Float32(Right):
    def network(self, x):
        return super().network(x) + pyro.sample("b", dist.Normal(torch.zeros(()), 1.0))


class Unused(Right):
    def __init__(self):
        super().__init__()
        self.extra = PyroSample(dist.Normal(0.0, 1.0))

    def network(self, x):
        assert self.extra is not None
        return super().network(x)


class If(Right):
    def hidden(self, x):
        h = super().hidden(x)
        return h if h.mean() > 0 else -h


def messages(road):
    """Return what a road says: its error, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            road()
        except PbnnError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]


MISSING = torch.where(torch.arange(30) == 3, torch.nan, Y)
ROADS = {
    "no squeeze": lambda: bind(NoSqueeze(), X, Y),
    "no event": lambda: bind(NoEvent(), X, Y),
    "two outputs": lambda: bind(TwoOutputs(), X, torch.stack([Y, Y], 1)),
    "fixed plate": lambda: bind(FixedPlate(), X, Y),
    "subsample": lambda: bind(Subsample(), X, Y),
    "no return": lambda: bind(NoReturn(), X, Y),
    "y required": lambda: bind(YRequired(), X, Y),
    "dropout": lambda: bind(Dropout(), X, Y),
    "param in forward": lambda: bind(ParamInForward(), X, Y),
    "constants": lambda: pbnn.fit_nuts(Constants(), X, Y, progress=False),
    "unmatched": Unmatched,
    "slip": Slip,
    "discrete": lambda: bind(Discrete(), X, Y),
    "float32": lambda: bind(Float32(), X, Y, dtype=torch.float64),
    "missing": lambda: bind(Right(), X, MISSING),
    "unused": lambda: bind(Unused(), X, Y),
    "if": lambda: Density(bind(If(), X, Y), chains=2, compile=False),
}
TABLE = re.findall(r"^\| .*? \| (.*) \|$", TEXT.split("## Usual mistakes")[1], flags=re.MULTILINE)


@pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)
def test_message_is_the_one_in_the_table(road):
    said = messages(road)
    assert any(row in message for row in TABLE for message in said), said


def test_each_message_in_the_table_is_seen():
    assert messages(lambda: bind(Right(), X, Y)) == []
    assert len(TABLE) == len(ROADS) + 1  # and the heading
