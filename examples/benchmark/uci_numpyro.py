"""NumPyro's NUTS by the UCI protocol: files that examples/uci.py reads as the road "numpyro".

python examples/benchmark/uci_numpyro.py --data FOLDER --out runs/uci --datasets yacht --seeds 0 1 2

The network and its priors are those of examples/uci.py. Needs NumPyro and not pbnn.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_sample

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
SETTINGS = ("hidden", "chains", "warmup", "draws", "max_tree_depth")


def network(v: dict[str, Any], x: Any) -> Any:
    """Return f(x) `(n,)`."""
    return jnp.tanh(x @ v["w0"].T + v["b0"]) @ v["w1"] + v["b1"]


def sampled(x: Any, y: Any, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return draws by site, chains one after another."""
    hidden = arguments.hidden

    def model() -> None:
        priors = {
            "w0": dist.Normal(0, 1.0).expand([hidden, x.shape[1]]).to_event(2),
            "b0": dist.Normal(0, 1.0).expand([hidden]).to_event(1),
            "w1": dist.Normal(0, hidden**-0.5).expand([hidden]).to_event(1),
            "b1": dist.Normal(0, 1.0),
            "scale": dist.HalfNormal(1.0),
        }
        v = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        numpyro.sample("y", dist.Normal(network(v, x), v["scale"]), obs=y)

    mcmc = MCMC(
        NUTS(model, init_strategy=init_to_sample, max_tree_depth=arguments.max_tree_depth),
        num_warmup=arguments.warmup,
        num_samples=arguments.draws,
        num_chains=arguments.chains,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(seed))
    draws: dict[str, Any] = mcmc.get_samples()
    return draws


def scores(draws: dict[str, Any], x: Numbers, y: Numbers, scale: float, seed: int) -> Any:
    """Return the scores by held-out row, in original units, under the names of examples/uci.py."""
    f = np.asarray(jax.vmap(lambda v: network(v, x))(draws), dtype=float)
    noise = np.asarray(draws["scale"], dtype=float)[:, None]
    density = -0.5 * ((y - f) / noise) ** 2 - np.log(noise) - 0.5 * np.log(2 * np.pi)
    sampled_y = f + noise * np.random.default_rng(seed).standard_normal(f.shape)
    low, high = np.quantile(sampled_y, [0.05, 0.95], axis=0)
    return {
        "lpd": (np.logaddexp.reduce(density, 0) - np.log(len(f)) - np.log(scale)).tolist(),
        "error": ((f.mean(0) - y) * scale).tolist(),
        "f_scale": (f.std(0, ddof=1) * scale).tolist(),
        "covered": ((low <= y) & (y <= high)).tolist(),
    }


def main() -> None:
    """Fit what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/uci"))
    parser.add_argument("--datasets", nargs="+", default=["yacht", "concrete"])
    parser.add_argument("--splits", nargs="+", type=int, default=[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--max-tree-depth", type=int, default=9)
    arguments = parser.parse_args()
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    for seed in arguments.seeds:
        for split in arguments.splits:
            for name in arguments.datasets:
                path = arguments.out / f"{name}-{split}-numpyro-{seed}.json"
                if path.is_file() and json.loads(path.read_text())["settings"] == settings:
                    continue
                values = np.loadtxt(arguments.data / f"{name}.csv", delimiter=",", skiprows=1)
                listed = json.loads((arguments.data / f"{name}.splits.json").read_text())
                test = np.isin(np.arange(len(values)), listed["test_rows"][split])
                loc, scale = values[~test].mean(0), values[~test].std(0)
                scale[scale == 0] = 1.0
                train, held_out = ((values[rows] - loc) / scale for rows in (~test, test))
                start = time.perf_counter()
                draws = sampled(
                    jnp.array(train[:, :-1], dtype="float32"),
                    jnp.array(train[:, -1], dtype="float32"),
                    seed,
                    arguments,
                )
                seconds = time.perf_counter() - start
                scored = scores(draws, held_out[:, :-1], held_out[:, -1], float(scale[-1]), seed)
                result = {**scored, "seconds": seconds, "verdict": "", "settings": settings}
                temporary = path.with_suffix(".part")
                temporary.write_text(json.dumps(result))
                temporary.replace(path)
                print(f"{path.stem}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
