"""System calls that the sandbox refuses, as a filter program for the kernel (classic BPF).

The numbers are those of Linux's asm/unistd_64.h and asm-generic/unistd.h. All other calls are allowed. Namespaces limit
the resources that a program can reach. The filter removes parts of the kernel that programs do not need.
"""

from __future__ import annotations

import errno
import platform
import struct

# Name, number on x86_64, number on aarch64 (- if there is none).
_REFUSED = """
socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438, kcmp 312 272,
process_madvise 440 440, perf_event_open 298 241, bpf 321 280, userfaultfd 323 282, memfd_create 319 279,
memfd_secret 447 447, vmsplice 278 75, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
io_setup 206 0, keyctl 250 219, add_key 248 217, request_key 249 218, unshare 272 97, setns 308 268, mount 165 40,
umount2 166 39, pivot_root 155 41, chroot 161 51, fsopen 430 430, fsmount 432 432, fsconfig 431 431, fspick 433 433,
move_mount 429 429, open_tree 428 428, mount_setattr 442 442, name_to_handle_at 303 264, open_by_handle_at 304 265,
shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, semget 64 190, mq_open 240 180, mknod 133 -, mknodat 259 33,
init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294,
swapon 167 224, swapoff 168 225, reboot 169 142, syslog 103 116, acct 163 89, quotactl 179 60, sethostname 170 161,
setdomainname 171 162, personality 135 92, mbind 237 235, move_pages 279 239, migrate_pages 256 238,
set_mempolicy 238 237, fanotify_init 300 262, inotify_init1 294 26, lookup_dcookie 212 18, iopl 172 -, ioperm 173 -,
modify_ldt 154 -, clock_settime 227 112, settimeofday 164 170, adjtimex 159 171, clock_adjtime 305 266, vhangup 153 58
"""
# AUDIT_ARCH of <linux/audit.h>, the column in _REFUSED, the numbers of clone and clone3.
MACHINES = {"x86_64": (0xC000003E, 1, 56, 435), "aarch64": (0xC00000B7, 2, 220, 435)}
_X32 = 0x40000000  # the bit of x86_64's second set of call numbers, which would bypass the list
_NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW* that clone takes
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of BPF
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_* of <linux/seccomp.h>


def refused(machine: str) -> dict[str, int]:
    """Return the refused calls and their numbers on this machine."""
    column = MACHINES[machine][1]
    rows = [line.split() for line in _REFUSED.strip().split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def program(machine: str | None = None) -> bytes:
    """Return the filter as an array of struct sock_filter. machine: as in MACHINES, by default this one."""
    machine = machine or platform.machine()
    arch, _, clone, clone3 = MACHINES[machine]

    # An instruction is (operation, instructions to skip if true, to skip if false, value). Call numbers differ between
    # calling conventions. Calls of another convention (32-bit, x32) kill the process.
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        code += _when(_AT_LEAST, _X32, _KILL)
    for number in refused(machine).values():
        code += _when(_EQUAL, number, _ERRNO | errno.EPERM)

    # clone3 passes its flags in memory, which a filter cannot read. With ENOSYS, libraries fall back to clone.
    code += _when(_EQUAL, clone3, _ERRNO | errno.ENOSYS)
    new_namespace = _when(_ANY_BIT, _NEW_NAMESPACE, _ERRNO | errno.EPERM)
    code += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT), *new_namespace]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _when(test: int, value: int, verdict: int) -> list[tuple[int, int, int, int]]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, verdict)]
