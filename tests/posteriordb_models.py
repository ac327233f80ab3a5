"""Six reference posteriors: data, Pyro model, log density written by hand, reported parameters."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lgamma, log, pi
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.nn.functional import softplus

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "posteriordb"
NAMES = ("eight_schools", "kidscore", "gauss_mix", "ar", "gp", "garch")

_FILES = {
    "eight_schools": "eight_schools-eight_schools_noncentered",
    "kidscore": "kidiq-kidscore_momiq",
    "gauss_mix": "low_dim_gauss_mix-low_dim_gauss_mix",
    "ar": "arK-arK",
    "gp": "gp_pois_regr-gp_regr",
    "garch": "garch-garch11",
}


@dataclass(frozen=True)
class Problem:
    """A posterior with its reference.

    Attributes:
        model: The Pyro model `(x, y=None)`.
        x: Its input.
        y: Its observations.
        log_density: By hand, from one draw's unconstrained values by site: the log joint density
            with the log |det J| of the same bijections, up to no constant at all.
        reported: From values by site `(..., *shape)` to the reference's parameters `(...)` by name.
        reference: By parameter: mean, sd, mean_of_square, … from 10,000 reference draws.
    """

    model: Callable[..., Any]
    x: Tensor | None
    y: Tensor
    log_density: Callable[[Mapping[str, Tensor]], Tensor]
    reported: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    reference: Mapping[str, Mapping[str, float]]


def available() -> bool:
    """Whether the data are at hand."""
    return FOLDER.is_dir()


def problem(name: str, dtype: torch.dtype = torch.float64) -> Problem:
    """Load one of `NAMES`."""
    record = json.loads((FOLDER / f"{_FILES[name]}.json").read_text())
    data = {
        key: torch.tensor(value, dtype=dtype) if isinstance(value, list) else value
        for key, value in record["data"].items()
    }
    return Problem(*globals()[f"_{name}"](data), record["reference"])


def _normal(value: Tensor, mean: Any, scale: Any) -> Tensor:
    scale = torch.as_tensor(scale, dtype=value.dtype)
    return -0.5 * ((value - mean) / scale) ** 2 - scale.log() - 0.5 * log(2 * pi)


def _half_cauchy(value: Tensor, scale: float) -> Tensor:
    return log(2 / (pi * scale)) - (1 + (value / scale) ** 2).log()


def _unit(z: Tensor) -> tuple[Tensor, Tensor]:
    """Map to the unit interval; return the value and log |det J|."""
    return z.sigmoid(), -softplus(z) - softplus(-z)


def _indexed(name: str, value: Tensor) -> dict[str, Tensor]:
    return {f"{name}[{i + 1}]": value[..., i] for i in range(value.shape[-1])}


def _eight_schools(data: Mapping[str, Any]) -> tuple[Any, ...]:
    y, sigma = data["y"], data["sigma"]

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        trans = pyro.sample("theta_trans", dist.Normal(x.new_zeros(8), 1.0).to_event(1))
        mu = pyro.sample("mu", dist.Normal(x.new_tensor(0.0), 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(x.new_tensor(5.0)))
        theta = pyro.deterministic("theta", mu + tau * trans)
        pyro.sample("y", dist.Normal(theta, x).to_event(1), obs=y)
        return theta

    def log_density(z: Mapping[str, Tensor]) -> Tensor:
        tau = z["tau"].exp()
        theta = z["mu"] + tau * z["theta_trans"]
        return (
            _normal(z["theta_trans"], 0, 1).sum()
            + _normal(z["mu"], 0, 5)
            + _half_cauchy(tau, 5)
            + z["tau"]
            + _normal(y, theta, sigma).sum()
        )

    def reported(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        theta = values["mu"][..., None] + values["tau"][..., None] * values["theta_trans"]
        return {**_indexed("theta", theta), "mu": values["mu"], "tau": values["tau"]}

    return model, sigma, y, log_density, reported


def _kidscore(data: Mapping[str, Any]) -> tuple[Any, ...]:
    y, iq = data["kid_score"], data["mom_iq"]

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        beta = pyro.sample("beta", dist.ImproperUniform(constraints.real_vector, (), (2,)))
        sigma = pyro.sample("sigma", dist.HalfCauchy(x.new_tensor(2.5)))
        mean = beta[0] + beta[1] * x
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)
        return mean

    def log_density(z: Mapping[str, Tensor]) -> Tensor:
        sigma = z["sigma"].exp()
        mean = z["beta"][0] + z["beta"][1] * iq
        return _half_cauchy(sigma, 2.5) + z["sigma"] + _normal(y, mean, sigma).sum()

    def reported(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**_indexed("beta", values["beta"]), "sigma": values["sigma"]}

    return model, iq, y, log_density, reported


def _gauss_mix(data: Mapping[str, Any]) -> tuple[Any, ...]:
    y = data["y"]

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        mu = pyro.sample("mu", dist.ImproperUniform(constraints.ordered_vector, (), (2,)))
        pyro.factor("mu_prior", dist.Normal(0.0, 2.0).log_prob(mu).sum())
        sigma = pyro.sample("sigma", dist.HalfNormal(x.new_full((2,), 2.0)).to_event(1))
        theta = pyro.sample("theta", dist.Beta(x.new_tensor(5.0), x.new_tensor(5.0)))
        parts = dist.Categorical(probs=torch.stack([theta, 1 - theta]))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.MixtureSameFamily(parts, dist.Normal(mu, sigma)), obs=y)
        return mu[0].expand(x.shape[0])

    def log_density(z: Mapping[str, Tensor]) -> Tensor:
        mu = torch.stack([z["mu"][0], z["mu"][0] + z["mu"][1].exp()])
        sigma = z["sigma"].exp()
        theta, jacobian = _unit(z["theta"])
        rows = torch.logaddexp(
            theta.log() + _normal(y, mu[0], sigma[0]),
            (1 - theta).log() + _normal(y, mu[1], sigma[1]),
        )
        return (
            _normal(mu, 0, 2).sum()
            + z["mu"][1]
            + (log(2) + _normal(sigma, 0, 2)).sum()
            + z["sigma"].sum()
            + 4 * (theta.log() + (1 - theta).log())
            + lgamma(10)
            - 2 * lgamma(5)
            + jacobian
            + rows.sum()
        )

    def reported(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            **_indexed("mu", values["mu"]),
            **_indexed("sigma", values["sigma"]),
            "theta": values["theta"],
        }

    # x only says how many rows there are.
    return model, torch.zeros_like(y), y, log_density, reported


def _ar(data: Mapping[str, Any]) -> tuple[Any, ...]:
    series, order = data["y"], data["K"]
    lags = torch.stack([series[order - k : len(series) - k] for k in range(1, order + 1)], dim=1)
    y = series[order:]

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        alpha = pyro.sample("alpha", dist.Normal(x.new_tensor(0.0), 10.0))
        beta = pyro.sample("beta", dist.Normal(x.new_zeros(x.shape[1]), 10.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(x.new_tensor(2.5)))
        mean = alpha + x @ beta
        with pyro.plate("data", x.shape[0]):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)
        return mean

    def log_density(z: Mapping[str, Tensor]) -> Tensor:
        sigma = z["sigma"].exp()
        return (
            _normal(z["alpha"], 0, 10)
            + _normal(z["beta"], 0, 10).sum()
            + _half_cauchy(sigma, 2.5)
            + z["sigma"]
            + _normal(y, z["alpha"] + lags @ z["beta"], sigma).sum()
        )

    def reported(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "alpha": values["alpha"],
            **_indexed("beta", values["beta"]),
            "sigma": values["sigma"],
        }

    return model, lags, y, log_density, reported


def _gp(data: Mapping[str, Any]) -> tuple[Any, ...]:
    y, place = data["y"], data["x"]

    def kernel(x: Tensor, rho: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        square = (x[:, None] - x) ** 2
        # sigma itself, not its square, is added to the diagonal.
        return alpha**2 * (-0.5 * square / rho**2).exp() + sigma * torch.eye(len(x), dtype=x.dtype)

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        rho = pyro.sample("rho", dist.Gamma(x.new_tensor(25.0), x.new_tensor(4.0)))
        alpha = pyro.sample("alpha", dist.HalfNormal(x.new_tensor(2.0)))
        sigma = pyro.sample("sigma", dist.HalfNormal(x.new_tensor(1.0)))
        mean = torch.zeros_like(x)
        pyro.sample("y", dist.MultivariateNormal(mean, kernel(x, rho, alpha, sigma)), obs=y)
        return mean

    def log_density(z: Mapping[str, Tensor]) -> Tensor:
        rho, alpha, sigma = (z[name].exp() for name in ("rho", "alpha", "sigma"))
        covariance = kernel(place, rho, alpha, sigma)
        return (
            25 * log(4)
            - lgamma(25)
            + 24 * rho.log()
            - 4 * rho
            + 2 * log(2)
            + _normal(alpha, 0, 2)
            + _normal(sigma, 0, 1)
            + sum(z.values())
            - 0.5 * y @ torch.linalg.solve(covariance, y)
            - 0.5 * torch.logdet(covariance)
            - 0.5 * len(y) * log(2 * pi)
        )

    def reported(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: values[name] for name in ("rho", "alpha", "sigma")}

    return model, place, y, log_density, reported


def _garch(data: Mapping[str, Any]) -> tuple[Any, ...]:
    y, first = data["y"], data["sigma1"]
    before = torch.cat([y.new_zeros(1), y[:-1]])

    def scales(before: Tensor, mu: Tensor, alpha0: Tensor, alpha1: Tensor, beta1: Tensor) -> Tensor:
        h = [torch.full_like(mu, first**2)]
        for t in range(1, len(before)):
            h.append(alpha0 + alpha1 * (before[t] - mu) ** 2 + beta1 * h[-1])
        return torch.stack(h).sqrt()

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        # All four are flat: Uniform(0, 1 - alpha1) would have the density 1 / (1 - alpha1).
        mu = pyro.sample("mu", dist.ImproperUniform(constraints.real, (), ()))
        alpha0 = pyro.sample("alpha0", dist.ImproperUniform(constraints.positive, (), ()))
        alpha1 = pyro.sample("alpha1", dist.ImproperUniform(constraints.unit_interval, (), ()))
        room = constraints.interval(torch.zeros_like(alpha1), 1 - alpha1)
        beta1 = pyro.sample("beta1", dist.ImproperUniform(room, (), ()))
        scale = scales(x, mu, alpha0, alpha1, beta1)
        pyro.sample("y", dist.Normal(mu, scale).to_event(1), obs=y)
        return scale

    def log_density(z: Mapping[str, Tensor]) -> Tensor:
        alpha0 = z["alpha0"].exp()
        alpha1, jacobian1 = _unit(z["alpha1"])
        share, jacobian2 = _unit(z["beta1"])
        beta1 = (1 - alpha1) * share
        return (
            z["alpha0"]
            + jacobian1
            + jacobian2
            + (1 - alpha1).log()
            + _normal(y, z["mu"], scales(before, z["mu"], alpha0, alpha1, beta1)).sum()
        )

    def reported(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: values[name] for name in ("mu", "alpha0", "alpha1", "beta1")}

    return model, before, y, log_density, reported
