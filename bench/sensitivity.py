"""The best order in which to swap the bundled model's layers, compared with other orders on unseen text.

    python -m bench.sensitivity [--precisions int8,int4,int3] [--held-out-tokens N] [--out FOLDER]

Calibration text: modules of the standard library on the training side of the split. Held-out text: documents used
neither for training nor for calibration. Writes both texts, the profile and its plot to the folder and prints tables.
`jaxserve profile` gives equal results for the two texts.
"""

import argparse
import time
from pathlib import Path

from bench.quantization import texts
from jaxserve.calibration.sensitivity import SensitivityProfile
from jaxserve.calibration.sensitivity.plot import draw
from jaxserve.calibration.sensitivity.profile import FILE_NAME, LIS, MDS, Weights
from jaxserve.calibration.sensitivity.run import Options, profile_model
from jaxserve.cli.profile import HEADINGS, MEASURES, mean_and_range
from jaxserve.core.bundled import bundled_model_path


def main() -> None:
    """Print tables in Markdown."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    files = []
    for name, documents in zip(("calibration", "held_out"), texts(), strict=True):
        files.append(options.out / f"{name}.txt")
        files[-1].write_text("\n\n".join(document.text for document in documents), encoding="utf-8")
    began = time.perf_counter()
    profile = profile_model(
        bundled_model_path(),
        *files,
        Options(
            precisions=tuple(options.precisions.split(",")),
            tokens=options.calib_tokens,
            compare_orders=True,
            held_out_tokens=options.held_out_tokens,
            weights=Weights(*map(float, options.weights.split(","))),
            positions=options.positions,
        ),
    )
    took = time.perf_counter() - began
    profile.save(options.out / FILE_NAME)
    (options.out / FILE_NAME).with_suffix(".png").write_bytes(draw(profile))
    _print(profile)
    print(f"\n{took:.0f} s; {profile.model} {profile.model_sha256[:12]}")
    for text in (profile.calibration, profile.held_out):
        print(f"{text.name}: sha256 {text.sha256[:12]}, {text.rows} sequences of {text.length} tokens")


def _print(profile: SensitivityProfile) -> None:
    print(f"| precision | order of swapping | {' | '.join(HEADINGS)} |")
    print("| --- | --- | ---: | ---: | ---: |")
    for precision in profile.precisions:
        scores = profile.of(precision)
        orders = {LIS: scores.order, MDS: scores.mds_order}
        for name, curves in profile.curves[precision].items():
            named = " ".join((name, *map(str, orders.get(name, ()))))
            print(f"| {precision} | {named} | {' | '.join(mean_and_range(curves, measure) for measure in MEASURES)} |")
    print("\n| precision | layer | LTS | LRS | MDS | place in the order |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for precision in profile.precisions:
        scores = profile.of(precision)
        for layer, values in enumerate(zip(scores.lts, scores.lrs, scores.mds, strict=True)):
            numbers = " | ".join(f"{value:.5f}" for value in values)
            print(f"| {precision} | {layer} | {numbers} | {scores.order.index(layer) + 1} |")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default="int8,int4,int3")
    parser.add_argument("--calib-tokens", type=int, default=4096)
    parser.add_argument("--held-out-tokens", type=int, default=8192)
    parser.add_argument("--weights", default="0.25,0.25,0.5", help="weights of LTS, LRS and MDS")
    parser.add_argument("--positions", choices=("all", "last"), default="all")
    parser.add_argument("--out", type=Path, default=Path("bench/out/sensitivity"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
