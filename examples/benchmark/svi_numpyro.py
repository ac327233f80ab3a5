"""NumPyro's side of benchmark_svi.py, in a process of its own.

python svi_numpyro.py '{"widths": [6, 50, 1], "rows": 308, "threads": 1}'

Takes a number of steps on stdin, and answers with the seconds that its jitted update took for them.
"""

import importlib
import json
import sys
import time
from typing import Any

__all__: list[str] = []


class Side:
    """A jitted update of the same network, priors, guide and optimiser as the other sides."""

    def __init__(self, widths: list[int], rows: int) -> None:
        self.jax: Any = importlib.import_module("jax")
        self.np: Any = importlib.import_module("jax.numpy")
        self.numpyro: Any = importlib.import_module("numpyro")
        infer: Any = importlib.import_module("numpyro.infer")
        autoguide: Any = importlib.import_module("numpyro.infer.autoguide")
        self.widths = widths
        keys = self.jax.random.split(self.jax.random.PRNGKey(0), 3)
        x = self.jax.random.normal(keys[0], (rows, widths[0]))
        y = x[:, 0] - x[:, 1] if widths[-1] == 1 else self.np.arange(rows) % widths[-1]
        self.data = (x, y)
        guide = autoguide.AutoNormal(self.model, init_scale=0.01)
        adam = self.numpyro.optim.Adam(1e-3)
        svi = infer.SVI(self.model, guide, adam, infer.Trace_ELBO())
        self.state = svi.init(keys[1], *self.data)
        self.update = self.jax.jit(svi.update)

    def model(self, x: Any, y: Any) -> None:
        """Declare the network of models/regression.py, or of models/classification.py."""
        dist, sample = self.numpyro.distributions, self.numpyro.sample
        h, last = x, len(self.widths) - 2
        for k, (a, b) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            weight = sample(f"w{k}", dist.Normal(0.0, a**-0.5).expand([b, a]).to_event(2))
            bias = sample(f"b{k}", dist.Normal(0.0, 1.0).expand([b]).to_event(1))
            h = h @ weight.T + bias
            h = self.np.tanh(h) if k < last else h
        if self.widths[-1] == 1:
            observed = dist.Normal(h[:, 0], sample("scale", dist.HalfNormal(1.0)))
        else:
            observed = dist.Categorical(logits=h)
        with self.numpyro.plate("data", x.shape[0]):
            sample("y", observed, obs=y)

    def take(self, steps: int) -> float:
        """Return the seconds that some steps take."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, loss = self.update(self.state, *self.data)
        self.jax.block_until_ready((self.state, loss))
        return time.perf_counter() - start


def main() -> None:
    """Answer until stdin ends."""
    settings = json.loads(sys.argv[1])
    side = Side(settings["widths"], settings["rows"])
    for line in sys.stdin:
        print(side.take(int(line)), flush=True)


if __name__ == "__main__":
    main()
