"""Test only: plain torch versions of the few `_C` ops that vLLM's CPU backend calls, in place of its libraries.

Enough for a BF16 decoder with causal attention, neox rotary embedding and greedy sampling. They exercise the host's
control flow, not the host's kernels. Schemas take the arguments of 0.33 and default those that 0.26 does not pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

LIBRARY: list[torch.library.Library] = []


def register() -> None:
    """Entry point of `vllm.general_plugins`: define the ops once per process, and only where vLLM runs on the CPU."""
    if LIBRARY or os.environ.get("SKINNY_STUB_PLATFORM") != "cpu":
        return
    # vLLM would choose its own packed GEMM on a CPU with AMX: the tests must not depend on the CPU they run on.
    torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]
    library = torch.library.Library("_C", "FRAGMENT")
    LIBRARY.append(library)

    def op(schema: str, function: Callable[..., Any]) -> None:
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

    op("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    op(
        "get_scheduler_metadata(int nreq, int nh, int nkv, int d, Tensor seq_lens, ScalarType dt, Tensor qsl,"
        " bool causal, int win, str isa, bool split, Tensor? dyn=None, str kvd='auto') -> Tensor",
        lambda *_: torch.zeros(1, dtype=torch.int8),
    )
    op(
        "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) kc, Tensor(b!) vc, Tensor slots, str isa,"
        " float ks=1., float vs=1., str kvd='auto') -> ()",
        write_kv_cache,
    )
    op(
        "cpu_attention_with_kv_cache(Tensor q, Tensor kc, Tensor vc, Tensor(a!) out, Tensor qsl, Tensor sl,"
        " float scale, bool causal, Tensor? alibi, int win, Tensor bt, float cap, Tensor meta, Tensor? sink=None,"
        " Tensor? dyn=None, float ks=1., float vs=1., str kvd='auto') -> ()",
        paged_attention,
    )
    op("compute_slot_mapping_kernel_impl(Tensor qsl, Tensor pos, Tensor bt, Tensor(a!) slots, int bs) -> ()", slots)
    op("rotary_embedding(Tensor pos, Tensor(a!) q, Tensor(b!)? k, int d, Tensor cs, bool neox) -> ()", rotary)
    op("silu_and_mul(Tensor(a!) out, Tensor x) -> ()", silu_and_mul)
    op("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1).view(-1))
    op("convert_weight_packed(Tensor weight) -> Tensor", lambda weight: weight.clone())
    op(
        "weight_packed_linear(Tensor x, Tensor weight, Tensor? bias, bool vnni) -> Tensor",
        lambda x, w, b, _: F.linear(x, w, b),
    )
    op("fused_gumbel_argmax(Tensor p, Tensor seeds) -> Tensor", lambda p, seeds: p.argmax(-1).view(-1))


def write_kv_cache(key, value, key_cache, value_cache, slot_of_token, *_) -> None:  # type: ignore[no-untyped-def]
    """Caches are [block, head, position, dim]; a negative slot is padding."""
    block = key_cache.shape[2]
    real = slot_of_token >= 0
    slot = slot_of_token[real]
    count = slot_of_token.numel()
    key_cache[slot // block, :, slot % block] = key[:count][real]
    value_cache[slot // block, :, slot % block] = value[:count][real]


def paged_attention(q, kc, vc, out, starts, lengths, scale, causal, alibi, win, blocks, *_) -> None:  # type: ignore[no-untyped-def]
    """One request after the other, keys gathered from the paged cache. q [tokens, heads, dim]."""
    size = kc.shape[2]
    for request in range(lengths.numel()):
        first, last, total = int(starts[request]), int(starts[request + 1]), int(lengths[request])
        if last <= first:
            continue
        ids = blocks[request, : (total + size - 1) // size].long()
        keys = kc[ids].transpose(1, 2).flatten(0, 1)[:total].transpose(0, 1)
        values = vc[ids].transpose(1, 2).flatten(0, 1)[:total].transpose(0, 1)
        mask = torch.ones(last - first, total, dtype=torch.bool).tril(total - (last - first)) if causal else None
        query = q[first:last].transpose(0, 1)
        result = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )[0]
        out[first:last] = result.transpose(0, 1).reshape(out[first:last].shape)


def slots(starts, positions, blocks, out, size) -> None:  # type: ignore[no-untyped-def]
    """Slot of each token: block id times block size plus the offset in the block."""
    for request in range(min(blocks.shape[0], starts.numel() - 1)):
        first, last = int(starts[request]), int(starts[request + 1])
        position = positions[first:last].long()
        out[first:last] = blocks[request].long()[position // size] * size + position % size


def rotary(positions, q, k, dim, cos_sin, neox) -> None:  # type: ignore[no-untyped-def]
    """Neox layout, in place. cos_sin [position, 2 * half]."""
    cos, sin = cos_sin[positions.flatten()].chunk(2, -1)
    half = cos.shape[-1]
    for tensor in (q, k):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, dim)
        a, b = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = a * cos[:, None] - b * sin[:, None]
        heads[..., half : 2 * half] = b * cos[:, None] + a * sin[:, None]


def silu_and_mul(out, x) -> None:  # type: ignore[no-untyped-def]
    """out [..., d] = silu(x[..., :d]) * x[..., d:]."""
    half = x.shape[-1] // 2
    out.copy_(F.silu(x[..., :half]) * x[..., half:])
