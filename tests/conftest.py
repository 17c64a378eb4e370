"""What every test shares: one thread per process, a fixed seed, the `gpu` marker, little garbage."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Tensors here are tiny and several ranks share few cores: more threads only make tests slower.
# Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# Torch is imported where tests run: the process that only deals them out, and that the workers
# wait for, does without.

# Derandomized, so that a failure is the same for everyone; no deadline, since the first example
# pays for imports and caches.
settings.register_profile("shardweave", deadline=None, derandomize=True)
settings.load_profile("shardweave")


def pytest_configure(config: pytest.Config) -> None:
    """Look for no garbage while the tests are imported: nearly all that imports make stays. Hide
    GPUs, unless tests marked `gpu` are asked for: the others are of the CPU, on every machine."""
    gc.disable()
    if "gpu" not in str(config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Begin to look for garbage, rarely."""
    from shardweave.tests.garbage import look_rarely

    look_rarely()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what tests generate out of the user's cache; a folder that is given is used."""
    os.environ.setdefault("SHARDWEAVE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def traces_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of this run share traces."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "traces"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def shared_traces(traces_folder: Path) -> Iterator[None]:
    """Let captures of equal models share the trace of the first; the rest of a capture is run."""
    from shardweave.tests.shared_traces import FOLDER, SharedTraces

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(traces_folder))
        patch.setattr("shardweave.ir.capture.capture.trace", SharedTraces(traces_folder).trace)
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Make the random tensors of every test the same, in whatever order the tests run."""
    import torch

    torch.default_generator.manual_seed(0)  # the CPU's: asking every kind of device takes 1 ms


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and `pytest -m gpu`"))
