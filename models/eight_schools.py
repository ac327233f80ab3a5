"""Eight schools (Rubin 1981), to show that any Pyro model works: no network, no x, no plate `data`.

    mu      ~ Normal(0, 5)                           tau ~ HalfCauchy(tau_scale)
    theta_j = mu + tau · z_j                         z_j ~ Normal(0, 1)
    y_j     ~ Normal(theta_j, standard_errors_j)

    model = pbnn.load_model("models/eight_schools.py")
    posterior = pbnn.fit_nuts(model, None, model.effects, dtype=torch.float64)

The priors are those of posteriordb's eight_schools_noncentered, a reference posterior.
Change: tau's prior, centred or not, the numbers. The roads run that need no rows: NUTS, and SVI
without batches. Without a plate `data` there is no row-wise log-likelihood, and no row to predict.
Do not use it centred with standard errors as large as these: the posterior is a funnel.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor


class Model(PyroModule):  # type: ignore[misc]
    """Means of groups with known standard errors, partially pooled.

    Args:
        in_features: Not used; a model file may be loaded without.
        standard_errors: Standard error of each y.
        tau_scale: Scale of the half-Cauchy prior on tau.
        centred: Whether theta itself is the random site, in the place of z.
    """

    def __init__(
        self,
        in_features: int | None = None,
        *,
        standard_errors: tuple[float, ...] = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0),
        tau_scale: float = 5.0,
        centred: bool = False,
    ) -> None:
        super().__init__()
        self.tau_scale, self.centred = tau_scale, centred
        self.register_buffer("standard_errors", torch.tensor(standard_errors))
        self.effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])

    def forward(self, x: None = None, y: Tensor | None = None) -> Tensor:
        """Return theta, of shape `(schools,)`."""
        mu = pyro.sample("mu", dist.Normal(self.standard_errors.new_zeros(()), 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(torch.full_like(mu, self.tau_scale)))
        with pyro.plate("schools", len(self.standard_errors)):
            if self.centred:
                theta: Tensor = pyro.sample("theta", dist.Normal(mu, tau))
            else:
                z = pyro.sample("z", dist.Normal(torch.zeros_like(mu), 1.0))
                theta = pyro.deterministic("theta", mu + tau * z)
            pyro.sample("y", dist.Normal(theta, self.standard_errors), obs=y)
        return theta
