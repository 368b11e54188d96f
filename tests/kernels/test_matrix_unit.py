"""The kernels of the matrix unit (AMX), as compiled by every compiler that is installed, on processors without one."""

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.core.machine import processor_features
from jaxserve.kernels.native import build

HERE = Path(__file__).parent / "native"
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has this matrix unit"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
UNITS = {"attention_amx.cc": build.AMX, "matmul_amx.cc": build.AMX, "matmul_amx_int8.cc": build.AMX_INT8}
LOAD = re.compile(r"^\s*ldtilecfg\s+(.+)$", re.MULTILINE)
# In place of the instruction: its address as an argument, and a stack that the call may use. It never returns.
CAPTURE = r"\tleaq \1, %rdi\n\tsubq $512, %rsp\n\tandq $-64, %rsp\n\tcall captured@PLT"


def compilers() -> list[str]:
    """Return the C++ compilers of the machine, one name for each."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    names = {found.name for folder in folders for found in folder.glob("*++*")}
    names = {name for name in names if re.fullmatch(r"c\+\+|(g|clang)\+\+-\d+", name)}
    return list({os.path.realpath(shutil.which(name) or name): name for name in sorted(names, reverse=True)}.values())


def configuration(*columns: int, short: int = 0) -> str:
    """Return the bytes of a configuration in hexadecimal, of tiles with 16 rows of as many words; 0: no tile.

    The last `short` tiles have 8 rows.
    """
    rows = [16 if words else 0 for words in columns]
    rows[len(rows) - short :] = [8] * short
    widths = [4 * words for words in columns]
    parts = [bytes([1, *[0] * 15]), b"".join(width.to_bytes(2, "little") for width in widths), bytes(16), bytes(rows)]
    return b"".join((*parts, bytes(8))).hex()


def assembled(compiler: str, source: Path, flags: list[str], folder: Path) -> Path:
    """Compile a source, with `captured` in place of every load of a configuration, and return the object."""
    listing = folder / f"{source.stem}.s"
    command = [compiler, *build.FLAGS, *flags, "-I", str(build.HERE)]
    if "clang" in compiler:
        command = [part for part in command if "maybe" not in part]
    subprocess.run([*command, "-S", str(source), "-o", str(listing)], check=True)
    text, count = LOAD.subn(CAPTURE, listing.read_text())
    assert count, f"{source.name} loads no tile configuration"
    product = "tdpbusd" if "int8" in source.stem else "tdpbf16ps"
    for instruction in ("tileloadd", product, "tilestored") if source.name in UNITS else ():
        assert re.search(rf"\b{instruction}\b", text), f"{source.name} has no {instruction}"
    listing.write_text(text)
    subprocess.run([compiler, "-c", listing, "-o", listing.with_suffix(".o")], check=True)
    return listing.with_suffix(".o")


@pytest.mark.parametrize("compiler", compilers())
def test_all_of_a_tile_configuration_is_in_memory_when_it_is_loaded(compiler, tmp_path):
    amx = [assembled(compiler, build.HERE / name, flags, tmp_path) for name, flags in UNITS.items()]
    helper = assembled(compiler, HERE / "tile_helper.cc", ["-mamx-tile"], tmp_path)
    program = tmp_path / "program"
    command = [compiler, "-std=c++17", "-I", build.HERE, HERE / "tile_configurations.cc", helper, *amx, "-o", program]
    subprocess.run(command, check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    loaded = dict(line.split() for line in said.splitlines())
    expected = {
        "helper": configuration(*[16] * 8),
        "attention": configuration(*[16] * 8),
        "rows1": configuration(1, 0, 1, 0, 16, 16, 1, 0),
        "rows17": configuration(16, 1, 16, 1, 16, 16, 16, 1),
        "rows33": configuration(*[16] * 8),
        "integers32": configuration(*[16] * 4, 8, 8, 16, 16, short=2),
        "integers64": configuration(*[16] * 8),
    }
    assert loaded == {name: expected[name] for name in loaded}
    assert "helper" in loaded


def test_tile_configurations_are_loaded_in_one_place():
    sources = [path for path in build.HERE.iterdir() if path.suffix in {".cc", ".h"}]
    assert [path.name for path in sources if "ldtilecfg" in path.read_text()] == ["amx.h"]
    assert not [path.name for path in sources if "_tile_loadconfig" in path.read_text()]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory, native_kernels):
    """Return what kernels of the matrix unit compute on emulated tiles: lines of words, by the first two words."""
    if not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(processor_features().split()):
        pytest.skip("needs a CPU with AVX-512, which these kernels use besides")
    folder = tmp_path_factory.mktemp("emulated")
    tiles = [*build.AVX512, "-include", str(HERE / "emulated_tiles.h")]
    kernels = ("attention_amx", "attention_bf16", "matmul_amx", "matmul_amx_int8")
    units = [(f"{name}.cc", tiles) for name in kernels]
    units += [("attention.cc", build.AVX512), ("check_attention.cc", []), ("check_matmul.cc", [])]
    units.append((str(HERE / "emulated_kernels.cc"), []))

    def compiled(index):
        source, flags = units[index]
        object_file = folder / f"{index}.o"
        command = ["c++", *build.FLAGS, *flags, "-O1", "-I", str(build.HERE), "-c", str(build.HERE / source)]
        subprocess.run([*command, "-o", str(object_file)], check=True)
        return object_file

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, range(len(units))))
    subprocess.run(
        ["c++", *objects, native_kernels.library._library(), "-pthread", "-o", folder / "program"], check=True
    )
    said = subprocess.run([folder / "program"], capture_output=True, text=True, check=True).stdout
    return {tuple(words[:2]): [float(word) for word in words[2:]] for words in map(str.split, said.splitlines())}


@pytest.mark.parametrize(
    "kernel",
    [
        *("attention", "attention-of-pairs", "product16", "product8", "product4", "product3"),
        *("integers8", "integers4", "integers3"),
    ],
)
def test_kernel_of_the_matrix_unit_passes_its_check_on_emulated_tiles(emulated, kernel):
    (error,) = emulated["checked", kernel]
    assert error <= 1


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_integers_of_the_matrix_unit_give_the_same_bits_as_those_of_vectors(emulated, bits):
    assert emulated["integers", str(bits)] == [0]


@pytest.mark.parametrize("shape", ["G3,D64,window1048576", "G1,D128,window1048576", "G3,D64,window9"])
def test_attention_on_emulated_tiles_is_as_exact_as_in_float32(emulated, shape):
    unit, pairs, vectors, rounding = emulated["errors", shape]
    assert unit == pytest.approx(vectors, rel=0.01)
    assert unit == pytest.approx(rounding, rel=0.01)
    assert unit < pairs < 1.5 * rounding, "their weights are rounded to bfloat16"
