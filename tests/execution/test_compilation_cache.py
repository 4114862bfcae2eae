"""The compilation cache: on unless told otherwise, the same tokens from it, and never in the way."""

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from kv_execution.compilation_cache import default_cache_folder, reporting_cache_faults

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = """
import json, sys
import jax
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
from kv_execution import EngineConfig, PagedEngine, SamplingParams
from models import load_model
settings = json.loads(sys.argv[2])
engine = PagedEngine(load_model(sys.argv[1]), EngineConfig(
    max_requests=2, max_step_tokens=16, max_context=64, kv_pool_bytes=1 << 20, **settings))
engine.init_paged_runtime()
params = SamplingParams(max_tokens=6, ignore_eos=True)
tokens = [result.tokens for result in engine.generate(json.loads(sys.argv[3]), params)]
print(json.dumps({"tokens": tokens, "hits": len(hits), "folder": jax.config.jax_compilation_cache_dir}))
"""

PROMPTS = [[5, 6, 7], [9]]


class Run(NamedTuple):
    tokens: list[list[int]]
    hits: int
    folder: str | None
    complaints: list[str]


def run(
    golden: Path, home: Path, settings: dict | None = None, prompts: list[list[int]] = PROMPTS, **environment: str
) -> Run:
    """One process that generates a little, with `home` for its cache folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(golden / "llama"), json.dumps(settings or {}), json.dumps(prompts)],
        env=inherited
        | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return Run(**json.loads(done.stdout), complaints=done.stderr.splitlines())


def entries(home: Path) -> list[Path]:
    return sorted((home / "jaxkv" / "compilation").glob("jit_*"))


def test_a_relative_cache_folder_is_ignored_as_its_specification_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home in ("cache", "./cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        assert default_cache_folder().is_absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "jaxkv" / "compilation"


@pytest.fixture(scope="module")
def filled(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A cache that one process has filled, and that process."""
    home = tmp_path_factory.mktemp("cache")
    return home, run(golden, home)


def test_a_second_process_loads_what_the_first_compiled_and_says_the_same(
    golden: Path, filled: tuple[Path, Run]
) -> None:
    home, first = filled
    stored = entries(home)
    assert {"jit_forward", "jit_greedy_rows"} <= {entry.name.split("-")[0] for entry in stored}
    second = run(golden, home)
    assert (first.hits, second.hits) == (0, len(stored))
    assert second.tokens == first.tokens
    assert first.complaints == second.complaints == []
    assert entries(home) == stored
    assert (home / "jaxkv" / "compilation").stat().st_mode & 0o077 == 0


def test_damaged_entries_are_one_line_and_are_made_anew(golden: Path, filled: tuple[Path, Run]) -> None:
    home, first = filled
    for entry in entries(home):
        if entry.name.startswith("jit_forward-"):
            entry.write_bytes(entry.read_bytes()[:100])
    second = run(golden, home)
    assert second.tokens == first.tokens
    assert len(second.complaints) == 1
    assert "failed for jit_forward" in second.complaints[0]
    assert run(golden, home).complaints == []
    healed = run(golden, home)
    assert healed.complaints == []
    assert healed.hits == len(entries(home))


def test_a_folder_that_cannot_be_written_is_one_line(golden: Path, filled: tuple[Path, Run], tmp_path: Path) -> None:
    (tmp_path / "jaxkv").write_text("a file where the folder should be")
    cut_off = run(golden, tmp_path)
    assert cut_off.tokens == filled[1].tokens
    assert len(cut_off.complaints) == 1
    assert "no compilation cache" in cut_off.complaints[0]


def test_it_can_be_turned_off_and_a_folder_of_the_users_own_is_kept(golden: Path, tmp_path: Path) -> None:
    one = [[9]]  # whose chunk has the shape of the steps that follow
    assert run(golden, tmp_path, {"compilation_cache": False}, one).folder is None
    assert run(golden, tmp_path, prompts=one, JAX_ENABLE_COMPILATION_CACHE="false").folder is None
    own = str(tmp_path / "own")
    assert run(golden, tmp_path, prompts=one, JAX_COMPILATION_CACHE_DIR=own).folder == own
    assert entries(tmp_path) == []


def test_warnings_of_others_meanwhile_go_where_they_would_have_gone(caplog: pytest.LogCaptureFixture) -> None:
    raised: list[Warning] = []

    def warn() -> None:
        try:
            warnings.warn("of another thread", RuntimeWarning, stacklevel=1)
        except RuntimeWarning as warning:
            raised.append(warning)

    other = threading.Thread(target=warn)
    with reporting_cache_faults():  # filters of this suite make every warning an error
        other.start()
        other.join()
    assert [str(warning) for warning in raised] == ["of another thread"]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "not to be shown")
        with reporting_cache_faults():
            fault = "Error reading persistent compilation cache entry for 'f': ValueError"
            for text in ("not to be shown", "to be shown", fault):
                warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["to be shown"]
    (told,) = caplog.messages  # of the suite's own folder, which is not the engine's to delete from
    assert "failed for f, which was compiled anew" in told
