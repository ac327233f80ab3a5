"""A checkpoint belongs to one model: others with the same sites are refused, on every road."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pbnn
from pbnn.errors import FileError

ROADS = {
    "nuts": (pbnn.fit_nuts, {"chains": 2, "warmup": 10, "draws": 10, "compile": False}),
    "svi": (pbnn.fit_svi, {"steps": 20, "draws": 10}),
}


def model(prior=1.0, noise=0.1, power=1):
    def linear(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, prior).expand([2]).to_event(1))
        f = (x @ w) ** power
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(f, noise), obs=y)
        return f

    return linear


@pytest.mark.filterwarnings("ignore::pbnn.errors.ConvergenceWarning")
@pytest.mark.parametrize("road", ROADS)
def test_another_model_with_the_same_sites_is_refused(road, tmp_path):
    fit, options = ROADS[road]
    x = torch.randn(20, 2)
    fixed = {"checkpoint": tmp_path / "run", "progress": False, **options}
    first = fit(model(), x, x[:, 0], **fixed)
    again = fit(model(), x, x[:, 0], resume=True, **fixed)
    assert torch.equal(first.draws["w"], again.draws["w"])
    for other in (model(prior=3.0), model(noise=5.0), model(power=2)):
        with pytest.raises(FileError, match="a checkpoint of another run"):
            fit(other, x, x[:, 0], resume=True, **fixed)


@pytest.mark.parametrize("road", ROADS)
def test_a_checkpoint_that_is_a_file_is_refused(road, tmp_path):
    fit, options = ROADS[road]
    (tmp_path / "file").write_text("")
    x = torch.randn(20, 2)
    with pytest.raises(FileError, match="file cannot be written"):
        fit(model(), x, x[:, 0], checkpoint=tmp_path / "file", progress=False, **options)
