"""The only place that sets the device count: eight fake CPU devices for the whole session."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax
import pytest
import selection
import typecheck
from report import Report

DEVICES = 8

typecheck.install()

# A shell gives what it runs in the background an ignored interrupt, nohup an ignored hangup; tests
# send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)
# Compile time is what tests cost. What a program sends and multiplies is settled before its code is
# made, so code is made the cheap way; emitting it by MLIR is half of a compilation (JAX 0.11 has no
# other way). In children too: what they train is held to the bit against what this process does.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
flags = os.environ.get("XLA_FLAGS", "")
if jax.__version_info__ < (0, 11) and "fusion_emitters" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false".strip()
# Tracing makes many small objects that live on: to look through them seldom is 4% of the time.
gc.set_threshold(50_000, 20, 100)
# Programs are kept between runs, by each of pytest's processes for itself, since one may read what
# another has half written.
process = os.environ.get("PYTEST_XDIST_WORKER", "")
default = str(Path(tempfile.gettempdir()) / f"jaxtrain-xla{process}")
cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", default)
jax.config.update("jax_compilation_cache_dir", cache)
# What runs of tests make of data is not for the user's home.
tokenised = str(Path(tempfile.gettempdir()) / "jaxtrain-tests")
os.environ["JAXTRAIN_CACHE"] = os.environ.get("JAXTRAIN_CACHE", tokenised)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Report(config))
    config.pluginmanager.register(selection.Selection(config))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A command tells JAX of its devices by the environment: no test may find another's."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def optimising_compiler() -> Iterator[None]:
    """For programs that run for longer than they compile, for what it alone drops, and for two
    programs of one arithmetic that are held to the bit: made cheaply, they differ in the last."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def answers_within() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which whatever takes longer than so many seconds fails."""

    @contextmanager
    def limited(seconds: int) -> Iterator[None]:
        def late(*_: object) -> None:
            raise AssertionError(f"no answer in {seconds} seconds")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return limited
