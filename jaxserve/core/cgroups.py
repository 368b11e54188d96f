"""Limits that control groups (cgroup v1 and v2) set for this process, in its own group and all groups above it.

Containers, systemd (`MemoryMax=`, `CPUQuota=`), Slurm and Kubernetes limit processes this way. Only what the process
can see counts: inside a cgroup namespace the groups above its root are hidden, and the kernel enforces them unseen.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes of memory that the process may use, or None if unlimited. `root` holds /proc and /sys."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that the process may still take, or None if unlimited. `root` holds /proc and /sys.

    A group's limit holds for all its processes together. Its cache of files counts as free, because the kernel drops it
    when memory is asked for.
    """
    left = []
    for folder, limit in _memory_limits(root):
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        fields = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
        # In cgroup v1 the totals count groups below as well, as all numbers do in v2.
        cached = sum(int(fields.get(f"total_{name}", fields.get(name, 0))) for name in ("active_file", "inactive_file"))
        left.append(limit - max(0, used - cached))
    return max(0, min(left)) if left else None


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the limit in bytes of each group that limits the memory of the process."""
    for folder in _folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2, cgroup v1
            if (limit := _number(folder / name)) is not None:
                yield folder, limit


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if there is none; "max" means unlimited."""
    text = _read(path)
    return int(text) if text.isdigit() else None


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
