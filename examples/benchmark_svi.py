"""Steps of SVI side by side: pbnn, Pyro, NumPyro and plain torch at three sizes, as Markdown.

python examples/benchmark_svi.py --numpyro-python ENV/bin/python                3 minutes
python examples/benchmark_svi.py --smoke                                       seconds, for tests

All sides fit the same networks under the same priors: mean field, one draw in each step, Adam.
Windows of steps alternate between the sides, so that all see the same machine, and the fastest
window of each counts. NumPyro runs in a process of its own, where its environment has it.
"""

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.nn import functional as F

import pbnn
from pbnn.front_door import bind
from pbnn.infer.guides import make_guide
from pbnn.infer.step import make_step
from pbnn.model import isolated

ROOT = Path(__file__).parents[1]
NUMPYRO = Path(__file__).parent / "benchmark" / "svi_numpyro.py"

Take = Callable[[int], float]
"""Takes a number of steps, and returns the seconds that they took."""


@dataclass(frozen=True)
class Size:
    """A network and its data.

    Attributes:
        widths: Units of each layer, from inputs to outputs; one output is a regression.
        rows: Rows in each step.
        batches: Whether they are a batch of more rows.
    """

    widths: tuple[int, ...]
    rows: int
    batches: bool = False

    def __str__(self) -> str:
        """Return the size in words."""
        kind = "batch" if self.batches else "rows"
        return f"{'-'.join(map(str, self.widths))}, {kind} {self.rows}"

    def model(self) -> Any:
        """Return the model."""
        name = "regression" if self.widths[-1] == 1 else "classification"
        return pbnn.load_model(
            ROOT / "models" / f"{name}.py",
            in_features=self.widths[0],
            out_features=self.widths[-1],
            hidden=self.widths[1],
            depth=len(self.widths) - 2,
            activation="tanh",
        )

    def data(self) -> tuple[Tensor, Tensor]:
        """Return x and y, two batches of them where there are batches."""
        torch.manual_seed(0)
        rows = self.rows * (1 + self.batches)
        x = torch.randn(rows, self.widths[0])
        return x, x[:, 0] - x[:, 1] if self.widths[-1] == 1 else torch.arange(rows) % self.widths[
            -1
        ]


SIZES = (Size((6, 50, 1), 308), Size((8, 100, 100, 1), 1000), Size((784, 400, 400, 10), 128, True))
SMOKE = (Size((3, 4, 1), 10), Size((3, 4, 4, 2), 8, True))


def timed(step: Callable[[], Any]) -> Take:
    """Return what takes steps one by one."""

    def take(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - start

    return take


# pbnn and Pyro.


@contextmanager
def ours(size: Size, **options: Any) -> Iterator[Take]:
    """Yield the step of pbnn."""
    x, y = size.data()
    bound = bind(size.model(), x, y)
    with isolated(0), pyro.validation_enabled(False):
        step = make_step(
            bound,
            make_guide("normal", bound.model),
            batch_size=size.rows if size.batches else None,
            **options,
        )
        batch = bound.x[: size.rows], bound.y[: size.rows], 1.0 + size.batches
        yield timed(lambda: step(*batch, lr=1e-3))


@contextmanager
def pyros(size: Size) -> Iterator[Take]:
    """Yield Pyro's own SVI."""
    x, y = (value[: size.rows] for value in size.data())
    with isolated(0), pyro.validation_enabled(False):
        model = size.model()
        guide = AutoNormal(model, init_scale=0.01)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO())
        yield timed(lambda: svi.step(x, y))


# Torch, by hand.


@contextmanager
def plain(size: Size) -> Iterator[Take]:
    """Yield a training step of the network without uncertainty."""
    x, y = (value[: size.rows] for value in size.data())
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(size.widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    network = nn.Sequential(*layers[:-1])
    adam = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        f = network(x)
        loss = F.mse_loss(f.squeeze(-1), y) if size.widths[-1] == 1 else F.cross_entropy(f, y)
        adam.zero_grad()
        loss.backward()
        adam.step()

    yield timed(step)


@contextmanager
def by_hand(size: Size) -> Iterator[Take]:
    """Yield a mean-field step with local reparameterization: two products and two updates."""
    x, y = (value[: size.rows] for value in size.data())
    means, raws = [], []
    for a, b in itertools.pairwise(size.widths):
        for shape in ((b, a), (b,)):
            means.append(nn.Parameter(torch.randn(shape) / a**0.5))
            raws.append(nn.Parameter(torch.full(shape, -4.6)))
    if size.widths[-1] == 1:  # the log of the noise scale
        means.append(nn.Parameter(torch.zeros(())))
        raws.append(nn.Parameter(torch.tensor(-4.6)))
    adam = torch.optim.Adam([*means, *raws], lr=1e-3, fused=True)

    def step() -> None:
        h, kl = x, torch.zeros(())
        scales = [F.softplus(raw) for raw in raws]
        for k, a in enumerate(size.widths[:-1]):
            (weight, bias), (s, t) = means[2 * k : 2 * k + 2], scales[2 * k : 2 * k + 2]
            variance = F.linear(h.square(), s.square(), t.square())
            h = F.linear(h, weight, bias)
            h = h + variance.sqrt() * torch.randn_like(h)
            h = torch.tanh(h) if k < len(size.widths) - 2 else h
            kl = kl + 0.5 * (a * (s.square() + weight.square())).sum() - s.log().sum()
            kl = kl + 0.5 * (t.square() + bias.square()).sum() - t.log().sum()
        if size.widths[-1] == 1:
            log_scale = means[-1] + scales[-1] * torch.randn(())
            residuals = (y - h.squeeze(-1)) / log_scale.exp()
            loss = 0.5 * residuals.square().sum() + len(y) * log_scale
            kl = kl + 0.5 * (2 * log_scale).exp() - log_scale - scales[-1].log()
        else:
            loss = F.cross_entropy(h, y, reduction="sum")
        adam.zero_grad()
        ((loss * (1 + size.batches) + kl) / len(y)).backward()
        adam.step()

    yield timed(step)


# NumPyro.


@contextmanager
def numpyros(size: Size, python: str) -> Iterator[Take]:
    """Yield NumPyro's jitted update."""
    settings = json.dumps({"widths": size.widths, "rows": size.rows})
    process = subprocess.Popen(
        [python, "-W", "ignore", NUMPYRO, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        },
    )

    def take(steps: int) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        yield take
    finally:
        process.communicate()


def measure(size: Size, sides: dict[str, Any], rounds: int, window: float) -> dict[str, float]:
    """Return µs per step of each side, the least of windows that alternate between them."""
    with ExitStack() as stack:
        takes = {name: stack.enter_context(side) for name, side in sides.items()}
        best, steps = {}, {}
        for name, take in takes.items():
            take(3)  # compiles, allocates
            best[name] = take(3) / 3
            steps[name] = max(3, int(window / best[name]))
        for _ in range(rounds):
            for name, take in takes.items():
                best[name] = min(best[name], take(steps[name]) / steps[name])
    return {name: 1e6 * seconds for name, seconds in best.items()}


def sides_of(size: Size, numpyro: str | None, *, compile: bool) -> dict[str, Any]:
    """Return all sides by name; each is a context that has yet to be entered."""
    return {
        "pbnn": ours(size, compile=compile),
        "pbnn, local": ours(size, compile=compile, estimator="local"),
        "pbnn, not compiled": ours(size, compile=False),
        "Pyro": pyros(size),
        **({} if numpyro is None else {"NumPyro": numpyros(size, numpyro)}),
        "torch, local, by hand": by_hand(size),
        "torch, plain": plain(size),
    }


def main() -> None:
    """Measure each size, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numpyro-python", help="interpreter of an environment with NumPyro")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, nothing compiled")
    arguments = parser.parse_args()
    numpyro = arguments.numpyro_python
    if numpyro is None and importlib.util.find_spec("numpyro") is not None:
        numpyro = sys.executable
    torch.set_num_threads(1)
    sizes, rounds, window = (SMOKE, 1, 0.01) if arguments.smoke else (SIZES, 10, 0.3)
    print(
        f"One thread, torch {torch.__version__}; the least of {rounds} rounds. In brackets: times"
    )
    print("the step of pbnn with the same estimator.\n")
    found = {
        size: measure(size, sides_of(size, numpyro, compile=not arguments.smoke), rounds, window)
        for size in sizes
    }
    print(f"| µs a step | {' | '.join(map(str, sizes))} |")
    print(f"|---|{'---:|' * len(sizes)}")
    for name in found[sizes[0]]:
        base = "pbnn, local" if "local" in name else "pbnn"
        cells = [f"{us[name]:,.0f} ({us[name] / us[base]:.2f})" for us in found.values()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
