"""µs per leapfrog and chain of NUTS in whole runs: a longer one less a shorter one.

python examples/benchmark/whole_runs.py pbnn yacht.csv --chains 4 --threads 2
python examples/benchmark/whole_runs.py numpyro yacht.csv --chains 4 --method parallel

What both runs pay alike (imports, tracing, compiling, warm-up) falls out of the difference. A side
needs only its own libraries.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

HIDDEN, DEPTH, WARMUP = 50, 7, 100

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Run = Callable[[int], int]


def table(path: Path) -> tuple[Numbers, Numbers]:
    """Return standardised x and y; the last column is the target."""
    rows = np.genfromtxt(path, delimiter=",")
    rows = rows[~np.isnan(rows).any(1)]
    rows = ((rows - rows.mean(0)) / rows.std(0)).astype(np.float32)
    return rows[:, :-1], rows[:, -1]


def pbnn_side(x: Numbers, y: Numbers, arguments: argparse.Namespace) -> Run:
    """Return what fits with a number of draws and returns the leapfrogs, warm-up included."""
    import torch

    import pbnn

    torch.set_num_threads(arguments.threads)
    path = Path(__file__).parents[2] / "models" / "regression.py"
    model = pbnn.load_model(path, in_features=x.shape[1], hidden=HIDDEN)

    def run(draws: int) -> int:
        posterior = pbnn.fit_nuts(
            model,
            torch.from_numpy(x),
            torch.from_numpy(y),
            chains=arguments.chains,
            warmup=WARMUP,
            draws=draws,
            max_tree_depth=DEPTH,
            compile=True,
            progress=False,
        )
        return int(sum(posterior.provenance["leapfrogs"]))

    return run


def numpyro_side(x: Numbers, y: Numbers, arguments: argparse.Namespace) -> Run:
    """Return what draws a number of draws and returns their leapfrogs, after a warm-up."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.chains}"
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS, init_to_sample

    def model() -> None:
        priors = {
            "w0": dist.Normal(0, x.shape[1] ** -0.5).expand([HIDDEN, x.shape[1]]).to_event(2),
            "b0": dist.Normal(0, 1.0).expand([HIDDEN]).to_event(1),
            "w1": dist.Normal(0, HIDDEN**-0.5).expand([HIDDEN]).to_event(1),
            "b1": dist.Normal(0, 1.0),
            "scale": dist.HalfNormal(1.0),
        }
        v = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        f = jnp.tanh(x @ v["w0"].T + v["b0"]) @ v["w1"] + v["b1"]
        numpyro.sample("y", dist.Normal(f, v["scale"]), obs=y)

    def run(draws: int) -> int:
        mcmc = MCMC(
            NUTS(model, init_strategy=init_to_sample, max_tree_depth=DEPTH),
            num_warmup=WARMUP,
            num_samples=draws,
            num_chains=arguments.chains,
            chain_method=arguments.method,
            progress_bar=False,
        )
        mcmc.warmup(jax.random.PRNGKey(0), extra_fields=("num_steps",))
        mcmc.run(jax.random.PRNGKey(1), extra_fields=("num_steps",))
        return int(mcmc.get_extra_fields()["num_steps"].sum())

    return run


def main() -> None:
    """Time two runs and print the difference for each leapfrog."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=("pbnn", "numpyro"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of pbnn")
    parser.add_argument("--method", default="parallel", help="of NumPyro")
    parser.add_argument("--draws", type=int, nargs=2, default=(100, 700))
    arguments = parser.parse_args()
    x, y = table(arguments.data)
    run = (pbnn_side if arguments.side == "pbnn" else numpyro_side)(x, y, arguments)
    run(2)  # so that both timed runs find what was compiled before
    timed = []
    for draws in arguments.draws:
        start = time.perf_counter()
        leapfrogs = run(draws)
        timed.append((leapfrogs, time.perf_counter() - start))
    (few, short), (many, long) = timed
    print(f"{1e6 * (long - short) / (many - few):.1f} µs per leapfrog and chain")


if __name__ == "__main__":
    main()
