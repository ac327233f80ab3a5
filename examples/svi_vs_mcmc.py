"""SVI against MCMC on one model: fit three guides and NUTS, and see which cheap posterior to trust.

python examples/svi_vs_mcmc.py             a few minutes
python examples/svi_vs_mcmc.py --smoke     seconds, for tests: the verdict will say so
"""

import argparse
from pathlib import Path

import pbnn
from pbnn.data import prepare
from pbnn.inference_data import write_netcdf
from pbnn.runs import model_for

MODEL = Path(__file__).parents[1] / "models" / "regression.py"


def main() -> None:
    """Fit, compare, print the table, and write one netCDF file for each posterior."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/svi_vs_mcmc"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    steps, warmup, draws, depth = (50, 10, 10, 3) if arguments.smoke else (5000, 500, 500, 10)

    data = prepare("diabetes", target_kind="real")
    model = model_for(MODEL, data.preprocessor, {"hidden": 5 if arguments.smoke else 10})
    train, test = (data.x_train, data.y_train), (data.x_test, data.y_test)
    units = data.preprocessor.target_units

    fits = {
        guide: pbnn.fit_svi(model, *train, guide=guide, steps=steps)
        for guide in ("normal", "lowrank", "kronecker")
    }
    fits["nuts"] = pbnn.fit_nuts(model, *train, warmup=warmup, draws=draws, max_tree_depth=depth)

    print(pbnn.compare(fits, model, *test, reference="nuts", units=units))

    for name, posterior in fits.items():
        exported = pbnn.to_inference_data(
            posterior, model=model, x=data.x_train, y=data.y_train, x_new=data.x_test, units=units
        )
        print(write_netcdf(exported, arguments.out / f"{name}.nc"))


if __name__ == "__main__":
    main()
