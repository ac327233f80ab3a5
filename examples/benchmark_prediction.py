"""How long prediction takes: pbnn beside bare batched products and Pyro's Predictive.

python examples/benchmark_prediction.py              some minutes
python examples/benchmark_prediction.py --smoke      seconds, for tests

4,000 draws of a 6-50-1 tanh network, of the size of UCI yacht, at 30, 308 and 5,000 rows, on one
thread. The bare program is what one would write by hand for this network and no other: two
batched products and a tanh over all draws, or as many as a gigabyte holds. The tuned one works in
place on blocks that the caches hold. Each side samples y and returns it with f(x) for all draws,
start-up included; `pbnn.predict` returns moments, quantiles and their Monte Carlo errors instead.
Sides take turns, and each reports its fastest turn.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pyro.infer import Predictive
from torch import Tensor

import pbnn
from pbnn.files import writing

MODEL = Path(__file__).parents[1] / "models" / "regression.py"
FEATURES, HIDDEN = 6, 50
# Hidden values held at once: a gigabyte with their tanh; and the fastest of 2^17, 2^18, …, 2^22.
BARE, TUNED = 2**27, 2**18


def posterior(draws: int) -> pbnn.Posterior:
    """Return draws of the network's shapes; which values they have does not matter for time."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "layers.0.weight": (HIDDEN, FEATURES),
        "layers.0.bias": (HIDDEN,),
        "layers.1.weight": (1, HIDDEN),
        "layers.1.bias": (1,),
        "scale": (),
    }
    sites = {
        name: torch.randn(4, draws // 4, *shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }
    sites["scale"] = sites["scale"].exp()
    return pbnn.Posterior(
        draws=sites,
        stats={"lp": torch.zeros(4, draws // 4)},
        method="nuts",
        markov=True,
        seconds=0.0,
    )


def bare(draws: dict[str, Tensor], x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return f(x) and y of all draws by batched products, written for this network only."""
    count = len(draws["scale"])
    f = torch.empty(count, len(x))
    size = max(1, block // (len(x) * HIDDEN))
    tanh = torch.tanh_ if block == TUNED else torch.tanh
    for start in range(0, count, size):
        w, b, v, c = (
            draws[f"layers.{layer}.{part}"][start : start + size]
            for layer in (0, 1)
            for part in ("weight", "bias")
        )
        hidden = tanh(torch.baddbmm(b[:, None], x.expand(len(w), *x.shape), w.mT))
        f[start : start + size] = torch.baddbmm(c[:, None], hidden, v.mT)[..., 0]
    return f, f + draws["scale"][:, None] * torch.randn_like(f)


def measure(rows: int, draws: int, turns: int, pyro_share: int) -> dict[str, float]:
    """Return milliseconds by side, and the ratios that matter."""
    model = pbnn.load_model(MODEL, in_features=FEATURES, hidden=HIDDEN)
    drawn = posterior(draws)
    flat = drawn.flat()
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1))
    few = {name: value[: draws // pyro_share] for name, value in flat.items()}
    sides: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(flat, x, BARE),
        "tuned": lambda: bare(flat, x, TUNED),
        "pbnn.predictive": lambda: pbnn.predictive(model, drawn, x),
        "pbnn.predict": lambda: pbnn.predict(model, drawn, x),
        "Pyro Predictive": lambda: Predictive(model, few, return_sites=("y", "_RETURN"))(x),
    }
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(turns):
        for name, side in sides.items():
            start = time.perf_counter()
            with torch.no_grad():
                side()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    best["Pyro Predictive"] *= pyro_share
    return {
        "rows": rows,
        **best,
        "predictive / bare": best["pbnn.predictive"] / best["bare"],
        "predictive / tuned": best["pbnn.predictive"] / best["tuned"],
        "predict / bare": best["pbnn.predict"] / best["bare"],
        "Pyro / predictive": best["Pyro Predictive"] / best["pbnn.predictive"],
    }


def main() -> None:
    """Measure each number of rows, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark_prediction.json"))
    parser.add_argument("--rows", type=int, nargs="*", default=[30, 308, 5000])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draws = 40 if arguments.smoke else 4000
    results = []
    for rows in [5, 20] if arguments.smoke else arguments.rows:
        turns = 1 if arguments.smoke else max(2, arguments.turns // (1 + rows // 1000))
        # Pyro runs the draws one by one: of many rows a tenth of the draws is enough to time.
        results.append(measure(rows, draws, turns, 10 if rows >= 1000 else 1))
        print(", ".join(f"{name} {value:,.3g}" for name, value in results[-1].items()), flush=True)
    with writing(arguments.out) as path:
        path.write_text(json.dumps({"draws": draws, "milliseconds": results}, indent=1))
    print(arguments.out)


if __name__ == "__main__":
    main()
