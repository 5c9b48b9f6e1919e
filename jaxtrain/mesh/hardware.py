"""Chips and links: what the hardware can do at best, each number with its source.

Units: FLOP/s are dense (vendors also quote 2:4 sparse numbers, twice as large). Everything in
`gbytes` is 1e9 bytes. A link's bandwidth is what one device can send in one direction, over all
its ports (vendors quote both directions summed). A *device* is what JAX calls one: the two
chiplets of a TPU7x are two devices, the two cores of a TPU v4 or v5p are one ("megacore").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from jaxtrain.violations import did_you_mean, nearest

Table = TypeVar("Table")

PLATFORMS = ("cpu", "gpu", "tpu")
"""JAX's names of platforms."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device: peak dense matmul FLOP/s, memory, power.

    `fp32_flops` is for matmuls at JAX's precision `highest`: CUDA-core FMAs on GPUs (no TF32), six
    bf16 passes on TPUs. `fp8_flops`, and `int8_flops` of whole numbers of 8 bits, are None where
    these are only emulated or the vendor publishes none, `watts` (limit of the
    device) where the vendor publishes none. `hbm_gbytes` is what the driver reports, before what
    the runtime keeps for itself, `usable_gbytes` what it leaves to a program, where that is known:
    a GPU's pool, what a TPU's compiler has. `device_kinds` are JAX's names for this device.
    `capability`: of a GPU, its major compute capability: 9 is Hopper. `clock_ghz`: of a TPU, in
    which its compiler's estimates of kernels are.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...] = ()
    capability: int | None = None
    clock_ghz: float | None = None
    devices_per_chip: int = 1
    bf16_flops: float
    fp8_flops: float | None = None
    int8_flops: float | None = None
    fp32_flops: float
    hbm_gbytes: float
    usable_gbytes: float | None = None
    hbm_bandwidth_gbytes: float
    watts: float | None = None
    source: str

    def peak_flops(self, dtype: str) -> float:
        """Dense peak for matmuls of `dtype`, by NumPy's name; ValueError if there is none."""
        peaks = {
            "float32": self.fp32_flops,
            "bfloat16": self.bf16_flops,
            "float16": self.bf16_flops,
            "float8_e4m3fn": self.fp8_flops,
            "float8_e5m2": self.fp8_flops,
            "int8": self.int8_flops,
        }
        peak = peaks.get(dtype)
        if peak is None:
            able = [name for name, flops in peaks.items() if flops is not None]
            raise ValueError(
                f"chip {self.name} has no matmul peak for {dtype!r}; it has {', '.join(able)}"
            )
        return peak


@dataclass(frozen=True)
class Link:
    """One kind of link, as one device sees it.

    `bandwidth_gbytes` is GB/s in one direction over all `ports` together. A switch is one port
    (every peer at full speed); a torus has two ports for each of its dims, and a ring along one
    dim uses just those two. `latency_us` is one hop of a small message.
    """

    name: str
    bandwidth_gbytes: float
    latency_us: float
    ports: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a machine for planning; None is unknown. Hours and prices are per device.

    usable_gbytes: in place of the chip's, where runs set XLA_CLIENT_MEM_FRACTION (`memory_pool`).
    """

    nics_per_host: int | None = None
    switch_levels: int | None = None
    storage_bandwidth_gbytes: float | None = None
    mtbf_hours: float | None = None
    price_per_hour: float | None = None
    power_watts: float | None = None
    preemptible: bool | None = None
    usable_gbytes: float | None = None
    source: str = ""


def _gib(gibibytes: float) -> float:
    """GiB in units of 1e9 bytes."""
    return gibibytes * 2**30 / 1e9


POOL = 0.75
"""Of a GPU's memory, as CUDA reports it: what JAX takes at its start (docs.jax.dev, GPU memory)."""

Named = TypeVar("Named", "Chip", "Link")


def _by_name(rows: Iterable[Named]) -> dict[str, Named]:
    return {row.name: row for row in rows}


# A TPU's clock is its bf16 peak over the FLOPs of a cycle: 2 for each of 128 x 128 numbers in 4
# matrix units of v5e and 8 of v5p, of 256 x 256 in 4 of v6e.
CHIPS: dict[str, Chip] = _by_name(
    (
        Chip(
            name="a100_80g",
            platform="gpu",
            capability=8,
            device_kinds=("NVIDIA A100-SXM4-80GB",),
            bf16_flops=312e12,
            int8_flops=624e12,
            fp32_flops=19.5e12,
            hbm_gbytes=_gib(81920 / 1024),
            usable_gbytes=POOL * 85.100,
            hbm_bandwidth_gbytes=2039,
            watts=400,
            source="NVIDIA A100 datasheet (A100 80GB SXM, without sparsity); memory: nvidia-smi",
        ),
        Chip(
            name="h100_sxm",
            platform="gpu",
            capability=9,
            device_kinds=("NVIDIA H100 80GB HBM3",),
            bf16_flops=989.4e12,
            fp8_flops=1978.9e12,
            int8_flops=1978.9e12,
            fp32_flops=66.9e12,
            hbm_gbytes=_gib(81559 / 1024),
            usable_gbytes=POOL * 84.943,
            hbm_bandwidth_gbytes=3350,
            watts=700,
            source="NVIDIA H100 architecture white paper (SXM5, dense); memory: nvidia-smi",
        ),
        Chip(
            name="h200",
            platform="gpu",
            capability=9,
            device_kinds=("NVIDIA H200",),
            bf16_flops=989.4e12,
            fp8_flops=1978.9e12,
            int8_flops=1978.9e12,
            fp32_flops=66.9e12,
            hbm_gbytes=_gib(143771 / 1024),
            usable_gbytes=POOL * 151.398,
            hbm_bandwidth_gbytes=4800,
            watts=700,
            source="NVIDIA H200 datasheet (SXM; sparse numbers halved); memory: nvidia-smi",
        ),
        Chip(
            name="b200",
            platform="gpu",
            capability=10,
            device_kinds=("NVIDIA B200",),
            bf16_flops=2250e12,
            fp8_flops=4500e12,
            int8_flops=4500e12,
            fp32_flops=75e12,
            hbm_gbytes=_gib(183359 / 1024),
            usable_gbytes=POOL * 191.514,
            hbm_bandwidth_gbytes=7672,
            watts=1000,
            source="NVIDIA DGX/HGX B200 datasheets per GPU (sparse numbers halved); memory: "
            "nvidia-smi; bandwidth: 7680-bit bus x 3996 MHz x 2 (datasheets round to 8 TB/s)",
        ),
        Chip(
            name="tpu_v4",
            platform="tpu",
            device_kinds=("TPU v4",),
            bf16_flops=275e12,
            int8_flops=275e12,
            fp32_flops=275e12 / 6,
            hbm_gbytes=_gib(32),
            hbm_bandwidth_gbytes=1200,
            watts=192,
            source="Google Cloud TPU v4 documentation, key specifications (measured max power)",
        ),
        Chip(
            name="tpu_v5e",
            platform="tpu",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            clock_ghz=1.5,
            bf16_flops=197e12,
            int8_flops=393e12,
            fp32_flops=197e12 / 6,
            hbm_gbytes=_gib(16),
            usable_gbytes=_gib(15.75),
            hbm_bandwidth_gbytes=819,
            source="Google Cloud TPU v5e documentation, key chip specifications; usable: libtpu "
            '0.0.42 refuses more ("available HBM (15.75G)")',
        ),
        Chip(
            name="tpu_v5p",
            platform="tpu",
            device_kinds=("TPU v5", "TPU v5p"),
            clock_ghz=1.75,
            bf16_flops=459e12,
            fp8_flops=459e12,
            int8_flops=918e12,
            fp32_flops=459e12 / 6,
            hbm_gbytes=_gib(95),
            hbm_bandwidth_gbytes=2765,
            source="Google Cloud TPU v5p documentation, key specifications",
        ),
        Chip(
            name="tpu_v6e",
            platform="tpu",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            clock_ghz=1.75,
            bf16_flops=918e12,
            fp8_flops=918e12,
            int8_flops=1836e12,
            fp32_flops=918e12 / 6,
            hbm_gbytes=_gib(32),
            usable_gbytes=_gib(31.25),
            hbm_bandwidth_gbytes=1638,
            source="Google Cloud TPU v6e documentation, key specifications; fp8: TPU7x page, "
            "table; usable: libtpu 0.0.42, as v5e",
        ),
        Chip(
            name="tpu7x",
            platform="tpu",
            device_kinds=("TPU7x",),
            devices_per_chip=2,
            bf16_flops=2307e12 / 2,
            fp8_flops=4614e12 / 2,
            fp32_flops=2307e12 / 2 / 6,
            hbm_gbytes=_gib(192 / 2),
            usable_gbytes=_gib(94.75),
            hbm_bandwidth_gbytes=7380 / 2,
            source="Google Cloud TPU7x documentation, halved: two devices a chip; usable: libtpu "
            "0.0.42, as v5e",
        ),
        Chip(
            name="cpu",
            platform="cpu",
            device_kinds=("cpu",),
            bf16_flops=450e9,
            fp32_flops=450e9,
            hbm_gbytes=_gib(16),
            hbm_bandwidth_gbytes=40,
            source="order of magnitude: XLA matmul measured on two x86-64 cores (bf16 no faster); "
            "simulated devices share one processor",
        ),
    )
)
"""Chips by the name that a mesh file uses."""

_NCCL = "latency: NCCL src/graph/tuning.cc, hwLat, ring of protocol Simple"
_CLOUD = "Google Cloud TPU documentation, bidirectional ICI bandwidth per chip, halved"
_HOP = "latency: order of magnitude, Austin et al. 2025, How to Scale Your Model"

LINKS: dict[str, Link] = _by_name(
    # name, GB/s one way per device, us, ports, source
    (
        Link("pcie4", 31.5, 5.7, 1, f"PCI Express 4.0: 16 lanes x 16 GT/s x 128/130; {_NCCL}"),
        Link("pcie5", 63.0, 5.7, 1, f"PCI Express 5.0: 16 lanes x 32 GT/s x 128/130; {_NCCL}"),
        Link("nvlink3", 300, 3.4, 1, f"NVIDIA A100 datasheet: 600 GB/s, both ways; {_NCCL}"),
        Link("nvlink4", 450, 3.4, 1, f"NVIDIA H100 datasheet: 900 GB/s, both ways; {_NCCL}"),
        Link("nvlink5", 900, 3.4, 1, f"NVIDIA DGX B200 datasheet: 14.4 TB/s, 8 GPUs; {_NCCL}"),
        Link("infiniband_ndr", 50, 9.6, 1, f"NVIDIA ConnectX-7 datasheet: 400 Gb/s; {_NCCL}"),
        Link("roce_400", 50, 9.6, 1, f"IEEE 802.3bs: 400 Gb/s Ethernet, a NIC a GPU; {_NCCL}"),
        Link("ici_v4", 300, 1, 6, f"Jouppi et al. 2023, TPU v4 (ISCA): 6 x 50 GB/s; {_HOP}"),
        Link("ici_v5e", 200, 1, 4, f"{_CLOUD} (v5e); {_HOP}"),
        Link("ici_v5p", 600, 1, 6, f"{_CLOUD} (v5p); {_HOP}"),
        Link("ici_v6e", 400, 1, 4, f"{_CLOUD} (v6e); {_HOP}"),
        Link("ici_tpu7x", 300, 1, 6, f"{_CLOUD} (TPU7x) and again: two devices a chip; {_HOP}"),
        Link(
            "dcn",
            6.25,
            100,
            1,
            "Google Cloud TPU v5p documentation: 50 Gb/s a chip; latency: guess",
        ),
        Link("memory", 0.25, 500, 1, "measured: ppermute on 8 simulated devices, two x86-64 cores"),
    )
)
"""Links by the name that a mesh file uses."""


def chip_of(device_kind: str) -> Chip:
    """The chip that JAX calls `device_kind`.

    Raises ValueError for a device that is not in CHIPS: peaks are looked up, never guessed.
    """
    kinds = {kind: chip for chip in CHIPS.values() for kind in chip.device_kinds}
    if device_kind not in kinds:
        near = nearest(device_kind, kinds)
        hint = f"; the nearest known is {near!r}" if near else ""
        raise ValueError(
            f"device kind {device_kind!r} is not in the table of chips{hint}. "
            f"Give its numbers in the mesh file: [chip] with {', '.join(required(Chip))}"
        )
    return kinds[device_kind]


def required(kind: type) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def read_table(
    kind: type[Table], table: Mapping[str, Any], section: str, problems: list[str]
) -> Table | None:
    """Returns a dataclass from the TOML table `section`, or None after adding to `problems`.

    Checked: unknown and missing keys, types, and that every number is positive.
    """
    hints, values, earlier = get_type_hints(kind), {}, len(problems)
    for key, value in table.items():
        if key not in hints:
            problems.append(f"{section}.{key} is not known{did_you_mean(key, hints)}")
        elif not _fits(value, hints[key]):
            problems.append(f"{section}.{key} = {value!r} must be {_expected(hints[key])}")
        else:
            values[key] = tuple(value) if isinstance(value, list) else value
    missing = [name for name in required(kind) if name not in table]
    if missing:
        problems.append(f"{section} lacks {', '.join(missing)}")
    return kind(**values) if len(problems) == earlier else None


def _fits(value: object, hint: object) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    kinds = get_args(hint) or (hint,)
    if isinstance(value, bool | str):
        return type(value) in kinds
    number = (int, float) if float in kinds else int
    return (int in kinds or float in kinds) and isinstance(value, number) and value > 0


def _expected(hint: object) -> str:
    if get_origin(hint) is tuple:
        return "a list of strings"
    kinds = get_args(hint) or (hint,)
    names = {float: "a positive number", int: "a positive integer", bool: "true or false"}
    return next((text for kind, text in names.items() if kind in kinds), "a string")


def lookup(
    kind: type[Table], rows: Mapping[str, Table], value: object, key: str, problems: list[str]
) -> Table | None:
    """Returns the row that `value` names, or the user's own row from a TOML table; None after
    adding to `problems`. key: of the mesh file."""
    if isinstance(value, Mapping):
        return read_table(kind, value, key, problems)
    if isinstance(value, str) and value in rows:
        return rows[value]
    if isinstance(value, str):
        near = did_you_mean(value, rows)
        problems.append(f"{key} = {value!r} is not known{near} (or give its table [{key}])")
    else:
        problems.append(f"{key} = {value!r} must be a name or a table")
    return None


def read_count(document: Mapping[str, Any], key: str, problems: list[str]) -> int | None:
    """Returns a positive integer of the document, or None if it is absent or wrong."""
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.append(f"{key} = {value!r} must be a positive integer")
    return None


def read_section(document: Mapping[str, Any], key: str, problems: list[str]) -> Mapping[str, Any]:
    """Returns a table of the document, empty if it is absent or wrong."""
    value = document.get(key, {})
    if isinstance(value, Mapping):
        return value
    problems.append(f"{key} = {value!r} must be a table: [{key}]")
    return {}
