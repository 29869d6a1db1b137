"""Lets a vLLM process use AMX: the CPU kernels of vLLM 0.32 do, and Linux kills a process that has not asked for it.

Python imports it at the start of each process that has this folder in PYTHONPATH. A kernel without AMX refuses, and all
goes on. https://docs.kernel.org/arch/x86/xstate.html
"""

import ctypes
import platform

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18

if platform.machine() == "x86_64":
    ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
