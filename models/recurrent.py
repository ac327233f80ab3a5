"""Sequences in classes: a GRU or LSTM, and a softmax on its last state.

    GRU:    (r, z) = sigmoid(W x_t + b + U h_{t−1} + d)
            n   = tanh(W x_t + b + r ∘ (U h_{t−1} + d))
            h_t = (1 − z) ∘ n + z ∘ h_{t−1}          h_0 = 0
    f(x)  = V h_T + c                                logits; T is the row's own length
    weights ~ Normal(0, weight_scale / sqrt(fan in)) biases ~ Normal(0, bias_scale)
    y_n   ~ Categorical(logits = f(x_n))

x is a dict: "sequence" `(n, time, in_features)`, padded with any finite numbers, and "length"
`(n,)`, the number of steps that count: the state at the last of them is gathered, since packed
sequences cannot be mapped over chains. Where all steps count, x may be the sequences alone.
Change: kind, hidden and the prior scales, by keyword; the likelihood for other targets.
Do not use it for long sequences: each step becomes nodes of the graph, which then takes long to
prepare; cut them, or take every kth step.
"""

from collections.abc import Mapping
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pbnn.priors import normal, place_priors


class Model(PyroModule):  # type: ignore[misc]
    """Recurrent network with a softmax over classes.

    Args:
        in_features: Number of features of a step.
        out_features: Number of classes; y holds 0, …, out_features − 1.
        kind: "gru" or "lstm".
        hidden: Units of the state.
        weight_scale: Prior scale of a weight, times sqrt(fan in).
        bias_scale: Prior scale of a bias.
    """

    def __init__(
        self,
        in_features: int,
        *,
        out_features: int = 2,
        kind: Literal["gru", "lstm"] = "gru",
        hidden: int = 32,
        weight_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if kind not in ("gru", "lstm"):
            raise ValueError(f"kind={kind!r}; expected 'gru' or 'lstm'")
        self.hidden, self.kind = hidden, kind
        # torch's own cells cannot be mapped over draws; these have their equations and order.
        gates = {"gru": 3, "lstm": 4}[kind]
        self.input = nn.Linear(in_features, gates * hidden)
        self.state = nn.Linear(hidden, gates * hidden)
        self.head = nn.Linear(hidden, out_features)
        place_priors(self, {"*.weight": normal(weight_scale), "*.bias": normal(bias_scale)})

    def forward(self, x: Tensor | Mapping[str, Tensor], y: Tensor | None = None) -> Tensor:
        """Return the logits f(x), of shape `(n, out_features)`."""
        if isinstance(x, Tensor):
            last = self.states(x)[:, -1]
        else:
            index = (x["length"] - 1).reshape(-1, 1, 1).expand(-1, 1, self.hidden)
            last = self.states(x["sequence"]).gather(1, index).squeeze(1)
        f: Tensor = self.head(last)
        with pyro.plate("data", f.shape[0]):
            pyro.sample("y", dist.Categorical(logits=f), obs=y)
        return f

    def states(self, sequence: Tensor) -> Tensor:
        """Return h_1, …, h_T of sequences `(n, time, features)`, `(n, time, hidden)`."""
        h = c = sequence.new_zeros(len(sequence), self.hidden)
        states = []
        for step in self.input(sequence).unbind(1):
            if self.kind == "gru":
                (r, z, n), (r_h, z_h, n_h) = step.chunk(3, -1), self.state(h).chunk(3, -1)
                z = torch.sigmoid(z + z_h)
                h = (1 - z) * torch.tanh(n + torch.sigmoid(r + r_h) * n_h) + z * h
            else:
                i, f, g, o = (step + self.state(h)).chunk(4, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)
