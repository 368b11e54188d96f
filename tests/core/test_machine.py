"""Memory and processors that control groups leave to a process, in a folder that looks like a machine's root."""

import ctypes
from pathlib import Path

import pytest

from jaxserve.core import cgroups, machine as hardware
from jaxserve.kernels.native import library
from tests.support.internals import native_library_path

GB = 10**9
V2 = "25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
)
DOCKER_V1 = (
    "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
    "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
)


@pytest.fixture
def root(tmp_path: Path):
    """Make a root of /proc and /sys from the mounts, the process's groups and what files below /sys/fs/cgroup say."""

    def make(mounts: str, groups: str, **files: str) -> Path:
        limits = {tmp_path / "sys/fs/cgroup" / name: text for name, text in files.items()}
        proc = {tmp_path / "proc/self/mountinfo": f"22 27 0:21 / /proc rw - proc proc rw\n{mounts}\n"}
        memory = "MemTotal: 24000000 kB\nMemAvailable: 16000000 kB\n"
        proc |= {tmp_path / "proc/self/cgroup": f"{groups}\n", tmp_path / "proc/meminfo": memory}
        for path, text in (limits | proc).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n" if path in limits else text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "memory", "processors"),
    [
        (V2, "0::/", {}, None, None),
        (V2, "0::/", {"memory.max": "1500000000", "cpu.max": "150000 100000"}, 1.5 * GB, 1.5),
        (V2, "0::/", {"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        (V2, "0::/a/b.service", {"a/b.service/memory.max": "1000", "memory.max": "500"}, 500, None),
        (V2, "0::/a/b.service", {"a/b.service/memory.max": "max", "a/memory.max": "2000"}, 2000, None),
        (V2, "0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "200000 100000"}, None, 0.5),
        (V2, "0::/a", {"b/memory.max": "1000"}, None, None),
        (V2, "0::/../elsewhere", {"memory.max": "3000"}, 3000, None),
        (
            V1,
            "11:memory:/slurm/job\n4:cpu,cpuacct:/slurm\n1:name=systemd:/\n0::/",
            {
                "memory/slurm/job/memory.limit_in_bytes": "9223372036854771712",
                "memory/slurm/memory.limit_in_bytes": "4000",
                "cpu,cpuacct/slurm/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4000,
            3,
        ),
        (
            DOCKER_V1,
            "11:memory:/docker/abc\n4:cpu:/docker/abc",
            {
                "memory/memory.limit_in_bytes": "2000",
                "cpu/cpu.cfs_quota_us": "25000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            2000,
            0.25,
        ),
    ],
    ids=[
        *("no-files", "namespace", "no-limits", "ancestor-is-less", "ancestor-alone", "least-of-two", "other-group"),
        *("outside-of-the-namespace", "v1", "docker-v1"),
    ],
)
def test_cgroup_limit_is_the_smallest_of_the_group_and_its_parents(root, mounts, groups, files, memory, processors):
    machine = root(mounts, groups, **files)
    assert cgroups.memory_limit(machine) == memory
    assert cgroups.cpu_limit(machine) == processors


def test_host_memory_is_what_is_available_within_the_cgroup_limit(root):
    assert hardware.host_memory(root(V2, "0::/a", **{"a/memory.max": "1500000000"})) == 1.5 * GB
    assert hardware.host_memory(root(V2, "0::/a", **{"a/memory.max": "99000000000000"})) == 16_000_000 * 1024


USED_V1 = {"memory/memory.limit_in_bytes": "3000000000", "memory/memory.usage_in_bytes": "2000000000"}


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "left"),
    [
        (V2, "0::/a", {"a/memory.max": "3000000000", "a/memory.current": "2000000000"}, GB),
        (V2, "0::/a/b", {"a/memory.max": "3000000000", "a/memory.current": "2000000000", "a/b/memory.max": "max"}, GB),
        (
            V2,
            "0::/a/b",
            {
                "a/memory.max": "9000000000",
                "a/memory.current": "8500000000",
                "a/b/memory.max": "1000000000",
                "a/b/memory.current": "300000000",
            },
            0.5 * GB,
        ),
        (
            V2,
            "0::/a",
            {
                "a/memory.max": "3000000000",
                "a/memory.current": "2000000000",
                "a/memory.stat": "anon 500000000\nactive_file 600000000\ninactive_file 900000000\nslab 1",
            },
            2.5 * GB,
        ),
        (V2, "0::/a", {"a/memory.max": "3000000000", "a/memory.current": "3100000000"}, 0),
        (DOCKER_V1, "11:memory:/docker/abc", USED_V1, GB),
        (
            DOCKER_V1,
            "11:memory:/docker/abc",
            USED_V1
            | {"memory/memory.stat": "active_file 7\ninactive_file 8\ntotal_active_file 0\ntotal_inactive_file 5"},
            GB + 5,
        ),
    ],
    ids=["v2", "parent", "least-left", "cache-of-files", "full", "v1", "v1-cache-of-files"],
)
def test_host_memory_is_what_the_processes_of_the_cgroup_leave(root, mounts, groups, files, left):
    machine = root(mounts, groups, **files)
    assert hardware.host_memory(machine) == left
    assert hardware.host_memory_limit(machine)[0] >= left


@pytest.mark.parametrize(
    ("limit", "size", "named"),
    [
        ("max", 24_000_000 * 1024, "machine"),
        ("1500000000", 1.5 * GB, "control group"),
        (str(10**18), 24_576 * 10**6, "machine"),
    ],
)
def test_limit_of_host_memory_is_the_machines_or_its_control_groups(root, limit, size, named):
    found, name = hardware.host_memory_limit(root(V2, "0::/a", **{"a/memory.max": limit}))
    assert found == size
    assert named in name


@pytest.mark.parametrize(("quota", "threads"), [("max", 64), ("200000", 2), ("150000", 2), ("10000", 1)])
def test_processors_follow_the_cpu_quota(root, monkeypatch, quota, threads):
    monkeypatch.setattr(hardware, "allowed_processors", lambda: 64)
    assert hardware.processors(root(V2, "0::/", **{"cpu.max": f"{quota} 100000"})) == threads


def test_machine_without_control_groups_has_no_limits(tmp_path):
    assert cgroups.memory_limit(tmp_path) is None
    assert cgroups.cpu_limit(tmp_path) is None
    assert hardware.host_memory(tmp_path) > 0
    assert hardware.host_memory_limit(tmp_path) is None


@pytest.mark.skipif(not library.targets(), reason="needs the native library")
def test_native_kernels_use_as_many_threads_as_processors():
    native = ctypes.CDLL(str(native_library_path()()))
    native.jaxserve_processors.restype = ctypes.c_int64
    assert native.jaxserve_processors() == hardware.processors()
