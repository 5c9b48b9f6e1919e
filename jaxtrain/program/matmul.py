"""FLOPs of single instructions of a compiled program: dot, convolution, library gemm."""

from __future__ import annotations

import math
import re

import numpy as np

from jaxtrain.program.text import Computation, Instruction


def matmul_flops(body: Computation, instruction: Instruction) -> float:
    """2*M*N*K of one instruction; 0 if it is no matmul and no convolution."""
    if instruction.opcode == "dot":
        lhs = body.operand_shapes(instruction)[0][0].dims
        contracted = instruction.names("lhs_contracting_dims")
        return 2.0 * instruction.shapes[0].elements * math.prod(lhs[int(dim)] for dim in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(body, instruction)
    if instruction.opcode == "custom-call" and is_gemm(instruction):
        return _gemm_flops(body, instruction)
    return 0.0


def is_gemm(instruction: Instruction) -> bool:
    """True if a custom call is a library's plain matmul (cuBLAS, cuBLASLt, oneDNN)."""
    target = instruction.attributes.get("custom_call_target", "")
    return re.search(r"\$(gemm|lt\$matmul|matmul)", target) is not None


def _gemm_flops(body: Computation, instruction: Instruction) -> float:
    """cuBLAS and oneDNN matmuls: a batch of [M, K] x [K, N], in any layout, rhs batched or not."""
    lhs, rhs = (shapes[0] for shapes in body.operand_shapes(instruction)[:2])
    result = instruction.shapes[0]
    config = instruction.attributes.get("backend_config", "").replace("\\", "")
    named = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', config)
    if named:
        contracted = math.prod(lhs.dims[int(dim)] for dim in re.findall(r"\d+", named[1]))
    else:
        # (B M K)(B K N) / (B M N) = B K^2, and B is known from the rhs.
        batch = math.prod(rhs.dims[:-2])
        contracted = math.isqrt(lhs.elements * rhs.elements // (result.elements * batch))
    return 2.0 * result.elements * contracted


def _convolution_flops(body: Computation, instruction: Instruction) -> float:
    """FLOPs of multiply-adds on real input elements: no padding, no dilation holes.

    TPU programs write batched dots as convolutions with one input element per output position.
    """
    lhs, rhs = (shapes[0].dims for shapes in body.operand_shapes(instruction)[:2])
    labels = re.split(r"_|->", instruction.attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attributes.get("window", "")))
    spatial = sorted(label for label in labels[0] if label.isdigit())
    size_of = [
        dict(zip(label, dims, strict=True))
        for label, dims in zip(labels, (lhs, rhs, instruction.shapes[0].dims), strict=True)
    ]

    def field(name: str, position: int, default: str) -> list[int]:
        text = window[name].split("x")[position] if name in window else default
        return [int(number) for number in re.findall(r"-?\d+", text)]

    pairs = 1
    for position, dim in enumerate(spatial):
        (stride,), (hole,) = field("stride", position, "1"), field("lhs_dilate", position, "1")
        (spread,), pad = field("rhs_dilate", position, "1"), field("pad", position, "0_0")
        out = np.arange(size_of[2][dim])[:, None] * stride - pad[0]
        index = out + np.arange(size_of[1][dim])[None, :] * spread
        pairs *= int(
            ((index >= 0) & (index <= (size_of[0][dim] - 1) * hole) & (index % hole == 0)).sum()
        )
    return 2.0 * pairs * size_of[2]["b"] * size_of[2]["f"] * size_of[1]["i"]
