"""A machine in QEMU: booted from a copy of a disk, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

_MEMORY = "2560M"
# Accelerator, kind and number of processors, and options of the kernel. Of two emulated processors
# each waits for the other, and may see half of an instruction that the other replaces in the
# kernel, which panics then. On one, without what makes the kernel slow there, programs take half of
# the processor time.
_EMULATED = ("tcg", "max,-erms", "1", " mitigations=off init_on_alloc=0")
_KVM = ("kvm", "host", "2", "")
_CMDLINE = (
    "root=/dev/vda rw console=ttyS0 quiet loglevel=1 panic=-1"
    " systemd.show_status=0 apparmor=1 security=apparmor"
)


def missing() -> str:
    """Return why no machine can be had here, "" if one can."""
    if os.uname().machine != "x86_64":
        return f"the machines are x86_64, and this one is {os.uname().machine}"
    programs = {
        "qemu-system-x86_64": "qemu-system-x86",
        "mmdebstrap": "mmdebstrap",
        "/usr/sbin/mke2fs": "e2fsprogs",
        "bwrap": "bubblewrap",
    }
    if os.geteuid():
        programs |= {"fakeroot": "fakeroot", "newuidmap": "uidmap"}
    lacking = [package for program, package in programs.items() if shutil.which(program) is None]
    if not lacking:
        return ""
    return f"Debian packages are missing; as root: apt-get install {' '.join(lacking)}"


def accelerator() -> str:
    """Return "kvm" where it works, else "tcg", which emulates the processor.

    A /dev/kvm on a processor that does not offer virtualisation is there to no avail: guests hang.
    """
    flags = Path("/proc/cpuinfo").read_text().split()
    if os.access("/dev/kvm", os.R_OK | os.W_OK) and {"vmx", "svm"} & set(flags):
        return "kvm"
    return "tcg"


def boot(folder: Path, given: Path, work: Path, patience: float) -> Iterator[str]:
    """Boot a machine, and yield the lines that what it was given prints, until it is off.

    `folder` has the machine (`roots.machine`), `given` is unpacked in there, and its `start` is
    run. The disk is copied into `work`, where it stays for the next boot. Beyond `patience` seconds
    the machine is killed. What its kernel and systemd say is in the file `console` of `work`.
    """
    archive, console, disk = work / "given", work / "console", work / "disk"
    if not disk.exists():
        subprocess.run(["cp", "--sparse=always", folder / "disk", disk], check=True)
    subprocess.run(["tar", "-cf", archive, "-C", given, "."], check=True)
    kind, processor, count, options = _KVM if accelerator() == "kvm" else _EMULATED
    command = [
        # Whatever ends this ends the machine.
        *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-M", "q35"),
        *("-accel", kind, "-cpu", processor, "-smp", count, "-m", _MEMORY),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"),
        *("-device", "virtio-rng-pci", "-serial", f"file:{console}", "-serial", "stdio"),
        *("-kernel", folder / "vmlinuz", "-initrd", folder / "initrd"),
        *("-append", _CMDLINE + options),
        *("-drive", f"file={disk},format=raw,if=virtio"),
        *("-drive", f"file={archive},format=raw,if=virtio,readonly=on"),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(work)},
    ) as machine:
        killer = Timer(patience, machine.kill)
        killer.start()
        try:
            assert machine.stdout is not None
            for line in machine.stdout:
                yield line.decode(errors="replace").rstrip()
        finally:
            killer.cancel()
            machine.kill()
