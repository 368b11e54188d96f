"""Profiles of the traffic that can be generated, from sources published under CC-BY 4.0.

- Azure LLM inference traces of 2023, github.com/Azure/AzurePublicDataset (Patel et al., "Splitwise", ISCA 2024);
- BurstGPT, github.com/HPMLL/BurstGPT (Wang et al., KDD 2025).

Published figures and quantiles are those of the source. Bursts and shape were fitted until generated traffic, at the
source's rate and length and over many seeds, had the same variation of intervals and the same peaks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.core.errors import ConfigError

QUANTILES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999, 1)


@dataclass(frozen=True)
class Profile:
    """A kind of traffic: statistics of its source, and generator parameters that reproduce them."""

    name: str
    source: str
    seconds: float  # length of the source
    # Figures of the source: rate in requests/s, cv_interarrival (standard deviation over mean of the intervals),
    # peak_to_mean_10s (requests in the busiest 10 s over the mean), and prompt (in_) and answer (out_) tokens.
    published: Mapping[str, float]
    cycle_s: float  # a run shorter than this has one cycle, compressed
    idle_s: float  # per cycle
    burst_s: float  # per cycle
    height: float  # rate in the highest burst over the mean rate
    shape: float  # of the gamma distribution of intervals: 1 is Poisson, smaller values are burstier
    input_tokens: tuple[float, ...]  # at QUANTILES
    output_tokens: tuple[float, ...]


AZURE_CONV = Profile(
    name="azure-conv",
    source="AzureLLMInferenceTrace_conv.csv: an hour of conversation, almost a Poisson process",
    seconds=3502,
    published={
        "rate": 5.53,
        "cv_interarrival": 1.09,
        "peak_to_mean_10s": 1.77,
        **{"in_mean": 1155, "in_p50": 1020, "in_p95": 4083},
        **{"out_mean": 211, "out_p50": 129, "out_p95": 451},
    },
    cycle_s=3502,
    idle_s=0,
    burst_s=1750,
    height=1.35,
    shape=1.1,
    input_tokens=(2, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4092, 4142, 4831, 6179, 14050),
    output_tokens=(7, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 522, 601, 643, 954, 1000),
)
AZURE_CODE = Profile(
    name="azure-code",
    source="AzureLLMInferenceTrace_code.csv: an hour of code completion, idle for minutes, then at many times the mean",
    seconds=3436,
    published={
        "rate": 2.567,
        "cv_interarrival": 13.15,
        "peak_to_mean_10s": 12.79,
        **{"in_mean": 2048, "in_p50": 1469, "in_p95": 7303},
        **{"out_mean": 28, "out_p50": 13, "out_p95": 90},
    },
    cycle_s=172,
    idle_s=105,
    burst_s=20,
    height=12.5,
    shape=0.5,
    input_tokens=(3, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7435, 7436, 7436, 7437, 7437),
    output_tokens=(6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 145, 251, 359, 825, 1899),
)
AZURE_BURST = Profile(
    name="azure-burst",
    source="both Azure traces of 2023 on one clock, seconds 881 to 953: little load, then a steep burst",
    seconds=72,
    published={
        "rate": 12.167,
        "cv_interarrival": 1.76,
        "peak_to_mean_10s": 3.19,
        **{"in_mean": 1726, "in_p50": 1111, "in_p95": 6183.5},
        **{"out_mean": 129, "out_p50": 28, "out_p95": 429.5},
    },
    cycle_s=72,
    idle_s=0,
    burst_s=14,
    height=3.4,
    shape=0.9,
    input_tokens=(12, 165, 209, 571, 994, 1042, 1111, 1352, 1794, 2410, 4077, 6184, 7412, 7436, 7436, 7437, 7437),
    output_tokens=(6, 6, 7, 9, 12, 16, 28, 61, 134, 384, 412, 430, 486, 638, 682, 921, 937),
)
BURSTGPT = Profile(
    name="burstgpt",
    source="BurstGPT_1.csv, Timestamp 744286 to 744358: three of four short requests within ten seconds",
    seconds=72,
    published={
        "rate": 1.472,
        "cv_interarrival": 3.19,
        "peak_to_mean_10s": 5.63,
        **{"in_mean": 125, "in_p50": 97, "in_p95": 114.5},
        **{"out_mean": 26, "out_p50": 15.5, "out_p95": 61.5},
    },
    cycle_s=72,
    idle_s=0,
    burst_s=6,
    height=9.9,
    shape=0.7,
    input_tokens=(0, 92, 93, 94, 95, 96, 97, 99, 100, 102, 105, 114, 483, 795, 1190, 1536, 1623),
    output_tokens=(0, 12, 13, 13, 13, 14, 16, 16, 18, 19, 30, 62, 135, 281, 312, 333, 338),
)

PROFILES = {profile.name: profile for profile in (AZURE_CONV, AZURE_CODE, AZURE_BURST, BURSTGPT)}


def profile_named(name: str) -> Profile:
    """Return the profile with this name. Raise ConfigError, naming all profiles, if it is unknown."""
    if name not in PROFILES:
        raise ConfigError(f"unknown traffic profile {name!r}: choose from {', '.join(PROFILES)}")
    return PROFILES[name]
