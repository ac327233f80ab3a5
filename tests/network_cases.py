"""The model files with tiny options and data of their kind, for every test that walks them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pbnn

MODELS = Path(__file__).parents[1] / "models"
ROWS = 20


@dataclass(frozen=True)
class Case:
    """A model file, options that keep it small, and what its x and y are.

    Attributes:
        file: Name of the file in `models/`.
        options: Options of `Model`.
        x: "table", "image", "pixels", "sequence", "padded", "groups" or "none".
        y: "real", "count", "binary", "levels", "cells" or "effects".
        constants: Whether it has parameters without a prior.
    """

    file: str
    options: dict[str, Any] = field(default_factory=dict)
    x: str = "table"
    y: str = "real"
    constants: bool = False

    def build(self):
        """Return the model, x and y."""
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(ROWS, 3, generator=generator)
        image = torch.randn(ROWS, 1, 4, 4, generator=generator)
        sequence = torch.randn(ROWS, 4, 3, generator=generator)
        length = torch.arange(ROWS) % 4 + 1
        real = table[:, 0] - table[:, 1]
        x = {
            "table": table,
            "image": image,
            "pixels": image.flatten(1),
            "sequence": sequence,
            "padded": {"sequence": sequence, "length": length},
            "groups": {"x": table, "group": torch.arange(ROWS) % 3},
            "none": None,
        }[self.x]
        columns = {"image": 1, "pixels": 16, "none": None}.get(self.x, 3)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = pbnn.load_model(MODELS / f"{self.file}.py", columns, **self.options)
        y = {
            "real": real,
            "count": table[:, 0].abs().mul(2).round(),
            "binary": (table[:, 0] > 0).long(),
            "levels": (table[:, 0] > 0).long() + (table[:, 1] > 0).long(),
            "cells": torch.stack([real, torch.where(table[:, 2] > 0, torch.nan, real)], 1),
            "effects": getattr(model, "effects", None),
        }[self.y]
        return model, x, y


_NEGATIVE_BINOMIAL = {"hidden": 4, "likelihood": "negative_binomial"}
CASES = {
    "robust": Case("robust", {"hidden": 4}),
    "robust, df": Case("robust", {"hidden": 4, "df": 5.0}),
    "counts": Case("counts", {"hidden": 4}, y="count"),
    "counts, negative binomial": Case("counts", _NEGATIVE_BINOMIAL, y="count"),
    "counts, zero-inflated": Case("counts", {"hidden": 4, "zero_inflated": True}, y="count"),
    "counts, both": Case("counts", {**_NEGATIVE_BINOMIAL, "zero_inflated": True}, y="count"),
    "binary": Case("binary", {"hidden": 4}, y="binary"),
    "ordinal": Case("ordinal", {"hidden": 4}, y="levels"),
    "multi_output": Case("multi_output", {"hidden": 4}, y="cells"),
    "ard": Case("ard", {"hidden": 4}),
    "hierarchical": Case("hierarchical", {"hidden": 4, "groups": 3}, x="groups"),
    "convnet": Case("convnet", {"width": 2, "hidden": 4}, x="image", y="binary"),
    "convnet, table": Case(
        "convnet", {"width": 2, "hidden": 4, "channels": 1}, x="pixels", y="binary"
    ),
    "resnet": Case("resnet", {"width": 2, "blocks": 1}, x="image", y="binary", constants=True),
    "resnet, BatchNorm": Case(
        "resnet", {"width": 2, "blocks": 1, "norm": "batch"}, x="image", y="binary", constants=True
    ),
    "recurrent": Case("recurrent", {"hidden": 3}, x="padded", y="binary"),
    "recurrent, LSTM": Case("recurrent", {"hidden": 3, "kind": "lstm"}, x="padded", y="binary"),
    "recurrent, unpadded": Case("recurrent", {"hidden": 3}, x="sequence", y="binary"),
    "rank1": Case("rank1", {"hidden": 4}, constants=True),
    "rank1, decay": Case("rank1", {"hidden": 4, "weight_decay": 0.1}, constants=True),
    "lastlayer": Case("lastlayer", {"hidden": 4}, constants=True),
    "eight_schools": Case("eight_schools", {}, x="none", y="effects"),
    "eight_schools, centred": Case("eight_schools", {"centred": True}, x="none", y="effects"),
}
