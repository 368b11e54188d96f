"""Limits that control groups (cgroup v1 and v2) set for this process, in its own group and all groups above it.

Containers, systemd (`MemoryMax=`, `CPUQuota=`), Slurm and Kubernetes limit processes this way. Only what the process
can see counts: inside a cgroup namespace the groups above its root are hidden, and the kernel enforces them unseen.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes of memory that the process may use, or None if unlimited. `root` holds /proc and /sys."""
    limits = [
        int(text)
        for folder in _folders("memory", root)
        for name in ("memory.max", "memory.limit_in_bytes")  # cgroup v2, cgroup v1
        if (text := _read(folder / name)).isdigit()  # "max" means unlimited
    ]
    return min(limits, default=None)


def cpu_limit(root: Path = ROOT) -> float | None:
    """Return how many processors the process may use at once, or None if unlimited. `root` holds /proc and /sys."""
    limits = []
    for folder in _folders("cpu", root):
        v1 = " ".join(_read(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        quota, _, period = (_read(folder / "cpu.max") or v1).partition(" ")
        # A quota of "max" (v2) or "-1" (v1) means unlimited.
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folder of the process's group and the folders of all groups above it, wherever they are mounted."""
    groups = dict(_groups(root))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        *_, mount_root, mount_point = mount.split()[:5]
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            group = groups.get("")
        elif kind == "cgroup" and controller in options.split(","):
            group = groups.get(controller)
        else:
            continue
        if group is not None:
            yield from _path_to(group, mount_root, root / mount_point.lstrip("/"))


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller, the process's group) for each controller of cgroup v1, and ("", group) for cgroup v2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        yield from ((controller, group) for controller in controllers.split(","))


def _path_to(group: str, mount_root: str, top: Path) -> Iterator[Path]:
    """Yield the folder of a group and its parents up to `top`, the mount point of the group `mount_root`."""
    path = PurePosixPath(group)
    if path.is_relative_to(mount_root) and ".." not in path.parts:
        folder = top / path.relative_to(mount_root)
        while folder != top:
            yield folder
            folder = folder.parent
    yield top


def _read(path: Path) -> str:
    """Return a file's text without surrounding white space, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
