"""The Posterior: what it selects, and that its file gives back the same bits or is refused."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from model_cases import Toy, prior_posterior
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pbnn import Posterior, predict
from pbnn.errors import FileError
from pbnn.infer import posterior as posterior_module

ROOT = Path(__file__).parents[1]


def saved_fields(posterior):
    return {
        name: getattr(posterior, name)
        for name in ("draws", "deterministic", "stats", "constants", "buffers", "history")
    }


def same(a, b):
    fields, others = saved_fields(a), saved_fields(b)
    for name, tensors in fields.items():
        assert list(tensors) == list(others[name])
        for key, value in tensors.items():
            other = others[name][key]
            assert value.dtype == other.dtype
            assert torch.equal(value, other), (name, key)
    rest = [f.name for f in dataclasses.fields(a) if f.name not in fields]
    rest.remove("approximation")
    assert {name: getattr(a, name) for name in rest} == {name: getattr(b, name) for name in rest}


@pytest.fixture
def posterior():
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    return Posterior(
        draws={"w": randn(2, 3, 4), "s": randn(2, 3).exp(), "k": torch.ones(2, 3, 0)},
        deterministic={"d": randn(2, 3, 5)},
        stats={"lp": randn(2, 3), "diverging": torch.tensor([[True, False, False]] * 2)},
        constants={"c": randn(2)},
        buffers={"count": torch.tensor(7)},
        history={"elbo": randn(9)},
        method="svi",
        markov=False,
        seconds=1.25,
        approximation={"family": "normal", "sites": [["w", [4]]], "tensors": {"loc": randn(4)}},
        provenance={"seed": 3, "options": {"rank": None, "lr": 0.01}, "versions": {"a": "1"}},
        mask_seed=5,
    )


def test_flat_puts_chains_one_after_another(posterior):
    flat = posterior.flat()
    assert (posterior.chains, posterior.draws_per_chain) == (2, 3)
    assert flat["w"].shape == (6, 4)
    assert torch.equal(flat["w"][3], posterior.draws["w"][1, 0])
    assert torch.equal(posterior.flat(2, 4)["s"], flat["s"][2:4])


def test_select_chains_and_draws(posterior):
    part = posterior.select(chains=[1], draws=slice(1, None))
    for name in ("draws", "deterministic", "stats"):
        for key, value in getattr(part, name).items():
            assert torch.equal(value, getattr(posterior, name)[key][[1], 1:])
    assert (part.chains, part.draws_per_chain) == (1, 2)
    assert part.constants is posterior.constants
    assert posterior.select().draws["w"].shape == (2, 3, 4)


def own_by_draw(posterior):
    """Return a posterior whose constant and one buffer differ by draw."""
    own = {"mean": torch.arange(12.0).reshape(2, 3, 2), "count": torch.tensor(7)}
    constants = {"c": torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1))}
    return dataclasses.replace(posterior, constants=constants, buffers=own, per_draw=("c", "mean"))


def test_constants_and_buffers_may_differ_by_draw(posterior, tmp_path):
    whole = own_by_draw(posterior)
    state = whole.state()
    assert list(state) == ["c", "mean"]
    assert torch.equal(state["mean"][3], whole.buffers["mean"][1, 0])
    assert torch.equal(whole.state(2, 4)["c"], state["c"][2:4])
    first = whole.first_state()
    assert torch.equal(first["c"], whole.constants["c"][0, 0])
    assert first["count"] is whole.buffers["count"]
    part = whole.select(chains=[1], draws=slice(1, None))
    assert torch.equal(part.constants["c"], whole.constants["c"][[1], 1:])
    assert torch.equal(part.buffers["mean"], whole.buffers["mean"][[1], 1:])
    assert part.buffers["count"] is whole.buffers["count"]
    loaded = Posterior.load(whole.save(tmp_path / "a.pt"))
    same(whole, loaded)
    assert loaded.per_draw == ("c", "mean")


def test_file_of_the_first_format_still_loads(posterior, tmp_path):
    path = posterior.save(tmp_path / "a.pt")
    record = torch.load(path, weights_only=True)
    meta = json.loads(record["json"])
    del meta["per_draw"]  # what format 1 did not have
    record["json"] = json.dumps({**meta, "format": 1})
    torch.save(record, path)
    loaded = Posterior.load(path)
    same(posterior, loaded)
    assert loaded.per_draw == ()


def test_is_frozen(posterior):
    with pytest.raises(dataclasses.FrozenInstanceError):
        posterior.method = "nuts"


@pytest.mark.parametrize("mmap", [False, True])
def test_save_and_load_give_the_same_bits(posterior, tmp_path, mmap, unchanged):
    path = tmp_path / "folder" / "a.pt"
    with unchanged():
        assert posterior.save(path) == path
        loaded = Posterior.load(path, mmap=mmap)
    same(posterior, loaded)
    assert loaded.approximation["family"] == "normal"
    assert loaded.approximation["sites"] == posterior.approximation["sites"]
    assert torch.equal(
        loaded.approximation["tensors"]["loc"], posterior.approximation["tensors"]["loc"]
    )
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]


def test_file_needs_no_unpickling_of_objects(posterior, tmp_path):
    record = torch.load(posterior.save(tmp_path / "a.pt"), weights_only=True)
    assert json.loads(record["json"])["format"] == posterior_module.FORMAT


def test_part_of_a_posterior_is_saved_without_the_rest(posterior, tmp_path):
    big = dataclasses.replace(
        posterior,
        draws={"w": torch.randn(1, 1000, 100)},
        stats={"lp": torch.zeros(1, 1000)},
        deterministic={},
    )
    part = big.select(draws=slice(10, 20))
    path = part.save(tmp_path / "part.pt")
    assert path.stat().st_size < 20_000  # 4 kB of draws; the whole has 400 kB
    same(part, Posterior.load(path))


class Normed(PyroModule):
    """Running statistics in buffers, parameters without priors, a deterministic site."""

    def __init__(self):
        super().__init__()
        self.fc1, self.norm = nn.Linear(2, 4), nn.BatchNorm1d(4)
        self.fc2 = PyroModule[nn.Linear](4, 1)
        self.fc2.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))

    def forward(self, x, y=None):
        f = self.fc2(torch.tanh(self.norm(self.fc1(x)))).squeeze(-1)
        pyro.deterministic("norm", self.fc2.weight.norm())
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)
        return f


LOAD = """
import sys
import torch
from test_posterior import Normed
from pbnn import Posterior, predict

torch.set_num_threads(1)
torch.manual_seed(1)
model = Normed()                      # other initial values, other running statistics
prediction = predict(model, Posterior.load(sys.argv[1]), torch.load(sys.argv[2]))
torch.save({"mean": prediction.mean, "scale": prediction.scale, **{
    str(p): q for p, q in prediction.quantiles.items()}}, sys.argv[3])
"""


def test_another_process_predicts_the_same_bits(toy, tmp_path):  # fault 29
    model = Normed()
    with torch.no_grad():
        model.norm.running_mean += torch.randn(4)
        model.norm.running_var *= 2.0
    x_new = torch.randn(11, 2)
    posterior = prior_posterior(model, *toy)
    expected = predict(model, posterior, x_new)
    files = [str(tmp_path / name) for name in ("posterior.pt", "x.pt", "out.pt")]
    posterior.save(files[0])
    torch.save(x_new, files[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, *files], check=True, env=environment
    )
    found = torch.load(files[2])
    assert torch.equal(found["mean"], expected.mean)
    assert torch.equal(found["scale"], expected.scale)
    assert all(torch.equal(found[str(p)], q) for p, q in expected.quantiles.items())


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil-ran"),))


def flip(path):
    """Change some bytes inside a tensor, and leave the archive's directory as it was."""
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda info: info.file_size)
        content = archive.read(info)
    data = bytearray(path.read_bytes())
    start = bytes(data).index(content)
    data[start + 8] ^= 255
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: path.unlink(),
            "no such file; expected a posterior written by Posterior.save",
        ),
        (lambda path: path.write_bytes(b""), "not a posterior written by Posterior.save"),
        (lambda path: path.write_bytes(path.read_bytes()[:-200]), "or cut short"),
        (flip, "damaged (checksum of"),
        (lambda path: path.write_bytes(pickle.dumps(Evil())), "not a posterior"),
        (lambda path: torch.save({"json": Evil()}, path), "not a posterior"),
        (lambda path: torch.save({"a": torch.ones(1)}, path), "not a posterior"),
        (lambda path: torch.save({"json": "{}"}, path), "not a posterior"),
        (
            lambda path: torch.save({"json": '{"format": 99}'}, path),
            "its format is 99, and not one of 1, 2; read it",
        ),
        (lambda path: torch.save({"json": '{"format": 1}'}, path), "not a posterior"),
    ],
)
def test_other_files_are_refused_and_not_executed(
    posterior, tmp_path, damage, message, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = posterior.save(tmp_path / "a.pt")
    damage(path)
    with pytest.raises(FileError) as caught:
        Posterior.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert not (tmp_path / "evil-ran").exists()


def test_interrupted_save_leaves_the_old_file(posterior, tmp_path, monkeypatch):
    path = posterior.save(tmp_path / "a.pt")
    before = path.read_bytes()

    def interrupted(record, temporary):
        Path(temporary).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        posterior.select(chains=[0]).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_provenance_is_plain_json(toy):
    model = Toy()
    model.pbnn_source = {"file": "a.py", "options": {"activation": torch.tanh, "widths": (3, 4)}}
    found = prior_posterior(model, *toy).provenance
    assert found == json.loads(json.dumps(found))
    assert found["observed"] == ["y"]
    assert found["rows"] == 30
    assert found["dtype"] == "float32"
    assert found["model"]["options"]["widths"] == [3, 4]


def test_few_draws_come_again():
    posterior = Posterior(
        draws={"w": torch.arange(6.0).reshape(2, 3)},
        stats={"lp": torch.zeros(2, 3)},
        method="nuts",
        markov=True,
        seconds=0.0,
    )
    again = posterior.repeated(7)
    assert again.draws["w"].tolist() == [[0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5]]
    assert posterior.repeated(6) is posterior
