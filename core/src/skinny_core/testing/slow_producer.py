"""A kernel that lets its dependents start at once, waits, and only then writes: it shows a missing dependency wait.

field_bugs S08: under programmatic dependent launch a consumer that reads before it waits gets the old activation. CuTe
DSL, so it needs `skinny-core[cute]` and a GPU of capability 9.0 or later.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

THREADS = 256


@cute.kernel
def slow_copy_kernel(source: cute.Pointer, target: cute.Pointer, words: Int32, nanoseconds: Int32):
    cute.arch.griddepcontrol_launch_dependents()
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_wait()
    begun = cute.arch.globaltimer_lo()
    while cute.arch.globaltimer_lo() - begun < nanoseconds:
        pass
    a = cute.make_tensor(source, cute.make_layout(words))
    b = cute.make_tensor(target, cute.make_layout(words))
    for i in cutlass.range(tid, words, THREADS):
        b[i] = a[i]


@cute.jit
def slow_copy(source: Int64, target: Int64, words: Int32, nanoseconds: Int32, stream: CUstream):
    gmem = cute.AddressSpace.gmem
    slow_copy_kernel(
        cute.make_ptr(cutlass.Uint32, source, gmem), cute.make_ptr(cutlass.Uint32, target, gmem), words, nanoseconds
    ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)


class SlowProducer:
    """`producer(source, target)` copies source into target after `microseconds`, on the current stream."""

    def __init__(self, arch: str, microseconds: int = 100) -> None:
        from cutlass.cute.runtime import make_fake_stream

        self._run = cute.compile(
            slow_copy, Int64(0), Int64(0), Int32(0), Int32(0), make_fake_stream(),
            options=f"--enable-tvm-ffi --gpu-arch={arch}",
        )  # fmt: skip
        self._nanoseconds = microseconds * 1000

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """source, target: contiguous tensors of one dtype and size, a multiple of 4 bytes."""
        words = source.numel() * source.element_size() // 4
        stream = torch.cuda.current_stream(source.device).cuda_stream
        self._run(source.data_ptr(), target.data_ptr(), words, self._nanoseconds, stream)
