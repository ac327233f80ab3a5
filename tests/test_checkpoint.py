import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from density_cases import funnel

from pbnn.errors import FileError
from pbnn.infer.checkpoint import Checkpoint, digest
from pbnn.infer.lanes import Rule
from pbnn.infer.options import Options
from pbnn.infer.sampler import sample

OPTIONS = Options(warmup=60, draws=60, rule=Rule(max_tree_depth=3))

SCRIPT = """
import sys
import torch
from density_cases import funnel
from test_checkpoint import OPTIONS, start
from pbnn.infer.sampler import sample

torch.set_num_threads(1)
sample(funnel, start, OPTIONS, checkpoint=sys.argv[1], resume=True, every=0.0)
"""


def start():
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


def run_until_killed(folder: Path, saves: int) -> int:
    """Run in a process of its own, and kill it after some checkpoints; return its exit status."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)], env={**os.environ, "PYTHONPATH": path}
    )
    seen, last = 0, None
    while process.poll() is None and seen < saves:
        state = folder / "state.pt"
        now = state.stat().st_mtime_ns if state.exists() else None
        seen, last = seen + (now != last), now
        time.sleep(0.001)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    return process.wait()


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    whole = sample(funnel, start, OPTIONS)
    for saves in (1, 4):
        assert run_until_killed(tmp_path, saves) == -signal.SIGKILL
    result = sample(funnel, None, OPTIONS, checkpoint=tmp_path, resume=True)
    assert torch.equal(result.draws, whole.draws)
    assert all(torch.equal(result.stats[name], value) for name, value in whole.stats.items())
    assert torch.equal(result.lengths, whole.lengths)
    assert torch.equal(result.leapfrogs, whole.leapfrogs)
    assert result.calls == whole.calls
    assert not list(tmp_path.glob("*.part"))
    # A finished run gives its draws again, without a leapfrog.
    again = sample(funnel, None, OPTIONS, checkpoint=tmp_path, resume=True)
    assert torch.equal(again.draws, whole.draws)


def test_a_run_that_was_interrupted_goes_on(tmp_path):
    calls = 0

    def interrupting(z):
        nonlocal calls
        calls += 1
        if calls == 300:
            raise KeyboardInterrupt
        return funnel(z)

    part = sample(interrupting, start, OPTIONS, checkpoint=tmp_path, every=0.0)
    assert part.interrupted
    result = sample(funnel, start, OPTIONS, checkpoint=tmp_path, resume=True)
    assert torch.equal(result.draws, sample(funnel, start, OPTIONS).draws)


@pytest.mark.parametrize(
    ("options", "identity", "name"),
    [
        (Options(warmup=10, draws=6), {"data": "a"}, "draws is 5 there and 6 here"),
        (Options(warmup=10, draws=5, seed=1), {"data": "a"}, "seed is 0 there and 1 here"),
        (Options(warmup=10, draws=5), {"data": "b"}, "data is a there and b here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, options, identity, name):
    mine = Options(warmup=10, draws=5)
    sample(funnel, start, mine, checkpoint=tmp_path, identity={"data": "a"})
    with pytest.raises(FileError, match=name):
        sample(funnel, start, options, checkpoint=tmp_path, identity=identity, resume=True)


def test_a_checkpoint_is_not_overwritten_unasked(tmp_path):
    sample(funnel, start, Options(warmup=0, draws=2), checkpoint=tmp_path)
    with pytest.raises(FileError, match="resume=True"):
        sample(funnel, start, Options(warmup=0, draws=2), checkpoint=tmp_path)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "state.pt").write_text("not a checkpoint")
    with pytest.raises(FileError, match="not a checkpoint"):
        Checkpoint(tmp_path, {}).load()


def test_digests_tell_values_apart():
    x = torch.arange(6.0)
    same = digest({"a": x, "b": None}, [1, "2"])
    assert same == digest({"b": None, "a": x.clone()}, (1, "2"))
    others = [x.double(), x.reshape(2, 3), x + 1, x.reshape(2, 3).T]
    assert len({digest(value) for value in [x, *others]}) == 5
