"""Generated traffic has the published statistics of its source."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench.traces.profiles import PROFILES, QUANTILES
from jaxserve.bench.traces.synthetic import synthetic
from jaxserve.core.errors import ConfigError
from tests.bench.trace_statistics import statistics

STATS = Path(__file__).parents[3] / "shared" / "traces" / "stats.json"
SOURCES = {
    "azure-conv": "azure2023_conv",
    "azure-code": "azure2023_code",
    "azure-burst": "win72_azure_all_881",
    "burstgpt": "burstgpt1_72s_744286",
}
# Of the mean over many seeds. Peaks depend on how a burst lies to the bins; the one of BurstGPT's slice fills just one.
TOLERANCE = {"rate": 0.02, "cv_interarrival": 0.1, "peak_to_mean_10s": 0.12}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", PROFILES)
def test_arrivals_vary_as_published(name):
    profile = PROFILES[name]
    seeds = range(20 if profile.seconds > 1000 else 400)
    runs = [statistics(synthetic(profile, profile.seconds, None, rng(seed)), profile.seconds) for seed in seeds]
    for key, tolerance in TOLERANCE.items():
        mean = np.mean([run[key] for run in runs])
        assert mean == pytest.approx(profile.published[key], rel=tolerance), key


@pytest.mark.parametrize("name", PROFILES)
def test_lengths_are_the_published_ones(name):
    published = PROFILES[name].published
    found = statistics(synthetic(PROFILES[name], 1000, 100.0, rng()))
    for key in published.keys() - TOLERANCE.keys():
        assert found[key] == pytest.approx(published[key], rel=0.06), key


@pytest.mark.skipif(not STATS.is_file(), reason="the published statistics are not here")
@pytest.mark.parametrize("name", PROFILES)
def test_published_numbers_are_those_of_the_files(name):
    facts = json.loads(STATS.read_text())[SOURCES[name]]
    assert PROFILES[name].seconds == pytest.approx(facts["seconds"], abs=0.5)
    for key, value in PROFILES[name].published.items():
        assert value == pytest.approx(facts[key], rel=0.001), key


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize(("duration", "rate"), [(60, 10.0), (60, 1.0), (400, 4.0)])
def test_generated_trace_has_any_rate_and_duration(name, duration, rate):
    traces = [synthetic(PROFILES[name], duration, rate, rng(seed)) for seed in range(20)]
    assert np.mean([len(trace) for trace in traces]) == pytest.approx(duration * rate, rel=0.12)
    assert all(trace.duration_s < duration for trace in traces)


def test_short_generated_trace_has_its_burst():
    for seed in range(10):
        trace = synthetic(PROFILES["azure-code"], 60, 20.0, rng(seed))
        assert statistics(trace, 60)["peak_to_mean_10s"] > 2


def test_trace_depends_on_the_seed_alone():
    first, again, other = (synthetic("burstgpt", 30, 5.0, rng(seed)) for seed in (1, 1, 2))
    assert first.arrival_s.tolist() == again.arrival_s.tolist() != other.arrival_s.tolist()
    assert first.input_tokens.tolist() == again.input_tokens.tolist()


def test_history_describes_the_generated_trace():
    trace = synthetic(PROFILES["azure-burst"], 30, 5.0, rng())
    assert trace.description() == {
        "trace": "azure-burst",
        "requests": len(trace),
        "duration_s": round(trace.duration_s, 6),
        "shared_prefixes": False,
        "history": [
            {
                "operation": "synthetic",
                "profile": "azure-burst",
                "duration_s": 30,
                "rate": 5.0,
                "requests": len(trace),
            }
        ],
    }


@pytest.mark.parametrize("name", PROFILES)
def test_profile_is_consistent(name):
    profile = PROFILES[name]
    assert profile.name == name
    for lengths in (profile.input_tokens, profile.output_tokens):
        assert len(lengths) == len(QUANTILES)
        assert list(lengths) == sorted(lengths)


@pytest.mark.parametrize(
    ("duration", "rate"), [(0, 1.0), (-5, 1.0), (10, 0.0), (float("inf"), 1.0), (10, float("nan"))]
)
def test_duration_and_rate_must_be_positive(duration, rate):
    with pytest.raises(ConfigError, match="must be above 0"):
        synthetic(PROFILES["azure-conv"], duration, rate, rng())


def test_unknown_profile_error_lists_all_profiles():
    with pytest.raises(ConfigError, match=r"'nope': choose from azure-conv, azure-code"):
        synthetic("nope", 60, None, rng())
