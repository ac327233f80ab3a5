"""The evidence lower bound of a guide: estimates from draws, and what a guide must be for them."""

from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pbnn.checks import unwrapped
from pbnn.errors import ModelError
from pbnn.infer.guides import approximation
from pbnn.model import BoundModel, Data, run, sample_nodes

__all__ = ["Elbo", "culprit"]


class Elbo:
    """The two parts of the evidence lower bound, estimated from draws of a guide.

    Making one runs the guide, so that its parameters exist.

    Args:
        bound: The model and its data.
        guide: The guide.
        particles: Draws for each estimate; an even number comes in mirrored pairs.

    Raises:
        ModelError: The guide draws other sites than the model's, or draws without a gradient.
    """

    def __init__(self, bound: BoundModel, guide: AutoGuide, particles: int) -> None:
        self.bound = bound
        self.guide = guide
        self.particles = particles
        self._check_guide()
        # All randomness of a known Gaussian lies in its sites, so that its score can be told.
        self.gaussian = approximation(guide) is not None

    def __call__(self, x: Data, y: Data, factor: float) -> Tensor:
        """Return the expected log-likelihood and the KL divergence from guide to prior, `(2,)`.

        Args:
            x: Input rows.
            y: Their observations.
            factor: What the log-likelihood in plate `data` is scaled by, rows / batch size.
        """
        terms = []
        for _ in range(self.particles if self.particles % 2 else self.particles // 2):
            noise = _Noise()
            terms.append(self._once(x, y, factor, noise))
            if not self.particles % 2:
                terms.append(self._once(x, y, factor, _Noise(noise.drawn)))
        return torch.stack(terms).mean(0)

    def _once(self, x: Data, y: Data, factor: float, noise: "_Noise") -> Tensor:
        with noise:
            guide_trace = poutine.trace(self.guide).get_trace(x, y)
        replayed = poutine.replay(self.bound.model, trace=guide_trace)
        trace = run(replayed, {}, x, y, fill=self.bound.fill)
        trace.compute_log_prob()
        likelihood = prior = torch.zeros((), dtype=self.bound.dtype, device=self.bound.device)
        for site in self.bound.sites:
            if site.kind == "latent":
                prior = prior + trace.nodes[site.name]["log_prob_sum"]
            elif site.kind in ("observed", "factor"):
                weight = 1.0 if site.row_dim is None else factor
                likelihood = likelihood + weight * trace.nodes[site.name]["log_prob_sum"]
        log_q = guide_trace.log_prob_sum()
        if self.gaussian:
            score = self._log_q_at_fixed(guide_trace, x, y)
            log_q = log_q - score + score.detach()
        return torch.stack([likelihood, log_q - prior])

    def _log_q_at_fixed(self, guide_trace: poutine.Trace, x: Data, y: Data) -> Tensor:
        """Return log q of a draw as a function of the guide's parameters alone.

        Its gradient is the score, whose mean is 0 but whose noise stays when the guide has reached
        the posterior; without it the fit ends there (Roeder et al. 2017, "Sticking the landing",
        eq. 7).
        """
        noise = {
            name: node["value"].detach()
            for name, node in sample_nodes(guide_trace)
            if not isinstance(node["fn"], dist.Delta)
        }
        again = poutine.trace(poutine.condition(self.guide, data=noise)).get_trace(x, y)
        log_q: Tensor = again.log_prob_sum()
        return log_q

    def _check_guide(self) -> None:
        """Refuse a guide of other sites than the model's, or whose draws carry no gradient."""
        trace = poutine.trace(self.guide).get_trace(self.bound.x, self.bound.y)
        latent = self.bound.named("latent")
        for name, site in latent.items():
            shape = tuple(trace.nodes[name]["value"].shape) if name in trace.nodes else None
            if shape != site.shape:
                found = "does not draw it" if shape is None else f"draws shape {shape}"
                raise ModelError(
                    f"site {name!r} has shape {site.shape} in the model, and the guide {found}; "
                    f"expected `pyro.sample({name!r}, …)` of that shape in the guide"
                )
        for name, node in sample_nodes(trace):
            if not getattr(node["fn"], "has_rsample", True):
                raise ModelError(
                    f"the guide draws site {name!r} from {type(unwrapped(node['fn'])).__name__}, "
                    "which is not reparameterised; use a distribution with rsample"
                )
            if name not in latent and not node["infer"].get("is_auxiliary"):
                raise ModelError(
                    f"the guide draws site {name!r}, which the model does not have; write "
                    "`infer={'is_auxiliary': True}` where it only helps to draw others"
                )

    def culprit(self) -> str:
        """Name the first site whose draw or log density is not finite."""
        return culprit(self.bound, self.guide)


def culprit(bound: BoundModel, guide: AutoGuide) -> str:
    """Name the first site whose draw or log density is not finite, in words for a message."""
    latent = [site.name for site in bound.sites if site.kind == "latent"]
    scored = [site.name for site in bound.sites if site.kind in ("latent", "observed", "factor")]
    who, expected, tracer = "guide", latent, poutine.trace(guide)
    with torch.no_grad():
        try:
            drawn = tracer.get_trace(bound.x, bound.y)
            who, expected = "model", scored
            tracer = poutine.trace(poutine.replay(bound.model, trace=drawn))
            trace = run(tracer, {}, bound.x, bound.y, fill=bound.fill)
            trace.compute_log_prob()
        except (RuntimeError, ValueError) as error:
            reached = tracer.trace.nodes
            site = next((name for name in expected if name not in reached), expected[-1])
            return f" ({who} at site {site!r}: {str(error).splitlines()[0]})"
    for name in scored:
        node = trace.nodes.get(name, {})
        if not (bool(node["value"].isfinite().all()) and bool(node["log_prob_sum"].isfinite())):
            return f" (site {name!r})"
    return ""


class _Noise(TorchFunctionMode):
    """Keeps the standard Normal noise that is drawn inside, or gives noise with its sign turned.

    Args:
        given: Noise to turn, in the order in which it was drawn; None draws.
    """

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self.given = None if given is None else iter(given)
        self.drawn: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep or turn standard Normal draws; leave all else alone."""
        kwargs = kwargs or {}
        filled = func is Tensor.normal_ and len(args) == 1 and not kwargs
        if not filled and func not in (torch.randn, torch.randn_like):
            return func(*args, **kwargs)
        if self.given is None:
            out = func(*args, **kwargs)
            self.drawn.append(out.clone())
            return out
        turned = -next(self.given)
        return args[0].copy_(turned) if filled else turned
