"""What an SVI fit says about itself: where its ELBO comes from, and how its guide may fail."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pbnn.errors import ModelError
from pbnn.evaluate.linearised import linearised_variance
from pbnn.evaluate.prior_moments import PriorMoments, prior_moments
from pbnn.evaluate.psis import TRUSTED_K, pareto_k
from pbnn.front_door import bind
from pbnn.infer.covariance import GaussianCovariance
from pbnn.infer.density import Density
from pbnn.infer.posterior import Posterior
from pbnn.model import BoundModel, Data, Model
from pbnn.prediction import function_draws

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SviReport", "svi_report"]

# Draws over which the terms of the ELBO are averaged.
TERM_DRAWS = 200
_BLOCK = 20
# Rows of which the linearised variance is split, at most.
VARIANCE_ROWS = 500
EIGENVALUES = 10
# Nats: below this, a value's marginal is its prior's but for a tenth of its scale.
AT_PRIOR = 0.01


@dataclass(frozen=True, kw_only=True)
class SviReport:
    """What a fit says about itself.

    Attributes:
        guide: Name of the guide's family.
        expected_log_likelihood: Mean over draws of the log-likelihood of all rows, in nats.
        kl: KL divergence from guide to prior, in nats.
        kl_weight: Its weight in the loss of the last step; 1 for a posterior.
        kl_share: kl_weight · KL over the sum of that and |expected log-likelihood|.
        observed: By observed (or factor) site `expected_log_likelihood`, and `error`, the standard
            error of that mean.
        sites: By latent site its `layer`, its number of `values`, `kl` (of the site's marginal) and
            `kl_share` (of the sum over sites), `scale` (median standard deviation on the
            unconstrained space), `smallest_scale`, `scale_ratio` (median over its values of the
            guide's scale over the prior's) and `at_prior` (share of values whose marginal is their
            prior, within 0.01 nats).
        layers: The same by layer: a site's name up to its last dot.
        correlation_kl: KL minus the sum of `sites.kl`, what correlations between sites add to it.
        khat: Pareto k of the importance weights p(draw, data) / q(draw); it gates nothing.
        effective_rank: (Σλ)² / Σλ² over the eigenvalues of the covariance; NaN for a guide that is
            not Gaussian.
        eigenvalues: Its leading eigenvalues (variances), in falling order; empty likewise.
        variance: By row (at most 500, evenly spaced) and output the linearised variance of f(x):
            `total`, its `diagonal` and `cross` part; None where f or the guide has no such split.
        signal: Share of the spread of f over draws and rows that its mean explains, in [0, 1].
        warnings: What should be known before the draws are used, one line each.
    """

    guide: str
    expected_log_likelihood: float
    kl: float
    kl_weight: float
    kl_share: float
    observed: "pd.DataFrame"
    sites: "pd.DataFrame"
    layers: "pd.DataFrame"
    correlation_kl: float
    khat: float
    effective_rank: float
    eigenvalues: tuple[float, ...]
    variance: "pd.DataFrame | None"
    signal: float
    warnings: tuple[str, ...]

    @property
    def elbo(self) -> float:
        """Expected log-likelihood minus KL divergence, in nats."""
        return self.expected_log_likelihood - self.kl

    def __str__(self) -> str:
        def table(frame: "pd.DataFrame") -> str:
            return str(frame.to_string(float_format=lambda v: f"{v:.3g}"))

        leading = ", ".join(f"{value:.3g}" for value in self.eigenvalues[:5])
        lines = [
            *(f"warning: {warning}" for warning in self.warnings),
            f"guide {self.guide}: ELBO {self.elbo:.1f} = expected log-likelihood "
            f"{self.expected_log_likelihood:.1f} - KL {self.kl:.1f} nats "
            f"({self.kl_share:.0%} of the loss at KL weight {self.kl_weight:g})",
            f"Pareto k {self.khat:.2f} (above {TRUSTED_K}, the guide misses a part of the "
            "posterior; usual for networks)",
            f"effective rank {self.effective_rank:.1f} of {int(self.sites['values'].sum())}; "
            f"leading eigenvalues {leading or 'not known'}",
            f"signal: its mean explains {self.signal:.0%} of the spread of f",
        ]
        if self.variance is not None:
            totals = self.variance[["total", "cross"]].sum()
            lines.append(
                f"linearised variance of f: {totals['cross'] / totals['total']:+.0%} of it from "
                "covariances"
            )
        return "\n".join([*lines, table(self.observed), table(self.layers), table(self.sites)])


def svi_report(
    posterior: Posterior,
    model: Model,
    x: Data,
    y: Data,
    *,
    device: str | torch.device | None = None,
) -> SviReport:
    """Say where the ELBO of an SVI fit comes from, and how its guide may have failed.

    The expected log-likelihood is a mean over 200 of the posterior's draws; entropies, scales and
    the spectrum are those of the guide's own tensors. A site's KL is that of its marginal,
    E[log q_site − log p_site] on the unconstrained space: in closed form for a Gaussian guide and a
    Normal prior, else with a mean over the same draws.

    Args:
        posterior: What `fit_svi` returned.
        model: The model that was fitted.
        x: The training rows.
        y: Their observations.
        device: Where to run.

    Raises:
        ModelError: The posterior is no fit of a guide to this model and these rows.
    """
    if posterior.markov or "log_q" not in posterior.stats:
        raise ModelError(
            f"the draws of {posterior.method!r} are none of a guide; svi_report is for fit_svi"
        )
    bound = bind(
        model,
        x,
        y,
        device=device,
        dtype=next(iter(posterior.draws.values())).dtype,
        constants=posterior.constants,
        buffers=posterior.buffers,
    )
    known = posterior.approximation
    covariance = None if known is None else GaussianCovariance(known)
    observed, draws = _terms(posterior, bound)
    priors = {name: float(draws[name].mean()) for name in bound.named("latent")}
    means, scales = _moments(posterior, bound, covariance)
    prior = prior_moments(bound, means)
    if covariance is not None:
        priors |= prior.expected_log_density(means, scales)
    sites = _sites(means, scales, prior, priors, covariance)
    likelihood = float(observed["expected_log_likelihood"].sum())
    log_q = float(posterior.stats["log_q"].double().mean())
    if covariance is not None:
        log_q = -covariance.entropy()
    kl = log_q - sum(priors.values())
    weight = float(posterior.provenance.get("kl_weight", 1.0))
    log_ratio = (posterior.stats["lp"] - posterior.stats["log_q"]).double().flatten()
    report: dict[str, Any] = {
        "guide": _guide_name(posterior),
        "expected_log_likelihood": likelihood,
        "kl": kl,
        "kl_weight": weight,
        "kl_share": weight * kl / (weight * kl + abs(likelihood)),
        "observed": observed,
        "sites": sites,
        "layers": _layers(sites),
        "correlation_kl": kl - float(sites["kl"].sum()),
        "khat": pareto_k(log_ratio.numpy()),
        "effective_rank": float("nan") if covariance is None else covariance.effective_rank(),
        "eigenvalues": tuple(
            [] if covariance is None else covariance.leading_eigenvalues(EIGENVALUES).tolist()
        ),
        "variance": None if covariance is None else _variance(bound, covariance),
        "signal": float("nan") if bound.rows is None else _signal(posterior, model, x, device),
    }
    return SviReport(**report, warnings=tuple(_warnings(report, posterior)))


def _guide_name(posterior: Posterior) -> str:
    if posterior.approximation is not None:
        return str(posterior.approximation["family"])
    return str(posterior.provenance.get("options", {}).get("guide", "unknown"))


def _terms(posterior: Posterior, bound: BoundModel) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """Return the log-likelihood by site, and the log density by site of each draw."""
    import pandas as pd

    density = Density(bound, chains=0, compile=False)
    count = min(TERM_DRAWS, posterior.chains * posterior.draws_per_chain)
    points = (
        point
        for start in range(0, count, _BLOCK)
        for point in density.unconstrain(posterior.flat(start, min(start + _BLOCK, count)))
    )
    draws = pd.DataFrame([density.site_log_densities(point) for point in points])
    lp = posterior.stats["lp"].flatten()[:count].double().numpy()
    gap = abs(draws.sum(axis=1) - lp).max()
    if not gap <= 1e-3 * max(1.0, abs(lp).max()):
        raise ModelError(
            f"the log joint of the draws differs by {gap:.3g} from the one that the posterior "
            "holds; pass the model, x and y that were fitted"
        )
    names = [name for kind in ("observed", "factor") for name in bound.named(kind)]
    observed = pd.DataFrame(
        {
            "expected_log_likelihood": draws[names].mean(),
            "error": draws[names].std() / count**0.5,
        }
    ).rename_axis("site")
    return observed, draws


def _moments(
    posterior: Posterior, bound: BoundModel, covariance: GaussianCovariance | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return means and scales by site on the unconstrained space: the guide's, or its draws'."""
    if covariance is not None:
        return covariance.means(), covariance.scales()
    density = Density(bound, chains=0, compile=False)
    z = density.unconstrain(posterior.flat()).double().cpu()
    shapes = {site.name: (site.slice, site.unconstrained_shape) for site in density.sites}
    means, scales = (
        {name: value[part].reshape(shape) for name, (part, shape) in shapes.items()}
        for value in (z.mean(0), z.std(0))
    )
    return means, scales


def _signal(posterior: Posterior, model: Model, x: Data, device: Any) -> float:
    """Return the share of the spread of f over draws and rows that its mean explains."""
    f = function_draws(model, posterior.select(draws=slice(TERM_DRAWS)), x, device=device)
    f = f.double().flatten(0, 1)
    between, within = f.mean(0).var(0, correction=0).sum(), f.var(0, correction=0).mean(0).sum()
    return float(between / (between + within))


def _sites(
    means: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    prior: PriorMoments,
    priors: Mapping[str, float],
    covariance: GaussianCovariance | None,
) -> "pd.DataFrame":
    """Return the table of latent sites."""
    import pandas as pd

    entropies = {} if covariance is None else covariance.entropies()
    rows = {}
    for name, scale in scales.items():
        ratio = scale / prior.scales[name]
        shift = (means[name] - prior.means[name]) / prior.scales[name]
        # KL between Normals of these moments, for each value by itself.
        each = 0.5 * (ratio.square() + shift.square() - 1) - ratio.log()
        rows[name] = {
            "layer": name.rpartition(".")[0],
            "values": scale.numel(),
            "kl": -entropies.get(name, float("nan")) - priors[name],
            "scale": float(scale.median()),
            "smallest_scale": float(scale.min()),
            "scale_ratio": float(ratio.median()),
            "at_prior": float((each < AT_PRIOR).double().mean()),
        }
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis("site")
    frame.insert(3, "kl_share", frame["kl"] / frame["kl"].sum())
    return frame


def _layers(sites: "pd.DataFrame") -> "pd.DataFrame":
    """Return the table of sites by layer; medians and shares are weighted by the values."""
    import pandas as pd

    def joined(part: "pd.DataFrame") -> "pd.Series":
        weight = part["values"] / part["values"].sum()
        return pd.Series(
            {
                "values": part["values"].sum(),
                "kl": part["kl"].sum(),
                "kl_share": part["kl_share"].sum(),
                "scale_ratio": (part["scale_ratio"] * weight).sum(),
                "at_prior": (part["at_prior"] * weight).sum(),
            }
        )

    rows = {layer or "(top)": joined(part) for layer, part in sites.groupby("layer", sort=False)}
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")
    return frame.astype({"values": int})


def _variance(bound: BoundModel, covariance: GaussianCovariance) -> "pd.DataFrame | None":
    import pandas as pd

    if bound.rows is None:
        return None
    # Evenly spaced, as probe inputs are elsewhere.
    count = min(bound.rows, VARIANCE_ROWS)
    rows = torch.linspace(0, bound.rows - 1, count, dtype=torch.float64).round().long().unique()
    try:
        total, diagonal = linearised_variance(bound, covariance, rows)
    except ModelError:
        return None
    names = [rows.tolist(), range(total.shape[1])]
    index = pd.MultiIndex.from_product(names, names=["row", "output"])
    columns = {"total": total, "diagonal": diagonal, "cross": total - diagonal}
    return pd.DataFrame({k: v.flatten().numpy() for k, v in columns.items()}, index=index)


def _warnings(report: Mapping[str, Any], posterior: Posterior) -> list[str]:
    """Say what should be known before the draws are used."""
    found = list(posterior.provenance.get("notes", []))
    sites = report["sites"]
    ratio = float((sites["scale_ratio"] * sites["values"]).sum() / sites["values"].sum())
    if report["guide"] == "normal" and ratio > 0.5 and report["signal"] < 0.5:
        found.append(
            f"mean field underfits: scales stay near the prior's ({ratio:.2f} of them over "
            f"{sites['values'].sum()} values) and their noise hides f, whose mean explains "
            f"{report['signal']:.0%} of its spread; narrow the network, scale its priors by "
            "fan-in, or keep correlations (guide='lowrank' or 'kronecker')"
        )
    found += [
        f"layer {name!r} stays at its prior: the data say nothing to it"
        for name, row in report["layers"].iterrows()
        if row["at_prior"] > 0.9
    ]
    return found
