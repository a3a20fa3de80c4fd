"""Peak rates of GPUs and TPUs, from the data sheets of NVIDIA and Google.

The rates of GPUs are those of the tensor cores without sparsity. (Most sheets print the rates with sparsity, which are
twice as high.) On Ampere and later, the rate of float32 is that of TF32, JAX's default precision on these GPUs. On
older GPUs, it is that of FP32. The tensor cores of Volta and Turing do not support bfloat16, so these GPUs have no
bfloat16 rate.

The data sheets are NVIDIA's "V100 GPU Accelerator" and "V100S", "T4", "A10", "A10G" (for AWS), "L4", "L40S",
"A100 80GB", "H100" (SXM and NVL; PCIe in the edition of 2022), "H200" (SXM and NVL), and "HGX B200" (whose rate for
eight GPUs is divided by 8).

On TPUs, JAX's default precision of float32 multiplies in bfloat16, so both have the same rate. JAX counts a chip of TPU
v2 and v3 as two devices, and a chip of later versions as one. The rates are the peaks per chip in Google Cloud's pages
"TPU v2", "TPU v3", "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e".
"""

import re

_TERA = 1e12

_PEAKS: dict[str, dict[str, float]] = {
    "V100S": {"float32": 16.4, "float16": 130},
    "V100 SXM2": {"float32": 15.7, "float16": 125},
    "V100 PCIE": {"float32": 14, "float16": 112},
    "T4": {"float32": 8.1, "float16": 65},
    "A10": {"float32": 62.5, "float16": 125, "bfloat16": 125},
    "A10G": {"float32": 35, "float16": 70, "bfloat16": 70},
    "L4": {"float32": 60, "float16": 121, "bfloat16": 121},
    "L40S": {"float32": 183, "float16": 362.05, "bfloat16": 362.05},
    "A100": {"float32": 156, "float16": 312, "bfloat16": 312},
    "H100 PCIE": {"float32": 378, "float16": 756.5, "bfloat16": 756.5},
    "H100 NVL": {"float32": 417.5, "float16": 835.5, "bfloat16": 835.5},
    "H100 HBM3": {"float32": 494.5, "float16": 989.5, "bfloat16": 989.5},
    "H200 NVL": {"float32": 417.5, "float16": 835.5, "bfloat16": 835.5},
    "H200": {"float32": 494.5, "float16": 989.5, "bfloat16": 989.5},
    "B200": {"float32": 1125, "float16": 2250, "bfloat16": 2250},
    "TPU V2": {"float32": 23, "bfloat16": 23},
    "TPU V3": {"float32": 61.5, "bfloat16": 61.5},
    # The "lite" version of TPU v4 is not a product of Google Cloud, and no peak of it is known.
    "TPU V4 LITE": {},
    "TPU V4": {"float32": 275, "bfloat16": 275},
    "TPU V5 LITE": {"float32": 197, "bfloat16": 197},
    "TPU V5": {"float32": 459, "bfloat16": 459},
    "TPU V6 LITE": {"float32": 918, "bfloat16": 918},
}
"""10^12 operations per second. An entry matches if the device kind contains all its words. The first match is used."""


def peak(device_kind: str, dtype: str) -> float | None:
    """Return the peak floating-point operations per second of one device for a dtype; None if unknown.

    Args:
        device_kind: JAX's name, such as "NVIDIA H200", "NVIDIA A100-SXM4-80GB" or "TPU v5 lite", which is TPU v5e.
    """
    words = set(re.split(r"[\s-]+", device_kind.upper()))
    # The name of a MIG slice contains the name of its GPU, but a slice is slower.
    if "MIG" in words:
        return None
    rates = next((peaks for kind, peaks in _PEAKS.items() if words.issuperset(kind.split())), {})
    return rates[dtype] * _TERA if dtype in rates else None
