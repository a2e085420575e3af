"""Tests of the system call filter, run by a small BPF interpreter, against the kernel's call numbers."""

from __future__ import annotations

import errno
import struct

import pytest

from megatron_brorl.rewards.sandbox import seccomp

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000  # SECCOMP_RET_*. The error number is added to ERRNO.
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# From the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
NUMBERS = {
    "x86_64": {"read": 0, "socketpair": 53, "execve": 59, "socket": 41, "ptrace": 101, "bpf": 321, "clone": 56},
    "aarch64": {"read": 63, "socketpair": 199, "execve": 221, "socket": 198, "ptrace": 117, "bpf": 280, "clone": 220},
}


def verdict(machine: str, number: int, argument: int = 0, arch: int | None = None) -> int:
    """Return the decision of a machine's filter for a call (struct seccomp_data), by the definition of classic BPF."""
    code = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    call = struct.pack("=iIQ6Q", number, ARCH[machine] if arch is None else arch, 0, argument, *[0] * 5)
    accumulator = position = 0
    while True:
        operation, jump_if_true, jump_if_false, operand = code[position]
        position += 1
        if operation == 0x06:  # return
            return operand
        if operation == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("=I", call, operand)
        else:
            tests = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            position += jump_if_true if tests[operation] else jump_if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_are_refused_or_allowed_by_number(machine):
    numbers = NUMBERS[machine]
    for name in ("read", "socketpair", "execve", "clone"):
        assert verdict(machine, numbers[name]) == ALLOW, name
    for name in ("socket", "ptrace", "bpf"):
        assert verdict(machine, numbers[name]) == ERRNO | errno.EPERM, name
    for number in seccomp.refused(machine).values():
        assert verdict(machine, number) == ERRNO | errno.EPERM
    assert verdict(machine, 435) == ERRNO | errno.ENOSYS  # clone3
    # clone makes threads and processes, but no namespaces.
    assert verdict(machine, numbers["clone"], 0x3D0F00) == ALLOW  # the flags that glibc uses for a thread
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):  # CLONE_NEW* flags
        assert verdict(machine, numbers["clone"], bit | 17) == ERRNO | errno.EPERM  # 17 is SIGCHLD


def test_other_calling_conventions_kill_the_process():
    assert verdict("x86_64", 0, arch=0x40000003) == KILL  # i386
    assert verdict("x86_64", 0x40000000) == KILL  # x32
    assert verdict("aarch64", 63, arch=0x40000028) == KILL  # 32-bit Arm
