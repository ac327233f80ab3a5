"""pbnn: Bayesian neural networks as Pyro models, with SVI and NUTS on one model file.

Names are looked up when they are first used, so that `pbnn --help` answers at once and the ArviZ
side works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pbnn._version import __version__

if TYPE_CHECKING:
    from pbnn.evaluate.acceptance import check_posterior
    from pbnn.evaluate.comparison import compare
    from pbnn.evaluate.costs import Costs
    from pbnn.evaluate.decision import DecisionRule, fit_decision_rule
    from pbnn.evaluate.decision_report import report_decisions
    from pbnn.evaluate.ood import check_ood
    from pbnn.evaluate.prior_report import prior_report
    from pbnn.evaluate.recipes import mend, rank_sweep
    from pbnn.evaluate.sensitivity import sensitivity
    from pbnn.evaluate.shift_series import shift_table
    from pbnn.evaluate.svi_report import svi_report
    from pbnn.front_door import check_model
    from pbnn.infer.dropout import fit_dropout
    from pbnn.infer.ensemble import fit_ensemble
    from pbnn.infer.laplace import fit_laplace
    from pbnn.infer.map import fit_map
    from pbnn.infer.nuts import fit_nuts
    from pbnn.infer.posterior import Posterior
    from pbnn.infer.sgmcmc import fit_sgmcmc
    from pbnn.infer.subspace import fit_subspace
    from pbnn.infer.svi import fit_svi
    from pbnn.infer.swag import fit_swag
    from pbnn.inference_data import to_inference_data
    from pbnn.model import load_model
    from pbnn.prediction import (
        log_likelihood,
        predict,
        predictive,
        prior_predictive,
        sample_prior,
    )
    from pbnn.priors import place_priors

_HOMES = {
    "Costs": "pbnn.evaluate.costs",
    "DecisionRule": "pbnn.evaluate.decision",
    "Posterior": "pbnn.infer.posterior",
    "check_model": "pbnn.front_door",
    "check_ood": "pbnn.evaluate.ood",
    "check_posterior": "pbnn.evaluate.acceptance",
    "compare": "pbnn.evaluate.comparison",
    "fit_ensemble": "pbnn.infer.ensemble",
    "fit_dropout": "pbnn.infer.dropout",
    "fit_decision_rule": "pbnn.evaluate.decision",
    "fit_laplace": "pbnn.infer.laplace",
    "fit_map": "pbnn.infer.map",
    "fit_nuts": "pbnn.infer.nuts",
    "fit_sgmcmc": "pbnn.infer.sgmcmc",
    "fit_subspace": "pbnn.infer.subspace",
    "fit_svi": "pbnn.infer.svi",
    "fit_swag": "pbnn.infer.swag",
    "load_model": "pbnn.model",
    "log_likelihood": "pbnn.prediction",
    "mend": "pbnn.evaluate.recipes",
    "place_priors": "pbnn.priors",
    "predict": "pbnn.prediction",
    "predictive": "pbnn.prediction",
    "prior_predictive": "pbnn.prediction",
    "prior_report": "pbnn.evaluate.prior_report",
    "rank_sweep": "pbnn.evaluate.recipes",
    "report_decisions": "pbnn.evaluate.decision_report",
    "sample_prior": "pbnn.prediction",
    "sensitivity": "pbnn.evaluate.sensitivity",
    "shift_table": "pbnn.evaluate.shift_series",
    "svi_report": "pbnn.evaluate.svi_report",
    "to_inference_data": "pbnn.inference_data",
}

__all__ = [
    "Costs",
    "DecisionRule",
    "Posterior",
    "__version__",
    "check_model",
    "check_ood",
    "check_posterior",
    "compare",
    "fit_decision_rule",
    "fit_dropout",
    "fit_ensemble",
    "fit_laplace",
    "fit_map",
    "fit_nuts",
    "fit_sgmcmc",
    "fit_subspace",
    "fit_svi",
    "fit_swag",
    "load_model",
    "log_likelihood",
    "mend",
    "place_priors",
    "predict",
    "predictive",
    "prior_predictive",
    "prior_report",
    "rank_sweep",
    "report_decisions",
    "sample_prior",
    "sensitivity",
    "shift_table",
    "svi_report",
    "to_inference_data",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pbnn' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
