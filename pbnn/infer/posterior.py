"""The `Posterior`: the frozen value in which every road from a model to uncertainty ends."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pbnn._version import __version__
from pbnn.errors import FileError
from pbnn.files import writing
from pbnn.model import BoundModel

__all__ = ["FORMAT", "Posterior", "provenance"]

FORMAT = 2
# Format 1 has no `per_draw`: all draws share constants and buffers.
_READ = (1, 2)
_BY_DRAW = ("draws", "deterministic", "stats")
_TENSOR_FIELDS = (*_BY_DRAW, "constants", "buffers", "history")


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Draws from a posterior, or from an approximation of it, and where they came from.

    Attributes:
        draws: Latent sites on their own (constrained) support, each `(chain, draw, *site_shape)`.
        deterministic: `pyro.deterministic` sites of the same draws, each `(chain, draw, *shape)`.
        stats: One number per draw, each `(chain, draw)`, under ArviZ's names. Always `lp`, the log
            joint density on the unconstrained space with its Jacobian; guides also `log_q`, the log
            density of the guide at the same point of the same space.
        constants: Parameters without a prior, by name, each `shape`, shared by all draws, or
            `(chain, draw, *shape)` where `per_draw` names it.
        buffers: Module buffers (running statistics), by name, likewise.
        per_draw: Names of the constants and buffers of which each draw has its own.
        method: The road, such as "nuts" or "svi".
        markov: Whether the draws are Markov chains. Draws of a guide are independent: they are one
            chain, and R-hat is not computed on them.
        seconds: Wall time of the fit.
        approximation: The variational family and its tensors, where there is one:
            `{"family": str, "tensors": {name: Tensor}, …}`.
        history: What the fit recorded on its way, by name: for SVI `elbo`,
            `expected_log_likelihood` and `kl`, one value a step.
        provenance: Options, seed, versions, device, dtype and notes of the fit; plain JSON values.
        mask_seed: Seed of the dropout masks, for MC dropout.
        warmup: What the chains went through before their draws, where the fit kept it: a posterior
            like this one but for draws, deterministic sites and statistics.
    """

    draws: Mapping[str, Tensor]
    stats: Mapping[str, Tensor]
    method: str
    markov: bool
    seconds: float
    deterministic: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    approximation: Mapping[str, Any] | None = None
    history: Mapping[str, Tensor] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    mask_seed: int | None = None
    per_draw: tuple[str, ...] = ()
    warmup: "Posterior | None" = None

    def __post_init__(self) -> None:
        """Keep names as a tuple, whatever they came in."""
        object.__setattr__(self, "per_draw", tuple(self.per_draw))

    @property
    def chains(self) -> int:
        """Number of chains."""
        return int(self.stats["lp"].shape[0])

    @property
    def draws_per_chain(self) -> int:
        """Number of draws in each chain."""
        return int(self.stats["lp"].shape[1])

    def flat(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return draws `start` to `stop`, chains one after another, each `(draws, *site_shape)`."""
        return {name: v.flatten(0, 1)[start:stop] for name, v in self.draws.items()}

    def state(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return the constants and buffers of draws `start` to `stop` that differ between draws.

        Returns:
            Those that `per_draw` names, chains one after another, each `(draws, *shape)`.
        """
        held = {**self.constants, **self.buffers}
        return {name: held[name].flatten(0, 1)[start:stop] for name in self.per_draw}

    def first_state(self) -> dict[str, Tensor]:
        """Return all constants and buffers as the first draw has them, each `shape`."""
        held = {**self.constants, **self.buffers}
        return {name: v[0, 0] if name in self.per_draw else v for name, v in held.items()}

    def select(
        self, *, chains: Iterable[int] | None = None, draws: slice | Tensor | None = None
    ) -> "Posterior":
        """Return the same posterior with some of its chains and draws only.

        Args:
            chains: Indices of the chains to keep; all by default.
            draws: Slice over the draws of each chain, or their indices; all by default.
        """
        rows = list(range(self.chains)) if chains is None else list(chains)
        cut = slice(None) if draws is None else draws

        def kept(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value[rows][:, cut] for name, value in values.items()}

        def kept_own(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            own = {name: value for name, value in values.items() if name in self.per_draw}
            return {**values, **kept(own)} if own else values

        return dataclasses.replace(
            self,
            draws=kept(self.draws),
            deterministic=kept(self.deterministic),
            stats=kept(self.stats),
            constants=kept_own(self.constants),
            buffers=kept_own(self.buffers),
            warmup=None if self.warmup is None else self.warmup.select(chains=rows),
        )

    def with_warmup(
        self,
        draws: Mapping[str, Tensor],
        deterministic: Mapping[str, Tensor],
        stats: Mapping[str, Tensor],
    ) -> Self:
        """Return the same posterior with what came before its draws; see `Posterior`."""
        before = dataclasses.replace(self, draws=draws, deterministic=deterministic, stats=stats)
        return dataclasses.replace(self, warmup=before)

    def repeated(self, least: int) -> "Posterior":
        """Return the same draws again and again, `least` of them or more over all chains.

        So that as many samples of y can be had of few draws: their mixture stays what it is.
        """
        times = -(-least // (self.chains * self.draws_per_chain))
        every = torch.arange(self.draws_per_chain)
        return self if times <= 1 else self.select(draws=every.repeat(times))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the posterior to one file that `load` reads without executing anything.

        The file appears under its name only when it is complete.

        Args:
            path: File name, by custom ending in `.pt`.

        Returns:
            The path written.
        """
        record: dict[str, Any] = {name: _alone(getattr(self, name)) for name in _TENSOR_FIELDS}
        approximation = dict(self.approximation or {})
        tensors = approximation.pop("tensors", {})
        record["approximation"] = _alone(tensors)
        if self.warmup is not None:
            record["warmup"] = {name: _alone(getattr(self.warmup, name)) for name in _BY_DRAW}
        record["json"] = json.dumps(
            {
                "format": FORMAT,
                "method": self.method,
                "markov": self.markov,
                "seconds": self.seconds,
                "mask_seed": self.mask_seed,
                "per_draw": self.per_draw,
                "provenance": dict(self.provenance),
                "approximation": None if self.approximation is None else approximation,
            }
        )
        path = Path(path)
        with writing(path) as temporary:
            torch.save(record, temporary)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mmap: bool = False) -> Self:
        """Read a posterior that `save` wrote, onto the CPU.

        Args:
            path: File name.
            mmap: Map the draws from disk instead of reading them into memory; damage inside the
                file is then not looked for.

        Raises:
            FileError: The file is missing, damaged, no posterior, or has a format this version
                cannot read.
        """
        path = Path(path)
        if not path.is_file():
            raise FileError(f"{path}: no such file; expected a posterior written by Posterior.save")
        if not zipfile.is_zipfile(path):
            raise FileError(f"{path}: not a posterior written by Posterior.save, or cut short")
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = None if mmap else archive.testzip()
            if damaged is not None:
                raise FileError(f"{path}: damaged (checksum of {damaged}); copy or fit it again")
            record = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            meta = json.loads(record["json"])
            found = meta.pop("format")
            if found not in _READ:
                raise FileError(
                    f"{path}: its format is {found}, and not one of {', '.join(map(str, _READ))}; "
                    "read it with the pbnn that wrote it"
                )
            family = meta.pop("approximation")
            tensors = record["approximation"]
            posterior = cls(
                **{name: record[name] for name in _TENSOR_FIELDS},
                approximation=None if family is None else {**family, "tensors": tensors},
                **meta,
            )
            return posterior.with_warmup(**record["warmup"]) if "warmup" in record else posterior
        except FileError:
            raise
        except Exception as error:
            raise FileError(
                f"{path}: not a posterior written by Posterior.save ({type(error).__name__})"
            ) from error


def _alone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU, none a view: torch writes the whole storage behind a view."""

    def alone(value: Tensor) -> Tensor:
        value = value.detach().cpu().contiguous()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()

    return {name: alone(value) for name, value in tensors.items()}


def provenance(bound: BoundModel, *, seed: int, **options: Any) -> dict[str, Any]:
    """Return where draws come from, as plain JSON values: the same record for every road.

    Args:
        bound: The model and data of the fit.
        seed: Seed of the fit.
        **options: The road's own options; what JSON does not know is kept in words.
    """
    record = {
        "seed": seed,
        "options": options,
        "rows": bound.rows,
        "observed": list(bound.named("observed")),
        "model": getattr(bound.model, "pbnn_source", None),
        "device": str(bound.device),
        "dtype": str(bound.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "pbnn": __version__,
            "torch": torch.__version__,
            "pyro": importlib.metadata.version("pyro-ppl"),
        },
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    plain: dict[str, Any] = json.loads(json.dumps(record, default=repr))
    return plain
