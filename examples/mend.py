"""A posterior whose uncertainty does not rank, and what mends it: a sweep of ranks, then `mend`.

A noisy sine with a gap, two hidden layers, the diagonal guide: the hardest case of
docs/collapse.md. Both recipes judge by validation rows and by rows in the gap and far away.

python examples/mend.py             minutes
python examples/mend.py --smoke     seconds, for tests
"""

import argparse
import warnings
from pathlib import Path

import torch
from torch import Tensor

import pbnn
from pbnn.errors import PbnnWarning

MODEL = Path(__file__).parents[1] / "models" / "regression.py"
NOISE = 0.2


def observed(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return x `(n, 1)` and y `(n,)`."""
    noise = NOISE * torch.randn(len(x), generator=generator)
    return x[:, None], torch.sin(2 * x) + noise


def main() -> None:
    """Fit the diagonal guide, and print what the recipes make of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4_000, help="of SVI, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(arguments.seed)

    def uniform(low: float, high: float, rows: int) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=generator)

    def inside(rows: int) -> tuple[Tensor, Tensor]:
        sides = [uniform(-2.0, -0.5, rows // 2), uniform(0.5, 2.0, rows // 2)]
        return observed(torch.cat(sides), generator)

    train, validation = inside(100), inside(200)
    ood = {"gap": uniform(-0.5, 0.5, 100)[:, None], "far": uniform(4.0, 6.0, 100)[:, None]}
    hidden, ranks = (3, (1, 2)) if arguments.smoke else (20, (2, 4, 8, 16))
    model = pbnn.load_model(MODEL, in_features=1, hidden=hidden, depth=2, weight_scale=2.0)
    options = {"steps": arguments.steps, "draws": 500, "progress": False}
    if arguments.smoke:
        options = {"steps": 20, "draws": 20, "progress": False, "compile": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PbnnWarning)
        posterior = pbnn.fit_svi(model, *train, guide="normal", seed=arguments.seed, **options)
        print(
            pbnn.rank_sweep(
                model, train, validation, ood, ranks=ranks, seed=arguments.seed, **options
            )
        )
        print()
        print(pbnn.mend(model, posterior, train, validation, ood, seed=arguments.seed, **options))


if __name__ == "__main__":
    main()
